//! Advantages compared with TRL's and verl's own code in float64 (`tests/golden/advantages.py`), and properties that hold for
//! all rewards.

use grpo_core::KlEstimator;
use grpo_core::advantages::{AdvantageConfig, AdvantageEstimator, AdvantageInputs, GroupOfOne, RewardValues};
use grpo_core::batch::{Advantages, TokenBatch};
use grpo_core::controllers::{AdaptiveEntropy, KlController};
use grpo_core::rewards::{SoftOverlong, kl_in_reward};
use proptest::prelude::*;
use serde::Deserialize;
use std::collections::BTreeSet;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Golden {
    #[allow(dead_code)]
    versions: serde_json::Value,
    advantages: Vec<AdvantageCase>,
    kl_in_reward: Vec<KlCase>,
    entropy_controller: EntropyCase,
    overlong: OverlongCase,
}

/// Flat values of a case; NaN is null.
type List = Vec<Option<f32>>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AdvantageCase {
    name: String,
    config: AdvantageConfig,
    group_size: usize,
    shape: [usize; 2],
    mask: Vec<f32>,
    /// `[B]`, or `[B, T]` with 0 at masked tokens.
    expected: Vec<f64>,
    rewards: Option<List>,
    token_rewards: Option<List>,
    greedy_rewards: Option<List>,
    values: Option<List>,
    value_targets: Option<Vec<f64>>,
    old_logp: Option<List>,
    ref_logp: Option<List>,
    sum_pi_squared: Option<List>,
    rollout_is_weights: Option<List>,
    kl_in_reward: Option<KlSetting>,
}

#[derive(Deserialize)]
struct KlSetting {
    penalty: KlEstimator,
    beta: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KlCase {
    name: String,
    config: KlController,
    #[allow(dead_code)]
    group_size: usize,
    shape: [usize; 2],
    mask: Vec<f32>,
    expected: Vec<f64>,
    rewards: List,
    old_logp: List,
    ref_logp: List,
    penalty: KlEstimator,
    kl: f64,
    next_kl_coef: f64,
}

#[derive(Deserialize)]
struct EntropyCase {
    config: AdaptiveEntropy,
    steps: Vec<EntropyStep>,
}

#[derive(Deserialize)]
struct EntropyStep {
    window: [f64; 2],
    applied: f64,
    next_coef: f64,
}

#[derive(Deserialize)]
struct OverlongCase {
    config: SoftOverlong,
    lengths: Vec<usize>,
    expected: Vec<f64>,
}

fn golden() -> Golden {
    serde_json::from_str(include_str!("../../../../tests/golden/advantages.json")).unwrap()
}

fn list(values: &List) -> Vec<f32> {
    values.iter().map(|v| v.unwrap_or(f32::NAN)).collect()
}

fn batch(mask: &[f32], shape: [usize; 2], old_logp: Option<&List>, ref_logp: Option<&List>) -> TokenBatch {
    let mut batch = TokenBatch::padded(&vec![0; mask.len()], mask, shape).unwrap();
    if let Some(logp) = old_logp {
        batch = batch.with_old_logp(list(logp)).unwrap();
    }
    if let Some(logp) = ref_logp {
        batch = batch.with_ref_logp(list(logp)).unwrap();
    }
    batch
}

fn assert_close(name: &str, found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{name}");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f64::from(*f) - e).abs() <= 1e-6 * e.abs().max(1.0), "{name}: entry {i}: {f} is not {e}");
    }
}

/// `[B, T]`, 0 at masked tokens.
fn spread(advantages: &Advantages, batch: &TokenBatch) -> Vec<f32> {
    let mut tokens = vec![0.0; batch.tokens()];
    for b in 0..batch.sequences() {
        for i in batch.range(b).filter(|i| batch.is_active(*i)) {
            tokens[i] = match advantages {
                Advantages::PerSequence(a) => a[b],
                Advantages::PerToken(a) => a[i],
            };
        }
    }
    tokens
}

#[test]
fn advantages_match_trl_and_verl() {
    let mut estimators = BTreeSet::new();
    for case in golden().advantages {
        let batch = batch(&case.mask, case.shape, case.old_logp.as_ref(), case.ref_logp.as_ref());
        let sequence = case.rewards.as_ref();
        let tokens = match &case.kl_in_reward {
            Some(kl) => {
                let scores = sequence.unwrap();
                Some(kl_in_reward(scores, &batch, kl.penalty, kl.beta).unwrap().token_rewards)
            }
            None => case.token_rewards.clone(),
        };
        let rewards = match (sequence, &tokens) {
            (_, Some(tokens)) => RewardValues::per_token(tokens),
            (Some(sequence), None) => RewardValues::per_sequence(sequence),
            (None, None) => panic!("{}: no rewards", case.name),
        };
        let [values, squares, weights] =
            [&case.values, &case.sum_pi_squared, &case.rollout_is_weights].map(|l| l.as_ref().map(list));
        let inputs = AdvantageInputs {
            batch: Some(&batch),
            greedy_rewards: case.greedy_rewards.as_ref().map(Into::into),
            values: values.as_deref(),
            sum_pi_squared: squares.as_deref(),
            rollout_is_weights: weights.as_deref(),
            ..AdvantageInputs::new(rewards, case.group_size)
        };
        let advantages = case.config.compute(&inputs).unwrap_or_else(|e| panic!("{}: {e}", case.name));
        match &advantages {
            Advantages::PerSequence(a) if case.expected.len() == a.len() => assert_close(&case.name, a, &case.expected),
            _ => assert_close(&case.name, &spread(&advantages, &batch), &case.expected),
        }
        if let Some(targets) = &case.value_targets {
            assert_close(&case.name, &case.config.value_targets(&inputs).unwrap(), targets);
        }
        estimators.insert(format!("{:?}", case.config.estimator));
    }
    // Reinforce is the reward itself; MLLM-JAX's mix is checked by hand in the unit tests.
    assert_eq!(estimators.len(), 15, "{estimators:?}");
}

#[test]
fn max_rl_divides_by_the_success_rate_of_the_group() {
    let max_rl = AdvantageConfig { estimator: AdvantageEstimator::MaxRl, ..AdvantageConfig::default() };
    // A missing reward is excluded from every mean; groups without a success and groups without a failure have advantages of 0.
    let mut rewards = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0].map(Some);
    rewards[13] = None;
    let expected = [3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0, -1.0, -1.0];
    assert_same(max_rl.estimator, &max_rl.advantages(&rewards, 4).unwrap(), &expected, 1e-6);
    // A mean below 0 is no success rate.
    assert_eq!(max_rl.advantages(&[-1.0, 0.0], 2).unwrap(), [0.0, 0.0]);
    // For a single kept completion the estimate of order 1 is its reward.
    let keep = AdvantageConfig { group_of_one: GroupOfOne::Keep, ..max_rl.clone() };
    assert_eq!(max_rl.advantages(&[1.0, 0.0], 1).unwrap(), [0.0, 0.0]);
    assert_eq!(keep.advantages(&[1.0, 0.0], 1).unwrap(), [1.0, 0.0]);
    for (name, estimator) in [("maxrl", AdvantageEstimator::MaxRl), ("grpo", AdvantageEstimator::Group)] {
        let read: AdvantageConfig = serde_json::from_str(&format!(r#"{{"estimator": "{name}"}}"#)).unwrap();
        assert_eq!((read.estimator, read.compares_within_groups()), (estimator, true));
    }
}

#[test]
fn flash_reinforce_is_centred_on_the_batch_and_needs_no_groups() {
    let flash = AdvantageConfig { estimator: AdvantageEstimator::FlashReinforce, ..AdvantageConfig::default() };
    let advantages = flash.advantages(&[Some(1.0), Some(0.0), None, Some(0.5)], 1).unwrap();
    assert_eq!(advantages, [0.5, -0.5, 0.0, 0.0]);
    assert!(!flash.compares_within_groups());
}

#[test]
fn kl_in_the_reward_and_its_controller_match_verl() {
    for mut case in golden().kl_in_reward {
        let batch = batch(&case.mask, case.shape, Some(&case.old_logp), Some(&case.ref_logp));
        let rewards = kl_in_reward(&case.rewards, &batch, case.penalty, case.config.coef()).unwrap();
        assert_close(&case.name, &list(&rewards.token_rewards), &case.expected);
        assert!((rewards.kl - case.kl).abs() < 1e-6 * case.kl.abs().max(1.0), "{}", case.name);
        case.config.update(rewards.kl, batch.sequences()).unwrap();
        assert!((case.config.coef() - case.next_kl_coef).abs() < 1e-9, "{}", case.name);
    }
}

#[test]
fn entropy_controller_matches_trl_after_a_checkpoint() {
    let EntropyCase { config: mut controller, steps } = golden().entropy_controller;
    for (i, EntropyStep { window: [sum, count], applied, next_coef }) in steps.into_iter().enumerate() {
        assert_eq!(controller.coef(), applied, "step {i}");
        // Two micro-batches of unequal length, and a checkpoint between them.
        controller.observe(sum * 0.75, count * 0.25).unwrap();
        controller = serde_json::from_str(&serde_json::to_string(&controller).unwrap()).unwrap();
        controller.observe(sum * 0.25, count * 0.75).unwrap();
        assert_eq!(controller.coef(), applied, "step {i}: one coefficient for the whole step");
        assert_eq!(controller.step().unwrap(), Some(sum / count));
        assert!((controller.entropy_coef - next_coef).abs() < 1e-15, "step {i}");
    }
}

#[test]
fn overlong_penalty_matches_trl() {
    let case = golden().overlong;
    assert_close("overlong", &case.config.penalties(&case.lengths).unwrap(), &case.expected);
}

/// Every estimator that needs only rewards and lengths.
const OF_REWARDS: [AdvantageEstimator; 13] = [
    AdvantageEstimator::Group,
    AdvantageEstimator::MeanOnly,
    AdvantageEstimator::Rloo,
    AdvantageEstimator::ReinforcePlusPlus,
    AdvantageEstimator::ReinforcePlusPlusBaseline,
    AdvantageEstimator::Reinforce,
    AdvantageEstimator::Opo,
    AdvantageEstimator::Gpg,
    AdvantageEstimator::GrpoPassk,
    AdvantageEstimator::Gdpo,
    AdvantageEstimator::DapoMix,
    AdvantageEstimator::MaxRl,
    AdvantageEstimator::FlashReinforce,
];

/// Rewards and lengths of two groups of `size`.
fn groups() -> impl Strategy<Value = (usize, Vec<f32>, Vec<usize>)> {
    (2_usize..6).prop_flat_map(|size| {
        let reward = prop_oneof![4 => -3.0_f32..3.0, 2 => Just(1.0), 1 => Just(f32::NAN)]; // NaN stands for a missing reward
        (Just(size), prop::collection::vec(reward, 2 * size), prop::collection::vec(1_usize..6, 2 * size))
    })
}

/// Returns a list with `None` for NaN.
fn present(rewards: &[f32]) -> List {
    rewards.iter().map(|reward| Some(*reward).filter(|reward| !reward.is_nan())).collect()
}

fn compute(estimator: AdvantageEstimator, size: usize, rewards: &[f32], lengths: &[usize]) -> Vec<f32> {
    let mut offsets = vec![0];
    offsets.extend(lengths.iter().scan(0, |end, length| {
        *end += length;
        Some(*end)
    }));
    let batch = TokenBatch::packed(vec![0; lengths.iter().sum()], offsets).unwrap();
    let rewards = present(rewards);
    let inputs =
        AdvantageInputs { batch: Some(&batch), ..AdvantageInputs::new(RewardValues::per_sequence(&rewards), size) };
    let config = AdvantageConfig { estimator, ..AdvantageConfig::default() };
    match config.compute(&inputs).unwrap() {
        Advantages::PerSequence(advantages) => advantages,
        Advantages::PerToken(_) => panic!("{estimator:?} gives one advantage per completion"),
    }
}

fn assert_same(estimator: AdvantageEstimator, found: &[f32], expected: &[f32], tolerance: f32) {
    for (f, e) in found.iter().zip(expected) {
        assert!((f - e).abs() <= tolerance * e.abs().max(1.0), "{estimator:?}: {found:?} is not {expected:?}");
    }
}

proptest! {
    #[test]
    fn the_order_within_a_group_does_not_matter((size, rewards, lengths) in groups(), turn in 0_usize..5) {
        let turned = |values: &[f32]| -> Vec<f32> {
            values.chunks(size).flat_map(|g| { let mut g = g.to_vec(); g.rotate_left(turn % size); g }).collect()
        };
        let moved: Vec<f32> = turned(&lengths.iter().map(|l| *l as f32).collect::<Vec<_>>());
        let moved: Vec<usize> = moved.into_iter().map(|l| l as usize).collect();
        for estimator in OF_REWARDS {
            let plain = compute(estimator, size, &rewards, &lengths);
            let other = compute(estimator, size, &turned(&rewards), &moved);
            assert_same(estimator, &other, &turned(&plain), 1e-5);
        }
    }

    #[test]
    fn a_constant_added_to_all_rewards_changes_nothing((size, rewards, lengths) in groups(), steps in -8_i8..8) {
        // With multiples of 1/16 and shifts by multiples of 1/2 the sums are exact, so that equal rewards stay equal.
        let rewards: Vec<f32> = rewards.iter().map(|r| (r * 16.0).round() / 16.0).collect();
        let shifted: Vec<f32> = rewards.iter().map(|r| r + f32::from(steps) * 0.5).collect();
        use AdvantageEstimator as E;
        let compares = |e: &E| !matches!(e, E::Reinforce | E::Gpg | E::MaxRl);
        for estimator in OF_REWARDS.into_iter().filter(compares) {
            let plain = compute(estimator, size, &rewards, &lengths);
            assert_same(estimator, &compute(estimator, size, &shifted, &lengths), &plain, 1e-5);
        }
    }

    #[test]
    fn equal_and_missing_rewards_give_exact_zeros(
        (size, rewards, lengths) in groups(),
        reward in -3.0_f32..3.0,
    ) {
        let equal: Vec<f32> = rewards.iter().map(|r| if r.is_nan() { f32::NAN } else { reward }).collect();
        for estimator in OF_REWARDS {
            let advantages = compute(estimator, size, &equal, &lengths);
            let zero = |(a, r): (&f32, &f32)| *a == 0.0 || (estimator == AdvantageEstimator::Reinforce && !r.is_nan());
            assert!(advantages.iter().zip(&equal).all(zero), "{estimator:?}: {advantages:?}");
            let advantages = compute(estimator, size, &rewards, &lengths);
            let missing = |(a, r): (&f32, &f32)| !r.is_nan() || *a == 0.0;
            assert!(advantages.iter().zip(&rewards).all(missing), "{estimator:?}: {advantages:?}");
            assert!(advantages.iter().all(|a| a.is_finite()), "{estimator:?}: {advantages:?}");
        }
    }

    #[test]
    fn whitened_advantages_have_mean_zero((size, rewards, _) in groups()) {
        let config = AdvantageConfig { estimator: AdvantageEstimator::ReinforcePlusPlus, ..AdvantageConfig::default() };
        let advantages = config.advantages(&present(&rewards), size).unwrap();
        assert!(advantages.iter().sum::<f32>().abs() < 1e-4, "{advantages:?}");
    }
}
