//! Advantages from rewards: one number per completion.
//!
//! Rewards come in groups: the completions of one prompt lie next to each other, `group_size` of them. A missing reward
//! (NaN) leaves its row out of every statistic and gives advantage 0.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// How rewards become advantages. r = reward, G = the rewards present in the group, all = those of the batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdvantageEstimator {
    /// (r - mean(G)) / (std(G) + eps). DeepSeekMath, arXiv 2402.03300; TRL's `scale_rewards: group`.
    #[default]
    Group,
    /// r - mean(G). Dr. GRPO, arXiv 2503.20783; TRL's `scale_rewards: none`.
    MeanOnly,
    /// r - mean of the others in G. RLOO, arXiv 2402.14740.
    Rloo,
    /// (r - mean(all)) / (std(all) + eps). REINFORCE++, arXiv 2501.03262 (MLLM-JAX calls this `reinforce`).
    ReinforcePlusPlus,
    /// r itself, without a baseline.
    Reinforce,
}

/// Configuration of the advantages.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdvantageConfig {
    /// The estimator.
    pub estimator: AdvantageEstimator,
    /// Delta degrees of freedom of the standard deviation: 1 (TRL, verl) or 0 (MLLM-JAX).
    pub ddof: u8,
    /// Added to the standard deviation. TRL: 1e-4.
    pub eps: f64,
}

impl Default for AdvantageConfig {
    fn default() -> Self {
        Self { estimator: AdvantageEstimator::Group, ddof: 1, eps: 1e-4 }
    }
}

impl AdvantageConfig {
    /// Advantages `[B]` of `rewards: [B]`, B a multiple of `group_size`; NaN stands for a missing reward.
    ///
    /// Where the rewards that an estimator compares are all equal (a group, or the batch for global whitening), their
    /// advantages are exactly 0: equality is decided on the rewards, not on a rounded standard deviation. A group of
    /// one compares with nothing and gives 0 too.
    ///
    /// # Errors
    /// [`Error::Config`] for ddof or eps out of range, [`Error::Shape`] when B is not a multiple of `group_size`,
    /// [`Error::Value`] for an infinite reward.
    pub fn advantages(&self, rewards: &[f32], group_size: usize) -> Result<Vec<f32>> {
        if self.ddof > 1 {
            return Err(Error::Config(format!("advantages: ddof must be 0 or 1, got {}", self.ddof)));
        }
        if !(self.eps >= 0.0 && self.eps.is_finite()) {
            return Err(Error::Config(format!("advantages: eps must be finite and not negative, got {}", self.eps)));
        }
        if group_size == 0 || !rewards.len().is_multiple_of(group_size) {
            let expected = format!("a multiple of the group size {group_size}");
            return Err(Error::shape("advantages", "rewards", expected, rewards.len()));
        }
        if let Some(i) = rewards.iter().position(|r| r.is_infinite()) {
            return Err(Error::value("rewards", format!("completion {i}"), format!("{} is not finite", rewards[i])));
        }
        let batch = Statistics::of(rewards, self.ddof);
        let advantages = rewards.chunks(group_size).flat_map(|group| {
            let statistics = Statistics::of(group, self.ddof);
            group.iter().map(move |r| (f64::from(*r), statistics))
        });
        Ok(advantages
            .map(|(r, group)| if r.is_nan() { 0.0 } else { self.advantage(r, &group, &batch) as f32 })
            .collect())
    }

    fn advantage(&self, r: f64, group: &Statistics, batch: &Statistics) -> f64 {
        match self.estimator {
            AdvantageEstimator::Reinforce => r,
            AdvantageEstimator::ReinforcePlusPlus if batch.all_equal => 0.0,
            AdvantageEstimator::ReinforcePlusPlus => (r - batch.mean) / (batch.std + self.eps),
            _ if group.all_equal => 0.0,
            AdvantageEstimator::Group => (r - group.mean) / (group.std + self.eps),
            AdvantageEstimator::MeanOnly => r - group.mean,
            AdvantageEstimator::Rloo => (r - group.mean) * group.count / (group.count - 1.0),
        }
    }
}

#[derive(Clone, Copy)]
struct Statistics {
    count: f64,
    mean: f64,
    std: f64,
    all_equal: bool,
}

impl Statistics {
    /// Of the values that are not NaN.
    fn of(values: &[f32], ddof: u8) -> Self {
        let present = || values.iter().filter(|v| !v.is_nan()).map(|v| f64::from(*v));
        let count = present().count() as f64;
        let mean = present().sum::<f64>() / count.max(1.0);
        let squares: f64 = present().map(|v| (v - mean) * (v - mean)).sum();
        let first = present().next();
        Self {
            count,
            mean,
            std: (squares / (count - f64::from(ddof)).max(1.0)).sqrt(),
            all_equal: present().all(|v| Some(v) == first),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use rstest::rstest;

    fn run(estimator: AdvantageEstimator, ddof: u8, rewards: &[f32], group: usize) -> Vec<f32> {
        AdvantageConfig { estimator, ddof, eps: 1e-4 }.advantages(rewards, group).unwrap()
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
        assert!(AdvantageConfig { ddof: 2, ..config }.advantages(&[1.0, 2.0], 2).is_err());
        assert!(AdvantageConfig { eps: f64::NAN, ..config }.advantages(&[1.0, 2.0], 2).is_err());
    }
}
