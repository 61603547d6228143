//! When a plan is made, and with which request.

use super::case::{Case, H, N, OFFSETS, assert_close, grpo, values};
use super::spy::Spy;
use burn::tensor::Device;
use grpo_burn::{GrpoLoss, GrpoLossBuilder};
use grpo_core::{GradientSpec, HeadLayout, Implementation, LossConfig, PolicySpec};
use std::sync::Arc;

fn watched(config: &LossConfig) -> (Arc<Spy>, GrpoLoss) {
    let spy = Arc::new(Spy::default());
    let grpo = builder(config).build(&spy).unwrap();
    (spy, grpo)
}

fn builder(config: &LossConfig) -> GrpoLossBuilder {
    GrpoLoss::builder(config.clone()).implementation(Implementation::Reference)
}

#[test]
fn frozen_head_has_no_gradient() {
    let config = LossConfig::default();
    let case = Case::new(&config);
    let device = Device::flex().autodiff();
    let (hidden, head, bias) = case.leaves(&device);
    let all = grpo(&config, Implementation::Reference)
        .loss(hidden.clone(), head.clone(), Some(bias.clone()), &case.batch())
        .unwrap();
    let expected = values(hidden.grad(&all.loss.backward()).unwrap());

    let (spy, grpo) = watched(&config);
    let untracked = case.leaves(&device).1.set_require_grad(false);
    // Frozen in three ways: outside autodiff, on an autodiff device without require_grad, and both for the bias.
    for (head, bias) in [(head.clone().inner(), bias.clone().inner()), (untracked, bias.set_require_grad(false))] {
        let loss = grpo.loss(hidden.clone(), head.clone(), Some(bias), &case.batch()).unwrap().loss;
        let grads = loss.backward();
        assert_close("frozen head: hidden", &values(hidden.grad(&grads).unwrap()), &expected, 1e-6);
        assert!(head.grad(&grads).is_none());
    }
    let requests = spy.requests.lock().unwrap();
    assert_eq!(requests.len(), 1);
    assert_eq!(requests[0].gradients, GradientSpec { hidden: true, lm_head: false, bias: false });
}

#[test]
fn head_can_train_with_frozen_hidden_states() {
    let config = LossConfig::default();
    let case = Case::new(&config);
    let (hidden, head, _) = case.leaves(&Device::flex().autodiff());
    let (spy, grpo) = watched(&config);
    let loss = grpo.loss(hidden.inner(), head.clone(), None, &case.batch()).unwrap().loss;
    assert!(values(head.grad(&loss.backward()).unwrap()).iter().any(|g| g.abs() > 1e-3));
    let gradients = spy.requests.lock().unwrap()[0].gradients;
    assert_eq!(gradients, GradientSpec { hidden: false, lm_head: true, bias: false });
}

#[test]
fn plan_is_reused_until_it_does_not_fit() {
    let config = LossConfig::default();
    let case = Case::new(&config);
    let (hidden, head, bias) = case.leaves(&Device::flex().autodiff());
    let (spy, grpo) = watched(&config);
    let batch = case.batch();
    let first = batch.select_independent(0..1).unwrap();
    let first_rows = || hidden.clone().slice([0..OFFSETS[1], 0..H]);
    let plans = || spy.requests.lock().unwrap().len();

    assert!(grpo.memory().is_none());
    grpo.loss(first_rows(), head.clone(), None, &first).unwrap();
    grpo.loss(first_rows(), head.clone(), None, &first).unwrap();
    assert_eq!(plans(), 1);
    grpo.loss(hidden.clone(), head.clone(), None, &batch).unwrap();
    assert_eq!(plans(), 2, "more tokens");
    grpo.loss(first_rows(), head.clone(), None, &first).unwrap();
    grpo.score(first_rows().inner(), head.clone().inner(), None, &first).unwrap();
    assert_eq!(plans(), 2, "fewer tokens and scoring fit");
    grpo.loss(hidden.clone(), head.clone(), Some(bias), &batch).unwrap();
    assert_eq!(plans(), 3, "a bias");
    assert!(grpo.memory().is_some());

    let grpo = builder(&config).max_tokens(100).build(&spy).unwrap();
    grpo.loss(first_rows(), head, None, &first).unwrap();
    assert_eq!(spy.requests.lock().unwrap()[3].max_tokens, 100);
}

#[test]
fn transposed_head_is_read_in_place() {
    let config = LossConfig::default();
    let case = Case::new(&config);
    let (hidden, head, _) = case.leaves(&Device::flex().autodiff());
    let spy = Arc::new(Spy::default());
    let grpo = builder(&config).head_layout(HeadLayout::HiddenVocab).build(&spy).unwrap();
    grpo.loss(hidden, head.transpose(), None, &case.batch()).unwrap();
    let planned = spy.requests.lock().unwrap()[0].policy;
    assert!(matches!(planned, PolicySpec::Hidden { layout: HeadLayout::VocabHidden, .. }), "{planned:?}");
}

#[test]
fn scores_equal_those_of_the_loss_bit_for_bit() {
    let config = LossConfig::default();
    let case = Case::new(&config);
    let (hidden, head, bias) = case.leaves(&Device::flex().autodiff());
    for implementation in Implementation::ALL {
        let grpo = grpo(&config, implementation);
        let batch = case.batch();
        let scores =
            grpo.score(hidden.clone().inner(), head.clone().inner(), Some(bias.clone().inner()), &batch).unwrap();
        assert_eq!(scores.logp.len(), N);
        let batch = batch.with_old_logp(scores.logp.clone()).unwrap();
        let step = grpo.loss(hidden.clone(), head.clone(), Some(bias.clone()), &batch).unwrap();
        assert_eq!(step.scores, scores, "{}", implementation.name());
    }
}
