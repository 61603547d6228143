//! Eight virtual devices, with tokens sharded on one axis and the vocabulary on the other. The results match one device.

use crate::evaluation::check_on;
use crate::{Named, SMALL, chunks, cispo, grpo, gspo, on_mesh, panels};
use grpo_core::{Dtype, HeadLayout, Implementation, LossConfig, Tiling};
use grpo_testkit::{Case, Shape};
use rstest::rstest;

/// (data, vocab)
const MESHES: [(usize, usize); 8] = [(2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8), (2, 4), (4, 2)];

fn reference() -> Named {
    ("reference", Implementation::Reference, Tiling::default())
}

fn logits() -> Named {
    ("logits", Implementation::Logits, Tiling::default())
}

fn fused_chunks() -> Named {
    ("chunks", Implementation::Fused, chunks(3))
}

fn fused_panels() -> Named {
    ("panels", Implementation::Fused, panels(5))
}

fn implementations() -> [Named; 4] {
    [reference(), logits(), fused_chunks(), fused_panels()]
}

/// N = 16, divisible by the devices; V = 61, prime.
const TOKENS_DIVIDE: Shape<'static> =
    Shape { v: 61, dtype: Dtype::F32, layout: HeadLayout::VocabHidden, bias: true, ..SMALL };
/// N = 23; V = 64, divisible by the devices.
const VOCAB_DIVIDES: Shape<'static> =
    Shape { lengths: &[11, 2, 9, 1], v: 64, dtype: Dtype::Bf16, layout: HeadLayout::HiddenVocab, bias: true, ..SMALL };
/// N = 16 and V = 64.
const BOTH_DIVIDE: Shape<'static> =
    Shape { v: 64, dtype: Dtype::F32, layout: HeadLayout::HiddenVocab, bias: false, ..SMALL };
/// N = 23 and V = 61.
const NONE_DIVIDES: Shape<'static> =
    Shape { lengths: &[11, 2, 9, 1], v: 61, dtype: Dtype::Bf16, layout: HeadLayout::VocabHidden, bias: false, ..SMALL };

/// Sequences are split between devices, and gradients accumulate on the caller's. Every implementation is tested with N and V divisible and
/// not divisible by the devices.
fn products() -> [(LossConfig, Named, Shape<'static>); 8] {
    [
        (grpo(), reference(), BOTH_DIVIDE),
        (grpo(), logits(), TOKENS_DIVIDE),
        (grpo(), fused_chunks(), NONE_DIVIDES),
        (grpo(), fused_panels(), VOCAB_DIVIDES),
        (gspo(), reference(), NONE_DIVIDES),
        (gspo(), logits(), VOCAB_DIVIDES),
        (gspo(), fused_chunks(), BOTH_DIVIDE),
        (gspo(), fused_panels(), TOKENS_DIVIDE),
    ]
}

fn check_mesh(
    (data, vocab): (usize, usize),
    loss: &LossConfig,
    (name, implementation, tiling): Named,
    shape: &Shape<'_>,
) {
    let case = Case::new(loss, shape, 3);
    let request = case.request(loss, implementation, tiling);
    let name = format!("{data} x {vocab} {:?} {name} V {} {}", loss.loss_type, shape.v, shape.dtype.name());
    check_on(&on_mesh(data, vocab), &name, &case, &request);
}

/// Each mesh once, with another implementation, loss and shape.
#[test]
fn every_mesh_matches_the_oracle() {
    for (mesh, (loss, named, shape)) in MESHES.into_iter().zip(products()) {
        check_mesh(mesh, &loss, named, &shape);
    }
}

/// Each mesh with both losses, every implementation and every shape: half of the products have them all.
#[rstest]
#[ignore = "GRPO_TESTS=all"]
fn every_mesh_and_every_implementation_match_the_oracle(#[values(0, 1, 2, 3, 4, 5, 6, 7)] product: usize) {
    let (loss, named, shape) = &products()[product];
    let first = usize::from(![0, 2, 5, 7].contains(&product));
    MESHES.into_iter().skip(first).step_by(2).for_each(|mesh| check_mesh(mesh, loss, named.clone(), shape));
}

/// Every dependence between tokens of a batch, on devices that split sequences and the vocabulary: each kind of shared
/// ratio, tokens selected from the whole batch, a sampler's weight, averages over sequences.
#[rstest]
#[case::luspo(r#"{"loss_type": "luspo", "beta": 0.1, "epsilon_low": 0.05, "epsilon_high": 0.06}"#)]
#[ignore = "GRPO_TESTS=all"]
#[case::geo_mean(r#"{"loss_type": "geo_mean", "epsilon_low": 0.2, "top_entropy_quantile": 0.6, "entropy_coef": 0.05}"#)]
#[ignore = "GRPO_TESTS=all"]
#[case::vespo(r#"{"loss_type": "vespo", "beta": 0.1, "vllm_importance_sampling_mode": "token_truncate"}"#)]
#[ignore = "GRPO_TESTS=all"]
#[case::verl_gspo(r#"{"semantics": "verl", "loss_type": "gspo", "loss_agg_mode": "seq-mean-token-mean", "beta": 0.1}"#)]
#[ignore = "GRPO_TESTS=all"]
#[case::verl_vanilla(
    r#"{"semantics": "verl", "loss_type": "vanilla", "clip_ratio_c": 1.22, "beta": 0.1,
    "kl_estimator": "k3+", "rollout_is": "icepop", "rollout_is_threshold": "0.8_1.3"}"#
)]
#[ignore = "GRPO_TESTS=all"]
#[case::clip_cov(r#"{"semantics": "verl", "loss_type": "clip_cov", "clip_cov_lb": 0.01, "clip_cov_ratio": 0.2}"#)]
#[ignore = "GRPO_TESTS=all"]
#[case::kl_cov(r#"{"semantics": "verl", "loss_type": "kl_cov", "kl_cov_ratio": 0.3, "entropy_coef": 0.05}"#)]
#[case::off_policy(
    r#"{"loss_type": "sapo", "off_policy_mask_threshold": 0.03, "top_entropy_quantile": 0.5, "beta": 0.1}"#
)]
#[ignore = "GRPO_TESTS=all"]
#[case::dppo_kl(r#"{"semantics": "verl", "loss_type": "dppo_kl", "epsilon_low": 0.005, "epsilon_high": 0.005}"#)]
fn all_losses_match_the_oracle_on_a_mesh(#[case] json: &str) {
    let loss = LossConfig::from_json(json).unwrap();
    for ((data, vocab), shape, implementations) in [
        ((2, 4), Shape { dtype: Dtype::F32, v: 61, bias: true, ..SMALL }, [reference(), fused_chunks()]),
        ((4, 2), Shape { dtype: Dtype::Bf16, v: 64, bias: false, ..SMALL }, [logits(), fused_panels()]),
    ] {
        let mut case = Case::new(&loss, &shape, 29);
        // A sampler close to the old policy, with some unknown log-probabilities.
        let old = case.batch.old_logp().unwrap();
        let near = |(i, old): (usize, &f32)| if i % 7 == 3 { f32::NAN } else { old - 0.13 * [1.0, -1.0, 0.4][i % 3] };
        let sampler = old.iter().enumerate().map(near).collect();
        case.batch = case.batch.with_sampler_logp(sampler).unwrap();
        for (name, implementation, tiling) in implementations {
            let request = case.request(&loss, implementation, tiling);
            check_on(&on_mesh(data, vocab), &format!("{data} x {vocab} {name} {json}"), &case, &request);
        }
    }
}

/// A larger vocabulary that is not divisible, in both layouts.
#[rstest]
#[case(HeadLayout::VocabHidden, (2, 4))]
#[ignore = "GRPO_TESTS=all"]
#[case(HeadLayout::VocabHidden, (1, 8))]
#[ignore = "GRPO_TESTS=all"]
#[case(HeadLayout::HiddenVocab, (2, 4))]
#[ignore = "GRPO_TESTS=all"]
#[case(HeadLayout::HiddenVocab, (1, 8))]
fn indivisible_vocabulary_matches_the_oracle_on_a_mesh(
    #[case] layout: HeadLayout,
    #[case] (data, vocab): (usize, usize),
) {
    let loss = cispo();
    let case = Case::new(&loss, &Shape { v: 1013, layout, bias: true, ..SMALL }, 19);
    for (name, implementation, tiling) in
        [("chunks", Implementation::Fused, chunks(3)), ("panels", Implementation::Fused, panels(50))]
    {
        let request = case.request(&loss, implementation, tiling);
        check_on(&on_mesh(data, vocab), &format!("{data} x {vocab} {layout:?} {name}"), &case, &request);
    }
}

/// More devices than tokens or vocabulary entries: some devices have only padding.
#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case((8, 1))]
#[ignore = "GRPO_TESTS=all"]
#[case((1, 8))]
#[case((4, 2))]
fn mesh_with_empty_devices_matches_the_oracle(#[case] (data, vocab): (usize, usize)) {
    let loss = grpo();
    let case = Case::new(&loss, &Shape { lengths: &[3], v: 5, bias: true, ..SMALL }, 2);
    for (name, implementation, tiling) in implementations() {
        let request = case.request(&loss, implementation, tiling);
        check_on(&on_mesh(data, vocab), &format!("{data} x {vocab} {name}"), &case, &request);
    }
}

#[test]
fn precomputed_logits_match_the_oracle_on_a_mesh() {
    check_logits((4, 2), Dtype::Bf16);
}

#[rstest]
#[ignore = "GRPO_TESTS=all"]
fn precomputed_logits_match_the_oracle_on_every_mesh(
    #[values((8, 1), (1, 8), (2, 4), (4, 2))] mesh: (usize, usize),
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
) {
    check_logits(mesh, dtype);
}

fn check_logits((data, vocab): (usize, usize), dtype: Dtype) {
    for loss in [grpo(), gspo()] {
        let case = Case::new(&loss, &Shape { dtype, ..SMALL }, 3);
        let request = crate::logits::request(&case, &loss, Implementation::Logits);
        let mut plan = on_mesh(data, vocab).plan_on_device(&request).unwrap();
        let name = format!("{data} x {vocab} {:?} {}", loss.loss_type, dtype.name());
        crate::logits::check(&name, &mut plan, &case, &loss);
    }
}
