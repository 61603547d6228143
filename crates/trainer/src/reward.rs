//! Rewards: what a completion is worth.

use crate::error::Result;
use crate::task::{Problem, Task};
use crate::train_config::{RewardConfig, check};
use grpo_core::rewards::SoftOverlong;

/// A completion to be judged.
#[derive(Clone, Copy)]
pub struct RewardInput<'a> {
    /// What was asked.
    pub problem: &'a Problem,
    /// The task it came from.
    pub task: &'a dyn Task,
    /// What the policy wrote, without special tokens.
    pub completion: &'a str,
    /// Whether the length limit cut it off before EOS.
    pub truncated: bool,
    /// Its tokens, EOS included.
    pub completion_len: usize,
}

/// Judges completions. Implement it to train on your own reward.
pub trait RewardFn: Send + Sync {
    /// Name in metrics.
    fn name(&self) -> &str;

    /// The reward, or `None` when this function has nothing to say about the completion: it is then left out of the
    /// sum, and a completion about which no function has anything to say is left out of its group's statistics.
    fn score(&self, input: &RewardInput<'_>) -> Option<f32>;
}

/// 1 when the task verifies a completion that ended by itself, else 0.
#[derive(Clone, Copy, Debug, Default)]
pub struct Correct;

impl RewardFn for Correct {
    fn name(&self) -> &str {
        "correct"
    }

    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        Some(f32::from(!input.truncated && input.task.verify(input.problem, input.completion)))
    }
}

/// The task's partial credit.
#[derive(Clone, Copy, Debug, Default)]
pub struct Partial;

impl RewardFn for Partial {
    fn name(&self) -> &str {
        "partial"
    }

    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        Some(input.task.score(input.problem, input.completion))
    }
}

/// 1 when the completion ended by itself, else 0.
#[derive(Clone, Copy, Debug, Default)]
pub struct Terminated;

impl RewardFn for Terminated {
    fn name(&self) -> &str {
        "terminated"
    }

    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        Some(f32::from(!input.truncated))
    }
}

/// The penalty for completions that come near the length limit, 0 or below.
#[derive(Clone, Copy, Debug)]
pub struct SoftOverlongPunishment(SoftOverlong);

impl SoftOverlongPunishment {
    /// As `settings` say.
    ///
    /// # Errors
    /// Those of [`SoftOverlong::penalties`].
    pub fn new(settings: SoftOverlong) -> Result<Self> {
        settings.penalties(&[])?;
        Ok(Self(settings))
    }
}

impl RewardFn for SoftOverlongPunishment {
    fn name(&self) -> &str {
        "soft_overlong_punishment"
    }

    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        // Only settings that are not legal give no penalties, and those were refused.
        self.0.penalties(&[input.completion_len]).ok()?.first().copied()
    }
}

/// A weighted sum of rewards.
pub struct Rewards {
    terms: Vec<(Box<dyn RewardFn>, f32)>,
}

/// The judgement of one completion.
#[derive(Clone, Debug, PartialEq)]
pub struct Reward {
    /// Weighted sum of the terms that are present; `None` when none is, or when the sum is not finite.
    pub total: Option<f32>,
    /// Each term, unweighted, in the order of [`Rewards::names`].
    pub terms: Vec<Option<f32>>,
}

impl Rewards {
    /// The built-in rewards whose weight is not 0.
    ///
    /// # Errors
    /// As [`Rewards::from_terms`].
    pub fn new(config: &RewardConfig) -> Result<Self> {
        let mut terms: Vec<(Box<dyn RewardFn>, f32)> = vec![
            (Box::new(Correct), config.correct),
            (Box::new(Partial), config.partial),
            (Box::new(Terminated), config.terminated),
        ];
        terms.retain(|(_, weight)| *weight != 0.0);
        if let Some(overlong) = config.soft_overlong_punishment {
            terms.push((Box::new(SoftOverlongPunishment::new(overlong)?), 1.0));
        }
        Self::from_terms(terms)
    }

    /// Any rewards with their weights.
    ///
    /// # Errors
    /// [`crate::Error::Config`] when there are none or a weight is not finite.
    pub fn from_terms(terms: Vec<(Box<dyn RewardFn>, f32)>) -> Result<Self> {
        check(!terms.is_empty(), "rewards", "at least one reward with a weight other than 0", "none")?;
        for (term, weight) in &terms {
            check(weight.is_finite(), &format!("rewards.{}", term.name()), "a finite weight", weight)?;
        }
        Ok(Self { terms })
    }

    /// Names of the terms.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.terms.iter().map(|(term, _)| term.name())
    }

    /// Weights of the terms.
    pub fn weights(&self) -> impl Iterator<Item = f32> {
        self.terms.iter().map(|(_, weight)| *weight)
    }

    /// Judges one completion.
    pub fn score(&self, input: &RewardInput<'_>) -> Reward {
        // A reward function that returns NaN says what `None` says.
        let terms: Vec<Option<f32>> =
            self.terms.iter().map(|(term, _)| term.score(input).filter(|r| r.is_finite())).collect();
        let total = terms
            .iter()
            .zip(&self.terms)
            .filter_map(|(score, (_, weight))| score.map(|s| s * weight))
            .reduce(|a, b| a + b)
            .filter(|r| r.is_finite());
        Reward { total, terms }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::Addition;

    struct Fixed(Option<f32>);

    impl RewardFn for Fixed {
        fn name(&self) -> &str {
            "fixed"
        }
        fn score(&self, _: &RewardInput<'_>) -> Option<f32> {
            self.0
        }
    }

    fn score(rewards: &Rewards, completion: &str, truncated: bool) -> Reward {
        let problem = Problem { prompt: "37+48=".into(), answer: "85".into() };
        rewards.score(&RewardInput {
            problem: &problem,
            task: &Addition { max_number: 99, zero_pad: false },
            completion,
            truncated,
            completion_len: completion.len() + usize::from(!truncated),
        })
    }

    #[test]
    fn built_in_rewards_judge_right_wrong_and_cut_off() {
        let rewards =
            Rewards::new(&RewardConfig { correct: 1.0, partial: 0.5, terminated: 0.25, ..RewardConfig::default() })
                .unwrap();
        assert_eq!(rewards.names().collect::<Vec<_>>(), ["correct", "partial", "terminated"]);
        assert_eq!(score(&rewards, "85", false).total, Some(1.75));
        assert_eq!(score(&rewards, "75", false).total, Some(0.5));
        assert_eq!(score(&rewards, "85", true).terms, [Some(0.0), Some(1.0), Some(0.0)]);
    }

    #[test]
    fn long_completions_are_punished_in_tokens_with_eos() {
        let overlong = SoftOverlong { max_completion_len: 6, soft_punish_cache: 4, penalty_factor: 0.5 };
        let config = RewardConfig { correct: 2.0, soft_overlong_punishment: Some(overlong), ..Default::default() };
        let rewards = Rewards::new(&config).unwrap();
        assert_eq!(rewards.names().last(), Some("soft_overlong_punishment"));
        assert_eq!(rewards.weights().collect::<Vec<_>>(), [2.0, 1.0]);
        // 2 tokens and EOS: one beyond 6 - 4, a quarter of the cache.
        assert_eq!(score(&rewards, "85", false), Reward { total: Some(1.875), terms: vec![Some(1.0), Some(-0.125)] });
        assert_eq!(score(&rewards, "", false).terms[1], Some(0.0));
        assert_eq!(score(&rewards, "123456", true).terms[1], Some(-0.5));
        assert_eq!(score(&rewards, "1234567890", true).terms[1], Some(-0.5));
    }

    #[test]
    fn missing_terms_leave_the_sum_and_all_missing_is_missing() {
        let rewards = |a, b| Rewards::from_terms(vec![(Box::new(Fixed(a)), 2.0), (Box::new(Fixed(b)), 1.0)]).unwrap();
        assert_eq!(score(&rewards(Some(3.0), None), "", false).total, Some(6.0));
        assert_eq!(score(&rewards(Some(f32::NAN), Some(1.0)), "", false).total, Some(1.0));
        assert_eq!(score(&rewards(None, None), "", false).total, None);
        assert_eq!(score(&rewards(Some(f32::MAX), None), "", false).total, None, "overflow is no reward");
    }

    #[test]
    fn no_reward_at_all_is_an_error() {
        assert!(Rewards::new(&RewardConfig { correct: 0.0, ..RewardConfig::default() }).is_err());
    }
}
