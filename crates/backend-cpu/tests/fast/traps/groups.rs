//! Groups of equal rewards have zero advantage, even if a rounded standard deviation is not zero.

use super::*;
use grpo_core::advantages::DynamicSampling;
use grpo_testkit::config;

/// The naive mean and standard deviation (ddof 1), in f32.
fn naive(rewards: &[f32]) -> (f32, f32) {
    let mean = rewards.iter().sum::<f32>() / rewards.len() as f32;
    let squares: f32 = rewards.iter().map(|r| (r - mean).powi(2)).sum();
    (mean, (squares / (rewards.len() as f32 - 1.0)).sqrt())
}

/// The mean of eleven rewards of 0.1 is not 0.1 in f32, so their naive deviation is not 0: a filter would keep the
/// group, and rewards divided by the deviation would be of order 1.
#[test]
fn zero_variance_is_decided_on_the_rewards() {
    let rewards = [0.1_f32; 11];
    let (mean, std) = naive(&rewards);
    assert!(std > 0.0 && (rewards[0] - mean).abs() / std > 0.9, "naive: mean {mean}, std {std}");

    let sampling = DynamicSampling::default();
    let found = sampling.filter(&rewards, 11).unwrap();
    assert_eq!((found.kept.len(), found.zero_variance), (0, 1));
    // The smallest difference in f32 counts as a difference.
    let mut differ = rewards;
    differ[4] = f32::from_bits(differ[4].to_bits() + 1);
    assert_eq!(sampling.filter(&differ, 11).unwrap().kept, [0]);

    // Without an epsilon, too: the advantages are 0, and so are the loss and its gradient.
    let advantages = AdvantageConfig { eps: 0.0, ..AdvantageConfig::default() };
    let equal = advantages.advantages(&rewards, 11).unwrap();
    assert_eq!(equal, [0.0; 11]);
    assert!(advantages.advantages(&differ, 11).unwrap().iter().any(|a| *a > 1.0));
    let batch = TokenBatch::packed(vec![0; 11], (0..=11).collect()).unwrap();
    let batch = batch.with_advantages(Advantages::PerSequence(equal)).unwrap();
    for Found { how, loss, dz, .. } in everywhere(&config("{}"), &[0.0; 22], 2, &batch) {
        assert_eq!(loss, 0.0, "{how}");
        assert!(dz.iter().all(|g| *g == 0.0), "{how}: {dz:?}");
    }
}
