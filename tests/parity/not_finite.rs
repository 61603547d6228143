//! NaN at one token of a batch: every loss of the golden files, every implementation, every backend.

use backend_cpu::reference;
use grpo_check::parity;
use grpo_core::factors::PolicyValues;
use grpo_core::format::{Policy, Tensor};
use grpo_core::{Backend, BatchFile, Dtype, Error, GradientSpec, GradsMut, Implementation, PlanRequest, Tiling};
use half::bf16;

/// Two tokens that the loss counts: the one with the largest gradient and, where there is one, one that the loss clips or
/// leaves without a gradient.
fn tokens(file: &BatchFile) -> Vec<usize> {
    let Policy::Hidden { hidden, lm_head, bias } = file.policy.to_dtype(Dtype::F32) else { panic!("{}", file.name) };
    let wide = |tensor: &Tensor| match tensor {
        Tensor::F32(values) => values.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(),
        Tensor::Bf16(values) => values.iter().map(|x| x.to_f64()).collect(),
    };
    let (hidden, lm_head, bias) = (wide(&hidden), wide(&lm_head), bias.as_ref().map(wide));
    let layout = grpo_core::HeadLayout::VocabHidden;
    let policy = reference::Policy::Hidden {
        hidden: &hidden,
        lm_head: &lm_head,
        bias: bias.as_deref(),
        layout,
        vocab: file.vocab,
    };
    let score = |batch: &_| {
        let scores = reference::score(&file.loss, &policy, batch)?;
        Ok::<_, Error>(PolicyValues { logp: scores.logp, entropy: scores.entropy })
    };
    let counted = file.loss.prepare(&file.batch, score).unwrap().active_rows().to_vec();
    let gradient = reference::evaluate(&file.loss, &policy, &file.batch).unwrap().grad_hidden;
    let size = |row: &usize| gradient[row * file.hidden..(row + 1) * file.hidden].iter().map(|g| g * g).sum::<f64>();
    let largest = counted.iter().copied().max_by(|a, b| size(a).total_cmp(&size(b)));
    let dead = counted.iter().copied().find(|row| size(row) == 0.0 && Some(*row) != largest);
    largest.into_iter().chain(dead).collect()
}

fn poison(tensor: &mut Tensor, at: usize) {
    match tensor {
        Tensor::F32(values) => values[at] = f32::NAN,
        Tensor::Bf16(values) => values[at] = bf16::NAN,
    }
}

/// Asserts that a NaN in the hidden states of a token is seen: in the loss, in the token's log-probability and no other, in
/// its gradient. Returns how many tokens were tried, and how many of those had no gradient before.
pub(crate) fn assert_seen(backend: &dyn Backend, file: &BatchFile, dtype: Dtype) -> [usize; 2] {
    let tokens = tokens(file);
    for implementation in Implementation::ALL {
        let policy = file.policy.to_dtype(dtype);
        let has_bias = matches!(policy, Policy::Hidden { bias: Some(_), .. });
        let request = PlanRequest {
            loss: file.loss.clone(),
            implementation,
            tiling: Tiling::default(),
            max_tokens: file.batch.tokens(),
            policy: policy.spec(file.hidden, file.vocab),
            gradients: GradientSpec { hidden: true, lm_head: true, bias: has_bias },
        };
        let mut plan = backend.plan(&request).unwrap();
        for row in &tokens {
            let what = format!("{} {} on {}, token {row}", file.name, implementation.name(), backend.name());
            let mut policy = policy.clone();
            let Policy::Hidden { hidden, .. } = &mut policy else { panic!("{what}") };
            poison(hidden, row * file.hidden);
            let mut grad_hidden = vec![0.0_f32; file.batch.tokens() * file.hidden];
            let (mut grad_head, mut grad_bias) = (vec![0.0_f32; file.vocab * file.hidden], vec![0.0_f32; file.vocab]);
            let grads = GradsMut {
                hidden: Some((&mut grad_hidden).into()),
                lm_head: Some((&mut grad_head).into()),
                bias: has_bias.then_some((&mut grad_bias).into()),
                logits: None,
            };
            let out = plan.value_and_grad(policy.as_input(), &file.batch, grads).unwrap();
            assert!(out.loss.is_nan(), "{what}: the loss is {}", out.loss);
            for other in file.batch.active_rows() {
                assert_eq!(out.scores.logp[*other].is_nan(), other == row, "{what}: token {other}");
            }
            let gradient = &grad_hidden[row * file.hidden..(row + 1) * file.hidden];
            assert!(gradient.iter().all(|g| g.is_nan()), "{what}: {gradient:?}");
            let message = out.check_finite(&file.batch).unwrap_err().to_string();
            assert!(message.contains(&format!("logp at token {row} (sequence ")), "{what}: {message}");
        }
    }
    [tokens.len(), tokens.len().saturating_sub(1)]
}

/// What parity and the loss file are made of refuses such a batch by the token's name.
#[test]
fn an_evaluation_names_the_token() {
    let file = crate::golden::files().into_iter().find(|file| file.name == "trl_grpo_default").unwrap();
    let row = tokens(&file)[0];
    let mut policy = file.policy.clone();
    let Policy::Hidden { hidden, .. } = &mut policy else { panic!("hidden states") };
    poison(hidden, row * file.hidden);
    for backend in crate::backends() {
        for implementation in Implementation::ALL {
            let error = parity::evaluate(backend.as_ref(), implementation, &file.loss, &file, &policy).unwrap_err();
            assert!(error.to_string().contains(&format!("logp at token {row} (sequence ")), "{error}");
        }
    }
}
