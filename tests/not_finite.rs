//! Batches with a NaN at one token.

use grpo_backend_cpu::oracle;
use grpo_core::batch::PolicyValues;
use grpo_core::{
    Backend, BatchFile, Dtype, Error, GradientSpec, GradsMut, Implementation, LossOutput, LossPlan, PlanRequest,
    PolicyOutput, Tensor, Tiling, TokenBatch,
};
use half::bf16;

/// Returns two active tokens: the token with the largest gradient and, if there is one, a token that the loss clips or
/// leaves without a gradient.
pub fn tokens(file: &BatchFile) -> Vec<usize> {
    let PolicyOutput::Hidden { hidden, lm_head, bias } = file.policy.to_dtype(Dtype::F32) else {
        panic!("{}", file.name)
    };
    let wide = |tensor: &Tensor| match tensor {
        Tensor::F32(values) => values.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(),
        Tensor::Bf16(values) => values.iter().map(|x| x.to_f64()).collect(),
    };
    let (hidden, lm_head, bias) = (wide(&hidden), wide(&lm_head), bias.as_ref().map(wide));
    let layout = grpo_core::HeadLayout::VocabHidden;
    let policy = oracle::Policy::hidden(&hidden, &lm_head, bias.as_deref(), layout, file.vocab);
    let score = |batch: &_| {
        let scores = oracle::score(&file.loss, &policy, batch)?;
        Ok::<_, Error>(PolicyValues { logp: scores.logp, entropy: scores.entropy })
    };
    let counted = file.loss.prepare(&file.batch, score).unwrap().active_rows().to_vec();
    let gradient = oracle::evaluate(&file.loss, &policy, &file.batch).unwrap().grad_hidden;
    let size = |row: &usize| gradient[row * file.hidden..(row + 1) * file.hidden].iter().map(|g| g * g).sum::<f64>();
    let largest = counted.iter().copied().max_by(|a, b| size(a).total_cmp(&size(b)));
    let dead = counted.iter().copied().find(|row| size(row) == 0.0 && Some(*row) != largest);
    largest.into_iter().chain(dead).collect()
}

/// Sets the entry `at` to `value`.
pub fn poison(tensor: &mut Tensor, at: usize, value: f32) {
    match tensor {
        Tensor::F32(values) => values[at] = value,
        Tensor::Bf16(values) => values[at] = bf16::from_f32(value),
    }
}

/// The results of one call.
struct Called {
    out: LossOutput,
    hidden: Vec<f32>,
    lm_head: Vec<f32>,
}

fn call(plan: &mut dyn LossPlan, file: &BatchFile, policy: &PolicyOutput<Tensor>, batch: &TokenBatch) -> Called {
    let has_bias = policy.has_bias();
    let mut hidden = vec![0.0_f32; batch.tokens() * file.hidden];
    let (mut lm_head, mut bias) = (vec![0.0_f32; file.vocab * file.hidden], vec![0.0_f32; file.vocab]);
    let grads = GradsMut {
        hidden: Some((&mut hidden).into()),
        lm_head: Some((&mut lm_head).into()),
        bias: has_bias.then_some((&mut bias).into()),
        logits: None,
    };
    let out = plan.value_and_grad(policy.as_input(), batch, grads).unwrap();
    Called { out, hidden, lm_head }
}

/// Returns the batch with NaN in the lists of other policies at the masked tokens `masked`.
fn with_poisoned_lists(batch: &TokenBatch, masked: &[usize]) -> TokenBatch {
    let list = |list: Option<&[f32]>, values: [f32; 2]| {
        let mut list = list?.to_vec();
        masked.iter().enumerate().for_each(|(i, row)| list[*row] = values[i % 2]);
        Some(list)
    };
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let mut poisoned = batch.clone();
    if let Some(old) = list(batch.old_logp(), [nan, 5.0]) {
        poisoned = poisoned.with_old_logp(old).unwrap();
    }
    if let Some(reference) = list(batch.ref_logp(), [inf, nan]) {
        poisoned = poisoned.with_ref_logp(reference).unwrap();
    }
    if let Some(sampler) = list(batch.sampler_logp(), [-inf, 5.0]) {
        poisoned = poisoned.with_sampler_logp(sampler).unwrap();
    }
    poisoned
}

/// Asserts, for each of `implementations`, that a value that is not finite at an active token appears in the loss, in the log-probability
/// of this token only, and in its gradient; a value in the head appears at all tokens. At masked tokens it has no effect. Returns how many
/// tokens were tested, and how many of them had no gradient before.
pub fn assert_seen(
    backend: &dyn Backend,
    implementations: &[Implementation],
    file: &BatchFile,
    dtype: Dtype,
) -> [usize; 2] {
    let tokens = tokens(file);
    let masked: Vec<usize> = (0..file.batch.tokens()).filter(|row| !file.batch.is_active(*row)).collect();
    // A softcap maps an infinite logit to a finite one.
    let poisons =
        if file.loss.final_logit_softcapping.is_some() { vec![f32::NAN] } else { vec![f32::NAN, f32::INFINITY] };
    for implementation in implementations.iter().copied() {
        let policy = file.policy.to_dtype(dtype);
        let has_bias = policy.has_bias();
        let request = PlanRequest {
            loss: file.loss.clone().into(),
            implementation,
            tiling: Tiling::default(),
            max_tokens: file.batch.tokens(),
            policy: policy.spec(file.hidden, file.vocab),
            gradients: GradientSpec { hidden: true, lm_head: true, bias: has_bias },
        };
        let mut plan = backend.plan(&request).unwrap();
        let what = format!("{} {} on {}", file.name, implementation.name(), backend.name());
        let changed = |change: &dyn Fn(&mut Tensor, &mut Tensor)| {
            let mut policy = policy.clone();
            let PolicyOutput::Hidden { hidden, lm_head, .. } = &mut policy else { panic!("{what}") };
            change(hidden, lm_head);
            policy
        };
        for (row, value) in tokens.iter().flat_map(|row| poisons.iter().map(move |value| (*row, *value))) {
            let what = format!("{what}, {value} at token {row}");
            let policy = changed(&|hidden, _| poison(hidden, row * file.hidden, value));
            let Called { out, hidden, .. } = call(plan.as_mut(), file, &policy, &file.batch);
            assert!(out.loss.is_nan(), "{what}: the loss is {}", out.loss);
            for other in file.batch.active_rows() {
                assert_eq!(out.scores.logp[*other].is_nan(), *other == row, "{what}: token {other}");
            }
            let gradient = &hidden[row * file.hidden..(row + 1) * file.hidden];
            assert!(gradient.iter().all(|g| g.is_nan()), "{what}: {gradient:?}");
            let message = out.check_finite(&file.batch).unwrap_err().to_string();
            assert!(message.contains(&format!("logp at token {row} (sequence ")), "{what}: {message}");
        }
        if !tokens.is_empty() {
            // A token sees only the columns that its sampling mask keeps.
            let entries = match file.batch.sampling_mask() {
                Some(_) => 0..file.hidden * file.vocab,
                None => file.hidden + 1..file.hidden + 2,
            };
            let policy = changed(&|_, lm_head| entries.clone().for_each(|at| poison(lm_head, at, f32::NAN)));
            let Called { out, lm_head, .. } = call(plan.as_mut(), file, &policy, &file.batch);
            assert!(out.loss.is_nan() && lm_head.iter().any(|g| g.is_nan()), "{what}, head: {}", out.loss);
            assert!(file.batch.active_rows().iter().all(|row| out.scores.logp[*row].is_nan()), "{what}, head");
        }
        if !masked.is_empty() {
            let clean = call(plan.as_mut(), file, &policy, &file.batch);
            let policy = changed(&|hidden, _| {
                for (i, at) in masked.iter().flat_map(|row| row * file.hidden..(row + 1) * file.hidden).enumerate() {
                    poison(hidden, at, [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][i % 3]);
                }
            });
            let found = call(plan.as_mut(), file, &policy, &with_poisoned_lists(&file.batch, &masked));
            assert_eq!(found.out.loss.to_bits(), clean.out.loss.to_bits(), "{what}, masked");
            assert_eq!(
                (&found.out.scores, &found.out.metrics),
                (&clean.out.scores, &clean.out.metrics),
                "{what}, masked"
            );
            assert!(found.hidden == clean.hidden && found.lm_head == clean.lm_head, "{what}, masked");
        }
    }
    [tokens.len(), tokens.len().saturating_sub(1)]
}
