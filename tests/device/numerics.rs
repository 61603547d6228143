//! Values are rounded to bf16 only once, so that forward and backward pass agree.

use crate::evaluation::{Output, assert_matches, assert_same, report};
use crate::{SMALL, backend, chunks, grpo, gspo, implementations, on_mesh};
use grpo_backend_cpu::oracle::{Evaluation, Policy, evaluate};
use grpo_backend_tpu::PjrtPlan;
use grpo_backend_tpu::program::{Numerics, Role};
use grpo_core::parity::{Comparison, Tolerances};
use grpo_core::{Dtype, Error, GradientSpec, GradsMut, Implementation, LossConfig, LossPlan, TensorMut, Tiling};
use grpo_testkit::margin::{assert_below, largest_difference};
use grpo_testkit::{Case, Shape, config};
use half::bf16;
use rstest::rstest;

const BF16: Shape<'static> = Shape { dtype: Dtype::Bf16, ..SMALL };

fn planned(
    numerics: Numerics,
    case: &Case,
    loss: &LossConfig,
    implementation: Implementation,
    tiling: Tiling,
) -> PjrtPlan {
    backend().with_numerics(numerics).plan_on_device(&case.request(loss, implementation, tiling)).unwrap()
}

/// Computes logits in f64, rounds them once, and evaluates the oracle on them; computes the gradients with respect to hidden states and
/// head from its gradient of the logits.
fn oracle_of_rounded_logits(case: &Case, loss: &LossConfig) -> Evaluation<f64> {
    let Case { h, v, .. } = *case;
    let (hidden, head) = (case.hidden.in_f64(), case.lm_head.in_f64());
    let dot = |i: usize, j: usize| (0..h).map(|k| hidden[i * h + k] * head[j * h + k]).sum::<f64>();
    let n = case.tokens();
    let z: Vec<f64> = (0..n * v).map(|ij| bf16::from_f64(dot(ij / v, ij % v)).to_f64()).collect();
    let mut expected = evaluate(loss, &Policy::logits(&z, v), &case.batch).unwrap();
    let dz = &expected.grad_logits;
    let active = case.batch.active_rows();
    expected.grad_hidden = vec![0.0; n * h];
    expected.grad_lm_head = vec![0.0; v * h];
    for &i in active {
        for j in 0..v {
            for k in 0..h {
                expected.grad_hidden[i * h + k] += dz[i * v + j] * head[j * h + k];
                expected.grad_lm_head[j * h + k] += dz[i * v + j] * hidden[i * h + k];
            }
        }
    }
    expected
}

/// One rounding loses 7 bits. The result then matches the oracle of the rounded logits within f32's tolerance; a second rounding,
/// or a rounding in the forward pass only, would differ by 1e-3.
#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case::grpo(grpo())]
#[case::gspo(gspo())]
fn logits_are_rounded_to_bf16_once(#[case] loss: LossConfig) {
    let numerics = Numerics { logits: Dtype::Bf16, ..Numerics::default() };
    let case = Case::new(&loss, &BF16, 3);
    let (rounded, exact) = (oracle_of_rounded_logits(&case, &loss), case.oracle(&loss));
    let apart = rounded.logp.iter().zip(&exact.logp).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(apart > 1e-3, "rounding changes next to nothing: {apart:e}");
    for (name, implementation, tiling) in implementations() {
        let mut plan = planned(numerics, &case, &loss, implementation, tiling);
        let name = format!("{:?} {name}", loss.loss_type);
        let output = assert_matches(&name, &mut plan, &case, &rounded, &Tolerances::of(Dtype::Bf16));
        assert_same(&name, &plan.score(case.policy(), &case.batch).unwrap(), &output.scores);
    }
}

/// The gradient of the bias is the sum of dL/dlogits over tokens; its sum over the vocabulary is 0, because probabilities add up
/// to 1 if both passes see the same logits.
#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case(Dtype::F32)]
#[case(Dtype::Bf16)]
fn bias_gradient_sums_to_zero(#[case] logits: Dtype) {
    let loss = grpo();
    let case = Case::new(&loss, &Shape { bias: true, ..BF16 }, 3);
    for (name, implementation, tiling) in implementations() {
        let numerics = Numerics { logits, ..Numerics::default() };
        let mut plan = planned(numerics, &case, &loss, implementation, tiling);
        let mut output = Output { bias: Some(vec![0.0; 61]), hidden: Some(vec![0.0; 16 * 12]), ..Output::default() };
        output.lm_head = Some(vec![0.0; 61 * 12]);
        output.add(&mut plan, &case);
        let bias = output.bias.unwrap();
        let sum: f64 = bias.iter().map(|g| f64::from(*g)).sum();
        let size: f64 = bias.iter().map(|g| f64::from(g.abs())).sum();
        assert!(size > 1e-2, "{name}: {size:e}");
        assert_below(&format!("{name}: gradients of the bias sum to 0"), sum.abs() / size, 1e-6);
    }
}

/// dL/dlogits is rounded to bf16 before the products: errors of 2^-8 per term, which average out.
#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case::grpo(grpo())]
#[case::gspo(gspo())]
fn gradients_from_rounded_dlogits_stay_close(#[case] loss: LossConfig) {
    let numerics = Numerics { logits: Dtype::Bf16, dlogits: Dtype::Bf16, ..Numerics::default() };
    let case = Case::new(&loss, &BF16, 5);
    let expected = oracle_of_rounded_logits(&case, &loss);
    for (name, implementation, tiling) in implementations() {
        let mut plan = planned(numerics, &case, &loss, implementation, tiling);
        let name = format!("{:?} {name}", loss.loss_type);
        let tolerances = Tolerances { gradient: 1.0 / 256.0, ..Tolerances::of(Dtype::Bf16) };
        assert_matches(&name, &mut plan, &case, &expected, &tolerances);
    }
}

/// Gradients accumulated in bf16 stay on the devices and are rounded at every addition.
#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case((1, 1))]
#[case((2, 2))]
fn gradients_can_accumulate_in_bf16_on_the_device(#[case] (data, vocab): (usize, usize)) {
    let numerics = Numerics { gradients: Dtype::Bf16, ..Numerics::default() };
    for loss in [grpo(), gspo()] {
        let case = Case::new(&loss, &BF16, 7);
        let expected = case.oracle(&loss);
        for (name, implementation, tiling) in implementations() {
            let backend = on_mesh(data, vocab).with_numerics(numerics);
            let mut plan = backend.plan_on_device(&case.request(&loss, implementation, tiling)).unwrap();
            let mut hidden = plan.zeros(Role::GradHidden, case.tokens()).unwrap();
            let mut lm_head = plan.zeros(Role::GradLmHead, 0).unwrap();
            for _ in 0..2 {
                let grads = GradsMut {
                    hidden: Some(TensorMut::Device(&mut hidden)),
                    lm_head: Some(TensorMut::Device(&mut lm_head)),
                    ..GradsMut::default()
                };
                plan.value_and_grad(case.policy(), &case.batch, grads).unwrap();
            }
            let wide = |list: Vec<f32>| list.into_iter().map(f64::from).collect::<Vec<_>>();
            let twice = |list: &[f64]| list.iter().map(|g| 2.0 * g).collect::<Vec<_>>();
            let (hidden, lm_head) = (wide(hidden.to_host().unwrap()), wide(lm_head.to_host().unwrap()));
            assert!(hidden.iter().all(|g| bf16::from_f64(*g).to_f64() == *g));
            // One rounding to 8 bits per chunk and call.
            let tolerance = 8.0 / 256.0;
            report(
                &format!("bf16 sums {name}"),
                &[
                    Comparison::new("grad_hidden", &twice(&expected.grad_hidden), &hidden, 0.0, tolerance),
                    Comparison::new("grad_lm_head", &twice(&expected.grad_lm_head), &lm_head, 0.0, tolerance),
                ],
            );
        }
    }
}

/// Host gradients are f32: a plan that accumulates in bf16 refuses them.
#[test]
fn bf16_accumulation_is_refused_for_host_gradients() {
    let loss = grpo();
    let case = Case::new(&loss, &BF16, 7);
    let numerics = Numerics { gradients: Dtype::Bf16, ..Numerics::default() };
    let mut plan = planned(numerics, &case, &loss, Implementation::Fused, chunks(5));
    let mut output = Output::begin(&case.oracle(&loss), GradientSpec::default());
    let before = output.clone();
    let error = plan.value_and_grad(case.policy(), &case.batch, output.grads()).unwrap_err();
    assert!(matches!(&error, Error::Shape { what, .. } if what.contains("grad")), "{error}");
    assert_eq!((output.hidden, output.lm_head), (before.hidden, before.lm_head));
}

#[rstest]
#[case::logits(Numerics { logits: Dtype::Bf16, ..Numerics::default() })]
#[case::dlogits(Numerics { dlogits: Dtype::Bf16, ..Numerics::default() })]
#[case::gradients(Numerics { gradients: Dtype::Bf16, ..Numerics::default() })]
fn rounding_f32_inputs_is_refused(#[case] numerics: Numerics) {
    let case = Case::new(&grpo(), &SMALL, 1);
    for (_, implementation, tiling) in implementations() {
        let request = case.request(&grpo(), implementation, tiling);
        let error = backend().with_numerics(numerics).plan_on_device(&request).err().expect("f32 is not to be rounded");
        assert!(matches!(&error, Error::Config(message) if message.contains("bf16")), "{error}");
    }
}

/// Without the entropy all other results are the same, and an entropy bonus is refused.
#[test]
fn entropy_can_be_disabled() {
    let without = Numerics { entropy: false, ..Numerics::default() };
    let plain = config(r#"{"loss_type": "grpo", "epsilon_high": 0.28, "beta": 0.04, "temperature": 0.9}"#);
    let case = Case::new(&plain, &SMALL, 1);
    for (_, implementation, tiling) in implementations() {
        let request = case.request(&plain, implementation, tiling);
        let outputs = [Numerics::default(), without].map(|numerics| {
            let mut plan = backend().with_numerics(numerics).plan_on_device(&request).unwrap();
            let mut output = Output::begin(&case.oracle(&plain), request.gradients);
            output.add(&mut plan, &case);
            output
        });
        let [with, without] = &outputs;
        assert!(with.scores.entropy.iter().any(|e| *e > 0.0) && without.scores.entropy.iter().all(|e| *e == 0.0));
        assert!(with.hidden.is_some());
        assert_below("loss without the entropy", (with.loss - without.loss).abs(), 1e-6);
        for (a, b) in [(&with.hidden, &without.hidden), (&with.lm_head, &without.lm_head)] {
            let pairs = a.iter().flatten().zip(b.iter().flatten());
            let (with, without): (Vec<_>, Vec<_>) = pairs.map(|(a, b)| (f64::from(*a), f64::from(*b))).unzip();
            assert!(!with.is_empty());
            assert_below("gradients without the entropy", largest_difference(&with, &without), 1e-6);
        }
    }
    for loss in [grpo(), gspo()] {
        let request = case.request(&loss, Implementation::Fused, chunks(3));
        let error = backend().with_numerics(without).plan_on_device(&request).err().expect("a bonus needs the entropy");
        assert!(matches!(&error, Error::Config(message) if message.contains("entropy")), "{error}");
    }
}
