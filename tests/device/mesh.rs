//! Eight virtual devices: tokens split one way, the vocabulary the other. The numbers are those of one device.

use crate::evaluation::check;
use crate::{SMALL, chunks, cispo, grpo, gspo, on_mesh, panels};
use grpo_core::{Dtype, HeadLayout, Implementation, LossConfig, Tiling};
use rstest::rstest;
use testkit::{Case, Shape};

/// (data, vocab)
const MESHES: [(usize, usize); 8] = [(2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8), (2, 4), (4, 2)];

fn implementations() -> [(&'static str, Implementation, Tiling); 4] {
    [
        ("reference", Implementation::Reference, Tiling::default()),
        ("logits", Implementation::Logits, Tiling::default()),
        ("chunks", Implementation::Fused, chunks(3)),
        ("panels", Implementation::Fused, panels(5)),
    ]
}

/// N = 16 and 23, V = 61 (no multiple of anything) and 64; sequences that devices cut, gradients that begin with the
/// caller's sums.
#[rstest]
#[case::grpo(0, grpo())]
#[case::gspo(1, gspo())]
fn every_mesh_is_the_oracle(
    #[case] first: usize,
    #[case] loss: LossConfig,
    #[values(0, 1, 2, 3)] implementation: usize,
) {
    let (name, implementation_of, tiling) = implementations().into_iter().nth(implementation).unwrap();
    for (i, (data, vocab)) in MESHES.into_iter().enumerate() {
        // They take turns; every mesh meets all of them with one loss and implementation or another.
        let turn = i + i / 4 + first + implementation;
        let shape = Shape {
            lengths: [&[5, 0, 1, 7, 3][..], &[11, 2, 9, 1]][turn % 2],
            v: [61, 64][turn / 2 % 2],
            dtype: [Dtype::F32, Dtype::Bf16][turn % 2],
            layout: [HeadLayout::VocabHidden, HeadLayout::HiddenVocab][turn / 2 % 2],
            bias: !turn.is_multiple_of(3),
            ..SMALL
        };
        let case = Case::new(&loss, &shape, turn as u64);
        let request = case.request(&loss, implementation_of, tiling.clone());
        let mut plan = on_mesh(data, vocab).plan_on_device(&request).unwrap();
        let name = format!("{data} x {vocab} {:?} {name} V {} {}", loss.loss_type, shape.v, shape.dtype.name());
        check(&name, &mut plan, &case, &loss, request.gradients);
    }
}

/// Every way in which tokens of a batch depend on each other, over devices that cut sequences and the vocabulary: a shared
/// ratio of each kind, tokens chosen from all of the batch, a sampler's weight, averages over sequences.
#[rstest]
#[case::luspo(r#"{"loss_type": "luspo", "beta": 0.1, "epsilon_low": 0.05, "epsilon_high": 0.06}"#)]
#[case::geo_mean(r#"{"loss_type": "geo_mean", "epsilon_low": 0.2, "top_entropy_quantile": 0.6, "entropy_coef": 0.05}"#)]
#[case::vespo(r#"{"loss_type": "vespo", "beta": 0.1, "vllm_importance_sampling_mode": "token_truncate"}"#)]
#[case::verl_gspo(r#"{"semantics": "verl", "loss_type": "gspo", "loss_agg_mode": "seq-mean-token-mean", "beta": 0.1}"#)]
#[case::verl_vanilla(
    r#"{"semantics": "verl", "loss_type": "vanilla", "clip_ratio_c": 1.22, "beta": 0.1,
    "kl_estimator": "k3+", "rollout_is": "icepop", "rollout_is_threshold": "0.8_1.3"}"#
)]
#[case::clip_cov(r#"{"semantics": "verl", "loss_type": "clip_cov", "clip_cov_lb": 0.01, "clip_cov_ratio": 0.2}"#)]
#[case::kl_cov(r#"{"semantics": "verl", "loss_type": "kl_cov", "kl_cov_ratio": 0.3, "entropy_coef": 0.05}"#)]
#[case::off_policy(
    r#"{"loss_type": "sapo", "off_policy_mask_threshold": 0.03, "top_entropy_quantile": 0.5, "beta": 0.1}"#
)]
#[case::dppo_kl(r#"{"semantics": "verl", "loss_type": "dppo_kl", "epsilon_low": 0.005, "epsilon_high": 0.005}"#)]
fn the_family_on_a_mesh(#[case] json: &str) {
    let loss = LossConfig::from_json(json).unwrap();
    for (turn, (data, vocab)) in [(2, 4), (4, 2)].into_iter().enumerate() {
        let shape = Shape { dtype: [Dtype::F32, Dtype::Bf16][turn], v: [61, 64][turn], bias: turn == 0, ..SMALL };
        let mut case = Case::new(&loss, &shape, 29);
        // A sampler near the old policy, silent at times.
        let old = case.batch.old_logp().unwrap();
        let near = |(i, old): (usize, &f32)| if i % 7 == 3 { f32::NAN } else { old - 0.13 * [1.0, -1.0, 0.4][i % 3] };
        let sampler = old.iter().enumerate().map(near).collect();
        case.batch = case.batch.with_sampler_logp(sampler).unwrap();
        for (name, implementation, tiling) in implementations().into_iter().skip(turn).step_by(2) {
            let request = case.request(&loss, implementation, tiling);
            let mut plan = on_mesh(data, vocab).plan_on_device(&request).unwrap();
            check(&format!("{data} x {vocab} {name} {json}"), &mut plan, &case, &loss, request.gradients);
        }
    }
}

/// A larger vocabulary that does not divide, in both layouts.
#[rstest]
fn an_odd_vocabulary(
    #[values(HeadLayout::VocabHidden, HeadLayout::HiddenVocab)] layout: HeadLayout,
    #[values((1, 8), (2, 4))] (data, vocab): (usize, usize),
) {
    let loss = cispo();
    let case = Case::new(&loss, &Shape { v: 1013, layout, bias: true, ..SMALL }, 19);
    for (name, implementation, tiling) in
        [("chunks", Implementation::Fused, chunks(3)), ("panels", Implementation::Fused, panels(50))]
    {
        let request = case.request(&loss, implementation, tiling);
        let mut plan = on_mesh(data, vocab).plan_on_device(&request).unwrap();
        check(&format!("{data} x {vocab} {layout:?} {name}"), &mut plan, &case, &loss, request.gradients);
    }
}

/// More devices than tokens, or than vocabulary entries: some hold nothing but padding.
#[rstest]
fn devices_without_anything(#[values((8, 1), (1, 8), (4, 2))] (data, vocab): (usize, usize)) {
    let loss = grpo();
    let case = Case::new(&loss, &Shape { lengths: &[3], v: 5, bias: true, ..SMALL }, 2);
    for (name, implementation, tiling) in implementations() {
        let request = case.request(&loss, implementation, tiling);
        let mut plan = on_mesh(data, vocab).plan_on_device(&request).unwrap();
        check(&format!("{data} x {vocab} {name}"), &mut plan, &case, &loss, request.gradients);
    }
}

#[rstest]
fn given_logits_on_a_mesh(
    #[values((8, 1), (1, 8), (2, 4), (4, 2))] (data, vocab): (usize, usize),
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
) {
    for loss in [grpo(), gspo()] {
        let case = Case::new(&loss, &Shape { dtype, ..SMALL }, 3);
        let request = crate::logits::request(&case, &loss, Implementation::Logits);
        let mut plan = on_mesh(data, vocab).plan_on_device(&request).unwrap();
        let name = format!("{data} x {vocab} {:?} {}", loss.loss_type, dtype.name());
        crate::logits::check(&name, &mut plan, &case, &loss);
    }
}
