//! [`GrpoLoss`] on a PJRT device: the same calls as on a CPU, with host slices and with tensors on the device.

use crate::SMALL;
use crate::backend;
use crate::evaluation::assert_same;
use crate::grpo;
use grpo_backend_tpu::program::Role;
use grpo_core::{Error, GradientSpec, Grads, GrpoLoss, Implementation, PolicyInput, Tiling};
use grpo_testkit::Case;
use grpo_testkit::margin::assert_below;

#[test]
fn grpo_loss_step_equals_the_plan_for_host_and_device_tensors() {
    let case = Case::new(&grpo(), &SMALL, 4);
    let Case { h, v, .. } = case;
    let request = case.request(&grpo(), Implementation::Fused, Tiling::default());
    let mut plan = backend().plan_on_device(&request).unwrap();
    let mut expected = Grads::zeros(request.policy, request.gradients, case.tokens()).unwrap();
    let out = grpo_core::LossPlan::value_and_grad(&mut plan, case.policy(), &case.batch, expected.as_mut()).unwrap();
    assert!(expected.lm_head.as_ref().unwrap().iter().any(|g| g.abs() > 1e-3));

    let loss = GrpoLoss::builder(grpo()).head(h, v).max_tokens(case.tokens()).build(&backend()).unwrap();
    assert_eq!(loss.gradients(), GradientSpec { hidden: true, lm_head: true, bias: false });
    let (found, owned) = loss.step_owned(case.policy(), &case.batch).unwrap();
    assert_eq!((found.loss, &owned), (out.loss, &expected));
    assert_same("owned", &found.scores, &out.scores);
    assert_same("scored", &loss.score_policy(case.policy(), &case.batch).unwrap(), &out.scores);

    let upload = |role, tokens, tensor| plan.upload(role, tokens, tensor).unwrap();
    let hidden = upload(Role::Hidden, case.tokens(), case.hidden.as_ref());
    let lm_head = upload(Role::LmHead, 0, case.lm_head.as_ref());
    let mut dhidden = plan.zeros(Role::GradHidden, case.tokens()).unwrap();
    let mut dlm_head = plan.zeros(Role::GradLmHead, 0).unwrap();
    let shared = GrpoLoss::builder(grpo()).head(h, v).max_tokens(case.tokens());
    // Tensors belong to the devices of one client, so both backends share it.
    let resident = shared.build(&backend()).unwrap();
    resident.step(&hidden, &lm_head, &case.batch, Grads::new(&mut dhidden, &mut dlm_head)).unwrap();
    assert_eq!(Some(dhidden.to_host().unwrap()), expected.hidden);
    assert_eq!(Some(dlm_head.to_host().unwrap()), expected.lm_head);
}

#[test]
fn grpo_loss_compiles_for_larger_batches_and_returns_backend_errors() {
    let case = Case::new(&grpo(), &SMALL, 4);
    let Case { h, v, .. } = case;
    let loss = GrpoLoss::builder(grpo()).head(h, v).build(&backend()).unwrap();
    let small = case.select(0..1);
    let few = loss.score_policy(small.policy(), &small.batch).unwrap();
    assert_eq!(loss.max_tokens(), small.tokens());
    let all = loss.score_policy(case.policy(), &case.batch).unwrap();
    assert_eq!(loss.max_tokens(), case.tokens());
    for row in small.batch.active_rows() {
        let off = (few.logp[*row] - all.logp[*row]).abs() / all.logp[*row].abs();
        assert_below(&format!("token {row}"), off.into(), 1e-5);
    }
    let fused = GrpoLoss::builder(grpo()).logits(v).implementation(Implementation::Fused).max_tokens(4);
    assert!(matches!(fused.build(&backend()), Err(Error::Unsupported { .. })));
    let logits = crate::logits::logits(&case);
    let loss = GrpoLoss::builder(grpo()).logits(v).build(&backend()).unwrap();
    let batch = &case.batch;
    let (out, grads) = loss.step_owned(PolicyInput::Logits(logits.as_ref()), batch).unwrap();
    assert!(out.loss.is_finite() && grads.logits.is_some_and(|g| g.iter().any(|g| g.abs() > 1e-3)));
}
