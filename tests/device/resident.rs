//! Tensors that stay on the devices between steps.

use crate::evaluation::{Output, largest};
use crate::{SMALL, backend, chunks, grpo, gspo, on_mesh, panels};
use grpo_backend_tpu::program::Role;
use grpo_backend_tpu::{PjrtPlan, PjrtTensor};
use grpo_core::parity::Tolerances;
use grpo_core::{
    DeviceTensor, Dtype, Error, GradsMut, Implementation, LossConfig, LossPlan, PlanRequest, PolicyInput, Scores,
    TensorMut, TensorRef, Tiling,
};
use grpo_testkit::margin::largest_difference;
use grpo_testkit::{Case, Shape};
use rstest::rstest;
use std::any::Any;

/// A policy on the devices.
struct Resident {
    hidden: PjrtTensor,
    lm_head: PjrtTensor,
}

impl Resident {
    fn new(plan: &PjrtPlan, case: &Case) -> Self {
        Self {
            hidden: plan.upload(Role::Hidden, case.tokens(), case.hidden.as_ref()).unwrap(),
            lm_head: plan.upload(Role::LmHead, 0, case.lm_head.as_ref()).unwrap(),
        }
    }

    fn policy(&self) -> PolicyInput<'_> {
        let (hidden, lm_head) = ((&self.hidden).into(), (&self.lm_head).into());
        PolicyInput::Hidden { hidden, lm_head, bias: None }
    }
}

/// Asserts that an error is about the shape of `what`.
#[track_caller]
fn assert_shape<T>(result: Result<T, Error>, what: &str) {
    match result.err().expect("refused") {
        Error::Shape { what: found, .. } => assert!(found.contains(what), "{found}"),
        error => panic!("{error}"),
    }
}

fn grads<'a>(hidden: &'a mut PjrtTensor, lm_head: &'a mut PjrtTensor) -> GradsMut<'a> {
    let (hidden, lm_head) = (hidden.into(), lm_head.into());
    GradsMut { hidden: Some(hidden), lm_head: Some(lm_head), ..GradsMut::default() }
}

#[rstest]
#[case::chunks(Implementation::Fused, chunks(5), (1, 1), Dtype::F32)]
#[case::mesh(Implementation::Fused, chunks(3), (2, 4), Dtype::Bf16)]
#[ignore = "GRPO_TESTS=all"]
#[case::chunks(Implementation::Fused, chunks(5), (1, 1), Dtype::Bf16)]
#[ignore = "GRPO_TESTS=all"]
#[case::mesh(Implementation::Fused, chunks(3), (2, 4), Dtype::F32)]
#[ignore = "GRPO_TESTS=all"]
#[case::panels(Implementation::Fused, panels(16), (1, 1), Dtype::F32)]
#[ignore = "GRPO_TESTS=all"]
#[case::panels(Implementation::Fused, panels(16), (1, 1), Dtype::Bf16)]
#[ignore = "GRPO_TESTS=all"]
#[case::dense(Implementation::Reference, Tiling::default(), (1, 1), Dtype::F32)]
#[ignore = "GRPO_TESTS=all"]
#[case::dense(Implementation::Reference, Tiling::default(), (1, 1), Dtype::Bf16)]
fn three_steps_on_the_device_match_the_host(
    #[case] implementation: Implementation,
    #[case] tiling: Tiling,
    #[case] (data, vocab): (usize, usize),
    #[case] dtype: Dtype,
) {
    for loss in [grpo(), gspo()] {
        let case = Case::new(&loss, &Shape { dtype, ..SMALL }, 23);
        let request = case.request(&loss, implementation, tiling.clone());
        let mut plan = on_mesh(data, vocab).plan_on_device(&request).unwrap();
        let resident = Resident::new(&plan, &case);
        let mut hidden = plan.zeros(Role::GradHidden, case.tokens()).unwrap();
        let mut lm_head = plan.zeros(Role::GradLmHead, 0).unwrap();
        let mut host = Output {
            hidden: Some(vec![0.0; case.tokens() * case.h]),
            lm_head: Some(vec![0.0; case.v * case.h]),
            ..Output::default()
        };
        for _ in 0..3 {
            let (before, result) = (host.loss, {
                let grads = grads(&mut hidden, &mut lm_head);
                plan.value_and_grad_on_device(resident.policy(), &case.batch, grads).unwrap()
            });
            host.add(&mut plan, &case);
            assert_eq!(result.loss, host.loss - before);
            assert_eq!(result.logp.to_host().unwrap(), host.scores.logp);
            assert_eq!(result.entropy.to_host().unwrap(), host.scores.entropy);
            assert_eq!(&Some(hidden.to_host().unwrap()), &host.hidden);
            assert_eq!(&Some(lm_head.to_host().unwrap()), &host.lm_head);
        }
        let [logp, entropy] = plan.score_on_device(resident.policy(), &case.batch).unwrap();
        assert_eq!((logp.role(), logp.elements()), (Role::Logp, case.tokens()));
        let scored = Scores { logp: logp.to_host().unwrap(), entropy: entropy.to_host().unwrap() };
        crate::evaluation::assert_same("on the devices", &scored, &host.scores);
        // Three times the gradient.
        let expected = case.oracle(&loss).grad_lm_head;
        let largest = largest(&expected);
        for (found, expected) in lm_head.to_host().unwrap().iter().zip(&expected) {
            let off = (f64::from(*found) / 3.0 - expected).abs();
            assert!(off <= Tolerances::of(dtype).gradient * largest, "{found} for three times {expected}");
        }
    }
}

/// Gradients on the host with a policy on the devices, and the reverse.
#[test]
fn host_and_device_tensors_can_be_mixed() {
    let loss = grpo();
    let case = Case::new(&loss, &SMALL, 2);
    let mut plan = backend().plan_on_device(&case.request(&loss, Implementation::Fused, chunks(5))).unwrap();
    let resident = Resident::new(&plan, &case);
    let mut host = Output::begin(&case.oracle(&loss), Default::default());
    let mut hidden = plan.upload(Role::GradHidden, case.tokens(), host.hidden.as_ref().unwrap().into()).unwrap();
    let mut lm_head = host.lm_head.clone().unwrap();
    host.add(&mut plan, &case);
    let mixed = GradsMut {
        hidden: Some(TensorMut::Device(&mut hidden)),
        lm_head: Some((&mut lm_head).into()),
        ..GradsMut::default()
    };
    plan.value_and_grad(resident.policy(), &case.batch, mixed).unwrap();
    assert_eq!((Some(hidden.to_host().unwrap()), Some(lm_head)), (host.hidden, host.lm_head));
}

/// Logits on the device that the loss overwrites: the returned buffer holds their gradient.
#[rstest]
fn device_logits_are_overwritten_with_their_gradient(#[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype) {
    let loss = gspo();
    let case = Case::new(&loss, &Shape { dtype, ..SMALL }, 8);
    let z = crate::logits::logits(&case);
    let mut plan = backend().plan_on_device(&crate::logits::request(&case, &loss, Implementation::Logits)).unwrap();
    let mut logits = plan.upload(Role::Logits, case.tokens(), z.as_ref()).unwrap();
    let scores = plan.score(PolicyInput::Logits(TensorRef::Device(&logits)), &case.batch).unwrap();
    let unchanged = logits.to_host().unwrap();
    assert!(unchanged.iter().zip(z.iter()).all(|(a, b)| a == b || (a.is_nan() && b.is_nan())));
    let output = plan.value_and_grad_in_place(TensorMut::Device(&mut logits), &case.batch).unwrap();
    crate::evaluation::assert_same("in place", &scores, &output.scores);
    let expected = crate::logits::oracle(&case, &loss, &z).grad_logits;
    let largest = largest(&expected);
    let tolerance = if dtype == Dtype::F32 { 2e-5 } else { 1.0 / 256.0 };
    let found: Vec<f64> = logits.to_host().unwrap().into_iter().map(f64::from).collect();
    crate::evaluation::assert_within("gradients in place", largest_difference(&found, &expected) / largest, tolerance);
}

/// A tensor of another backend.
#[derive(Debug)]
struct Foreign;

impl DeviceTensor for Foreign {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

fn planned(loss: &LossConfig) -> (Case, PjrtPlan) {
    let case = Case::new(loss, &SMALL, 4);
    let plan = backend().plan_on_device(&case.request(loss, Implementation::Fused, chunks(5))).unwrap();
    (case, plan)
}

#[test]
fn tensor_of_another_backend_is_refused() {
    let (case, mut plan) = planned(&grpo());
    let policy = |hidden| PolicyInput::Hidden { hidden, lm_head: case.lm_head.as_ref(), bias: None };
    let error = plan.score(policy(TensorRef::Device(&Foreign)), &case.batch).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { what, .. } if what.contains("Foreign")), "{error}");

    let (mut foreign, mut hidden) = (Foreign, vec![0.0; case.tokens() * case.h]);
    let grads = GradsMut {
        hidden: Some((&mut hidden).into()),
        lm_head: Some(TensorMut::Device(&mut foreign)),
        ..GradsMut::default()
    };
    let error = plan.value_and_grad(case.policy(), &case.batch, grads).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { what, .. } if what.contains("grad_lm_head")), "{error}");
    assert!(hidden.iter().all(|g| *g == 0.0));
}

/// Arguments are checked before any buffer is donated: uploaded tensors stay valid.
#[test]
fn device_tensors_of_wrong_shape_or_role_are_refused() {
    let loss = grpo();
    let (case, mut plan) = planned(&loss);
    let resident = Resident::new(&plan, &case);
    let mut hidden = plan.zeros(Role::GradHidden, case.tokens()).unwrap();
    let mut lm_head = plan.zeros(Role::GradLmHead, 0).unwrap();

    // Uploads with another length, another dtype, or more tokens than planned.
    assert_shape(plan.upload(Role::Hidden, 16, TensorRef::F32(&[0.0; 5])), "hidden");
    assert_shape(plan.upload(Role::Hidden, 16, TensorRef::Bf16(&[half::bf16::ZERO; 192])), "hidden");
    assert_shape(plan.upload(Role::Hidden, 17, TensorRef::F32(&[0.0; 204])), "tokens");
    assert_shape(plan.upload(Role::Hidden, 16, TensorRef::Device(&resident.hidden)), "hidden");

    // A tensor in the wrong role, and a tensor for batches of another size.
    let head = || TensorRef::from(&resident.lm_head);
    let policy = PolicyInput::Hidden { hidden: head(), lm_head: head(), bias: None };
    assert_shape(plan.score(policy, &case.batch), "hidden");
    let part = case.select(0..2);
    assert_shape(plan.value_and_grad(resident.policy(), &part.batch, grads(&mut hidden, &mut lm_head)), "");
    assert_shape(plan.value_and_grad(resident.policy(), &case.batch, grads(&mut lm_head, &mut hidden)), "");

    // Tensors of a plan with other shapes, and of a plan on other devices.
    let other = Case::new(&loss, &Shape { v: 60, ..SMALL }, 4);
    let others = backend().plan_on_device(&other.request(&loss, Implementation::Fused, chunks(5))).unwrap();
    assert_shape(plan.score(Resident::new(&others, &other).policy(), &case.batch), "");
    let others = on_mesh(2, 1).plan_on_device(&case.request(&loss, Implementation::Fused, chunks(5))).unwrap();
    assert_shape(plan.score(Resident::new(&others, &case).policy(), &case.batch), "");

    // Nothing was lost, and tensors of another plan with the same shapes fit.
    plan.value_and_grad(resident.policy(), &case.batch, grads(&mut hidden, &mut lm_head)).unwrap();
    let twin = backend().plan_on_device(&case.request(&gspo(), Implementation::Reference, Tiling::default())).unwrap();
    plan.value_and_grad(Resident::new(&twin, &case).policy(), &case.batch, grads(&mut hidden, &mut lm_head)).unwrap();
}

/// The checks of `grpo_core` apply to device tensors, too.
#[test]
fn missing_gradient_buffer_is_refused() {
    let (case, mut plan) = planned(&grpo());
    let resident = Resident::new(&plan, &case);
    let mut hidden = plan.zeros(Role::GradHidden, case.tokens()).unwrap();
    let grads = GradsMut { hidden: Some(TensorMut::Device(&mut hidden)), ..GradsMut::default() };
    let error = plan.value_and_grad(resident.policy(), &case.batch, grads).unwrap_err();
    assert!(matches!(&error, Error::Config(message) if message.contains("lm_head")), "{error}");
    assert!(hidden.to_host().unwrap().iter().all(|g| *g == 0.0));
    let request = PlanRequest { max_tokens: 3, ..case.request(&grpo(), Implementation::Fused, chunks(5)) };
    let mut small = backend().plan_on_device(&request).unwrap();
    assert_shape(small.score(case.policy(), &case.batch), "tokens");
}
