use super::*;
use approx::assert_relative_eq;
use rstest::rstest;

fn run(estimator: AdvantageEstimator, ddof: u8, rewards: &[f32], group: usize) -> Vec<f32> {
    AdvantageConfig { estimator, ddof, ..Default::default() }.advantages(rewards, group).unwrap()
}

#[test]
fn group_normalisation_matches_hand_computed_values() {
    // mean 2, squares 9 + 1 + 1 + 9 = 20
    let rewards = [-1.0, 1.0, 3.0, 5.0];
    for (ddof, variance) in [(1, 20.0 / 3.0), (0, 5.0_f32)] {
        let expected = rewards.map(|r| (r - 2.0) / (variance.sqrt() + 1e-4));
        for (a, e) in run(AdvantageEstimator::Group, ddof, &rewards, 4).into_iter().zip(expected) {
            assert_relative_eq!(a, e, max_relative = 1e-6);
        }
    }
}

#[test]
fn groups_do_not_mix_and_whitening_does() {
    let rewards = [0.0, 1.0, 10.0, 14.0];
    assert_eq!(run(AdvantageEstimator::MeanOnly, 1, &rewards, 2), [-0.5, 0.5, -2.0, 2.0]);
    assert_eq!(run(AdvantageEstimator::Rloo, 1, &rewards, 2), [-1.0, 1.0, -4.0, 4.0]);
    assert_eq!(run(AdvantageEstimator::Rloo, 1, &[0.0, 3.0, 6.0], 3), [-4.5, 0.0, 4.5]);
    assert_eq!(run(AdvantageEstimator::Reinforce, 1, &rewards, 2), rewards);
    let whitened = run(AdvantageEstimator::ReinforcePlusPlus, 0, &rewards, 2);
    let squares: f32 = whitened.iter().map(|a| a * a).sum();
    assert_relative_eq!(whitened.iter().sum::<f32>(), 0.0, epsilon = 1e-6);
    assert_relative_eq!(squares, 4.0, max_relative = 1e-4);
}

#[rstest]
fn equal_rewards_give_exactly_zero(
    #[values(
        AdvantageEstimator::Group,
        AdvantageEstimator::MeanOnly,
        AdvantageEstimator::Rloo,
        AdvantageEstimator::ReinforcePlusPlus
    )]
    estimator: AdvantageEstimator,
    #[values(0, 1)] ddof: u8,
) {
    // 0.1 has no exact mean in binary: a test on std == 0 would miss it.
    assert_eq!(run(estimator, ddof, &[0.1; 7], 7), [0.0; 7]);
    assert_eq!(run(estimator, ddof, &[0.7], 1), [0.0]);
}

#[test]
fn a_missing_reward_is_left_out_and_gives_zero() {
    let with = run(AdvantageEstimator::Group, 1, &[1.0, f32::NAN, 0.0, 2.0], 4);
    let without = run(AdvantageEstimator::Group, 1, &[1.0, 0.0, 2.0], 3);
    assert_eq!(with, [without[0], 0.0, without[1], without[2]]);
    assert_eq!(run(AdvantageEstimator::Group, 1, &[f32::NAN, f32::NAN], 2), [0.0, 0.0]);
    assert_eq!(run(AdvantageEstimator::Rloo, 1, &[f32::NAN, 3.0], 2), [0.0, 0.0]);
    assert_eq!(run(AdvantageEstimator::Reinforce, 1, &[f32::NAN, 3.0], 2), [0.0, 3.0]);
}

#[test]
fn refuses_what_it_cannot_mean() {
    let config = AdvantageConfig::default();
    assert!(config.advantages(&[1.0, 2.0, 3.0], 2).unwrap_err().to_string().contains("multiple"));
    assert!(config.advantages(&[1.0], 0).is_err());
    assert!(config.advantages(&[f32::INFINITY, 0.0], 2).unwrap_err().to_string().contains("completion 0"));
    assert!(AdvantageConfig { ddof: 2, ..config.clone() }.advantages(&[1.0, 2.0], 2).is_err());
    assert!(AdvantageConfig { eps: f64::NAN, ..config }.advantages(&[1.0, 2.0], 2).is_err());
}
