//! Precomputed logits: their gradient added to a buffer, or written in place.

use crate::evaluation::{assert_same, largest, report};
use crate::{SMALL, backend, cispo, grpo, gspo};
use grpo_backend_cpu::oracle::{Evaluation, Policy, evaluate};
use grpo_core::parity::{Comparison, Tolerances};
use grpo_core::{
    Dtype, GradientSpec, GradsMut, Implementation, LossConfig, LossPlan, PlanRequest, PolicyInput, PolicySpec,
    TensorMut, Tiling,
};
use grpo_testkit::margin::assert_below;
use grpo_testkit::{Case, Shape, Tensor};
use half::bf16;
use rstest::rstest;

/// Returns the logits of a case, NaN in masked rows.
pub(crate) fn logits(case: &Case) -> Tensor {
    let Case { h, v, .. } = *case;
    let row = |i: usize| &case.hidden[i * h..(i + 1) * h];
    let dot = |i: usize, j: usize| row(i).iter().zip(&case.lm_head[j * h..]).map(|(a, b)| a * b).sum::<f32>();
    Tensor::new((0..case.tokens()).flat_map(|i| (0..v).map(move |j| dot(i, j))).collect(), case.dtype())
}

pub(crate) fn oracle(case: &Case, loss: &LossConfig, logits: &Tensor) -> Evaluation<f64> {
    evaluate(loss, &Policy::logits(&logits.in_f64(), case.v), &case.batch).unwrap()
}

pub(crate) fn request(case: &Case, loss: &LossConfig, implementation: Implementation) -> PlanRequest {
    PlanRequest {
        loss: loss.clone().into(),
        implementation,
        tiling: Tiling::default(),
        max_tokens: case.tokens(),
        policy: PolicySpec::Logits { vocab: case.v, dtype: case.dtype() },
        gradients: GradientSpec::default(),
    }
}

/// Checks loss, scores, and both forms of the gradient.
pub(crate) fn check(name: &str, plan: &mut dyn LossPlan, case: &Case, loss: &LossConfig) {
    let z = logits(case);
    let expected = oracle(case, loss, &z);
    let (n, v, dtype) = (case.tokens(), case.v, case.dtype());
    let tolerances = Tolerances::of(dtype);
    let largest = largest(&expected.grad_logits);
    assert!(largest > 1e-3, "{name}: the largest gradient is {largest}");
    let wide = |list: &[f32]| list.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    let active = |list: &[f64]| case.batch.active_rows().iter().map(|i| list[*i]).collect::<Vec<_>>();

    let begin = largest as f32 / 4.0;
    let mut grad = vec![begin; n * v];
    let grads = GradsMut { logits: Some((&mut grad).into()), ..GradsMut::default() };
    let added = plan.value_and_grad(PolicyInput::Logits(z.as_ref()), &case.batch, grads).unwrap();
    assert_same(name, &plan.score(PolicyInput::Logits(z.as_ref()), &case.batch).unwrap(), &added.scores);
    let made: Vec<f64> = grad.iter().map(|g| f64::from(*g) - f64::from(begin)).collect();
    let (logp, entropy) = (active(&wide(&added.scores.logp)), active(&wide(&added.scores.entropy)));
    report(
        name,
        &[
            Comparison::new("loss", &[expected.loss], &[added.loss], expected.magnitude.max(1.0), tolerances.loss),
            Comparison::new("logp", &active(&expected.logp), &logp, 1.0, tolerances.logp),
            Comparison::new("entropy", &active(&expected.entropy), &entropy, 1.0, tolerances.entropy),
            Comparison::new("grad_logits", &expected.grad_logits, &made, 0.0, tolerances.gradient),
        ],
    );
    crate::evaluation::assert_metrics(name, &added.metrics, &expected.metrics);
    for i in (0..n).filter(|i| !case.batch.is_active(*i)) {
        assert!(grad[i * v..(i + 1) * v].iter().all(|g| *g == begin), "{name}: gradient of masked row {i}");
    }

    // Scoring must not change logits, even if a loss may overwrite them.
    let (mut wide_z, mut narrow_z) = (z.to_vec(), z.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>());
    fn place<'a>(dtype: Dtype, wide: &'a mut [f32], narrow: &'a mut [bf16]) -> TensorMut<'a> {
        match dtype {
            Dtype::F32 => TensorMut::F32(wide),
            Dtype::Bf16 => TensorMut::Bf16(narrow),
        }
    }
    let logits = place(dtype, &mut wide_z, &mut narrow_z);
    let scores = plan.score(PolicyInput::Logits(logits.as_ref()), &case.batch).unwrap();
    assert_same(name, &scores, &added.scores);
    let same = |a: &f32, b: &f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    assert!(wide_z.iter().zip(z.iter()).all(|(a, b)| same(a, b)), "{name}: score has written to the logits");
    let in_place = plan.value_and_grad_in_place(place(dtype, &mut wide_z, &mut narrow_z), &case.batch).unwrap();
    assert_same(name, &in_place.scores, &added.scores);
    assert_below(&format!("{name}, loss in place"), (in_place.loss - added.loss).abs() / expected.magnitude, 1e-6);
    let (found, tolerance) = match dtype {
        Dtype::F32 => (wide_z, tolerances.gradient),
        // Rounded once, to 8 bits.
        Dtype::Bf16 => (narrow_z.iter().map(|x| x.to_f32()).collect(), 1.0 / 256.0),
    };
    report(name, &[Comparison::new("in place", &expected.grad_logits, &wide(&found), 0.0, tolerance)]);
    let sums = found.chunks(v).map(|row| row.iter().map(|g| f64::from(*g)).sum::<f64>().abs()).fold(0.0, f64::max);
    // With a softcap the gradient of a row does not sum to 0.
    let balanced = loss.final_logit_softcapping.is_none();
    if balanced {
        assert_below(&format!("{name}: gradients of a row sum to 0"), sums / largest, 2.0 * tolerance);
    }
}

#[rstest]
#[case(grpo(), Dtype::F32, Implementation::Logits)]
#[case(gspo(), Dtype::Bf16, Implementation::Logits)]
#[case(cispo(), Dtype::F32, Implementation::Reference)]
fn precomputed_logits_match_the_oracle(
    #[case] loss: LossConfig,
    #[case] dtype: Dtype,
    #[case] implementation: Implementation,
) {
    check_logits(loss, dtype, implementation);
}

#[rstest]
#[case::grpo(grpo())]
#[case::cispo(cispo())]
#[case::gspo(gspo())]
#[ignore = "GRPO_TESTS=all"]
fn precomputed_logits_of_every_dtype_match_the_oracle(
    #[case] loss: LossConfig,
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
    #[values(Implementation::Reference, Implementation::Logits)] implementation: Implementation,
) {
    check_logits(loss, dtype, implementation);
}

fn check_logits(loss: LossConfig, dtype: Dtype, implementation: Implementation) {
    let case = Case::new(&loss, &Shape { dtype, ..SMALL }, 3);
    let mut plan = backend().plan_on_device(&request(&case, &loss, implementation)).unwrap();
    let name = format!("{:?} {} {}", loss.loss_type, dtype.name(), implementation.name());
    check(&name, &mut plan, &case, &loss);
}

/// Vocabularies of one to three entries, and logits that overflow a naive exponential.
#[rstest]
#[case(1, 30.0)]
#[case(2, 1.0)]
#[case(3, 1e4)]
fn extreme_logits_match_the_oracle(#[case] v: usize, #[case] scale: f32) {
    check_extreme_logits(v, scale);
}

#[rstest]
#[ignore = "GRPO_TESTS=all"]
fn extreme_logits_of_every_size_match_the_oracle(#[values(1, 2, 3)] v: usize, #[values(1.0, 30.0, 1e4)] scale: f32) {
    check_extreme_logits(v, scale);
}

fn check_extreme_logits(v: usize, scale: f32) {
    // Without an entropy bonus and a KL term, whose parts may cancel nearly all of a row's gradient.
    let loss = LossConfig { entropy_coef: 0.0, beta: 0.0, ..grpo() };
    let case = Case::new(&loss, &Shape { v, ..SMALL }, 31);
    let z = logits(&case).with(|logits| logits.iter_mut().for_each(|z| *z *= scale));
    let expected = oracle(&case, &loss, &z);
    for implementation in [Implementation::Reference, Implementation::Logits] {
        let mut plan = backend().plan_on_device(&request(&case, &loss, implementation)).unwrap();
        let mut found = z.to_vec();
        let output = plan.value_and_grad_in_place((&mut found).into(), &case.batch).unwrap();
        let name = format!("V {v}, logits x {scale}");
        for i in case.batch.active_rows() {
            let off = (f64::from(output.scores.logp[*i]) - expected.logp[*i]).abs();
            // A log-probability near 0 is the exponential of a difference of logits and has their precision.
            let by_logits = 2e-5 + 2.0 * f64::from(f32::EPSILON * scale * 10.0);
            let tolerance = if expected.logp[*i] < -1.0 { 1e-6 } else { by_logits };
            assert_below(&format!("{name}: logp"), off, tolerance * expected.logp[*i].abs() + 1e-37);
            let row = i * v..(i + 1) * v;
            let (found, expected) = (&found[row.clone()], &expected.grad_logits[row]);
            let largest = largest(expected);
            // Ratios are below 1e-30: smaller terms of their derivatives underflow.
            for (f, e) in found.iter().zip(expected) {
                let off = (f64::from(*f) - e).abs();
                assert!(off <= by_logits * largest + 1e-30, "{name}: {f} for {e}, of {largest:e}");
            }
        }
    }
}
