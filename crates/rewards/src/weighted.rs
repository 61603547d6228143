//! The weighted sum of reward functions.

use crate::config::RewardConfig;
use crate::error::{Result, check};
use crate::reward_fn::{RewardFailure, RewardFn, RewardInput, Score};

/// A weighted sum of reward functions.
pub struct Rewards {
    terms: Vec<(Box<dyn RewardFn>, f32)>,
}

/// The reward of one completion.
#[derive(Clone, Debug, PartialEq)]
pub struct Reward {
    /// The weighted sum of the terms that are present; `None` if there are none, if one failed, or if the sum is not finite.
    pub total: Option<f32>,
    /// Each term without its weight, in the order of [`Rewards::names`]. Failed terms are `None`.
    pub terms: Vec<Option<f32>>,
    /// The failed terms, by index in [`Rewards::names`], with their errors.
    pub failures: Vec<(usize, RewardFailure)>,
}

impl Rewards {
    /// Returns the rewards with nonzero weights. Programs are started, and requests sent, only when there are completions to score.
    ///
    /// # Errors
    /// The errors of [`Rewards::from_terms`] and [`RewardConfig::validate`].
    pub fn new(config: &RewardConfig) -> Result<Self> {
        Self::with_seed(config, 0)
    }

    /// Like [`Rewards::new`], with the seed of the run for the jitter of repeated requests. It does not change rewards.
    ///
    /// # Errors
    /// The errors of [`Rewards::new`].
    pub fn with_seed(config: &RewardConfig, seed: u64) -> Result<Self> {
        Self::from_terms(config.terms(seed)?)
    }

    /// Returns the weighted sum of any reward functions.
    ///
    /// # Errors
    /// [`crate::Error::Config`] if there are no functions, two have the same name, or a weight is not finite.
    pub fn from_terms(terms: Vec<(Box<dyn RewardFn>, f32)>) -> Result<Self> {
        let expected = "at least one reward with a weight other than 0, e.g. `rewards: {correct: 1}`";
        check(!terms.is_empty(), "rewards", expected, "none: there is nothing to train on")?;
        for (i, (term, weight)) in terms.iter().enumerate() {
            check(weight.is_finite(), &format!("rewards.{}", term.name()), "a finite weight", weight)?;
            let twice = terms[..i].iter().any(|(other, _)| other.name() == term.name());
            check(!twice, "rewards", "a name of its own for each reward", format!("`{}` twice", term.name()))?;
        }
        Ok(Self { terms })
    }

    /// Returns the names of the terms.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.terms.iter().map(|(term, _)| term.name())
    }

    /// Returns the weights of the terms.
    pub fn weights(&self) -> impl Iterator<Item = f32> {
        self.terms.iter().map(|(_, weight)| *weight)
    }

    /// Returns the names of the terms that need a reference answer, see [`RewardFn::needs_answer`].
    pub fn needing_answers(&self) -> impl Iterator<Item = &str> {
        self.terms.iter().filter(|(term, _)| term.needs_answer()).map(|(term, _)| term.name())
    }

    /// Scores one completion to check that every function works, so that errors are reported before training. The rewards are ignored.
    ///
    /// # Errors
    /// [`crate::Error::Failed`] with the name of the first failing function.
    pub fn probe(&self, input: &RewardInput<'_>) -> Result<()> {
        let reward = self.score(std::slice::from_ref(input)).pop();
        match reward.as_ref().and_then(|reward| reward.failures.first()) {
            Some((index, failure)) => {
                Err(crate::Error::Failed { name: self.terms[*index].0.name().to_owned(), failure: failure.clone() })
            }
            None => Ok(()),
        }
    }

    /// Scores completions. Each function is called once with all of them. A completion that a function failed to score has no total.
    pub fn score(&self, inputs: &[RewardInput<'_>]) -> Vec<Reward> {
        self.score_some(&(0..self.terms.len()).collect::<Vec<_>>(), inputs)
    }

    /// Like [`Rewards::score`], but only with the functions at `indices` in [`Rewards::names`]; the terms of the others are missing.
    pub fn score_some(&self, indices: &[usize], inputs: &[RewardInput<'_>]) -> Vec<Reward> {
        let none = Reward { total: None, terms: vec![None; self.terms.len()], failures: Vec::new() };
        let mut rewards = vec![none; inputs.len()];
        // Conversations whose environment failed have no reward.
        let is_whole = |input: &RewardInput<'_>| input.conversation.is_none_or(|c| c.failure.is_none());
        let whole: Vec<RewardInput<'_>> = inputs.iter().filter(|input| is_whole(input)).copied().collect();
        for &index in indices.iter().filter(|index| **index < self.terms.len()) {
            let scored = rewards.iter_mut().zip(inputs).filter(|(_, input)| is_whole(input));
            for ((reward, _), score) in scored.zip(self.score_one(index, &whole)) {
                match score {
                    Ok(score) => reward.terms[index] = score,
                    Err(failure) => reward.failures.push((index, failure)),
                }
            }
        }
        for reward in rewards.iter_mut().filter(|reward| reward.failures.is_empty()) {
            let scores = reward.terms.iter().zip(&self.terms).enumerate();
            let weighted = scores.filter_map(|(index, (score, (_, weight)))| Some((index, (*score)? * weight)));
            reward.total = weighted.clone().map(|(_, value)| value).reduce(|a, b| a + b);
            if let Some(total) = reward.total.take_if(|total| !total.is_finite()) {
                let largest = weighted.max_by(|a, b| a.1.abs().total_cmp(&b.1.abs())).map_or(0, |(index, _)| index);
                let name = self.terms[largest].0.name();
                let message =
                    format!("expected a finite sum of rewards x weights, got {total}; its largest term is `{name}`");
                reward.failures.push((largest, RewardFailure::new(message)));
            }
        }
        rewards
    }

    /// Returns the results of only the function at `index`. NaN and infinity are failures.
    fn score_one(&self, index: usize, inputs: &[RewardInput<'_>]) -> Vec<Score> {
        let (term, _) = &self.terms[index];
        let mut scores = term.score_batch(inputs);
        let missing = || Err(RewardFailure::new(format!("`{}` judged too few completions", term.name())));
        scores.resize_with(inputs.len(), missing);
        let finite = |score: Option<f32>| match score.filter(|score| !score.is_finite()) {
            None => Ok(score),
            Some(found) => Err(RewardFailure::new(format!("`{}`: expected a finite reward, got {found}", term.name()))),
        };
        scores.into_iter().map(|score| score.and_then(finite)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_core::rewards::SoftOverlong;
    use grpo_data::task::Addition;
    use grpo_data::{Item, Problem};
    use std::sync::Arc;

    struct Fixed(&'static str, Option<f32>);

    impl RewardFn for Fixed {
        fn name(&self) -> &str {
            self.0
        }
        fn score(&self, _: &RewardInput<'_>) -> Option<f32> {
            self.1
        }
    }

    fn score(rewards: &Rewards, completion: &str, truncated: bool) -> Reward {
        let problem = Problem { prompt: "37+48=".into(), answer: "85".into() };
        let item = Item::from_task(Arc::new(Addition { max_number: 99, zero_pad: false }), problem);
        let completion_ids = vec![0; completion.len() + usize::from(!truncated)];
        let input = RewardInput { truncated, completion_ids: &completion_ids, ..RewardInput::new(&item, completion) };
        rewards.score(&[input]).remove(0)
    }

    #[test]
    fn built_in_rewards_score_right_wrong_and_truncated_completions() {
        let rewards =
            Rewards::new(&RewardConfig { correct: 1.0, partial: 0.5, terminated: 0.25, ..RewardConfig::default() })
                .unwrap();
        assert_eq!(rewards.names().collect::<Vec<_>>(), ["correct", "partial", "terminated"]);
        assert_eq!(score(&rewards, "85", false).total, Some(1.75));
        assert_eq!(score(&rewards, "75", false).total, Some(0.5));
        assert_eq!(score(&rewards, "85", true).terms, [Some(0.0), Some(1.0), Some(0.0)]);
    }

    #[test]
    fn the_overlong_penalty_counts_tokens_with_eos() {
        let overlong = SoftOverlong { max_completion_len: 6, soft_punish_cache: 4, penalty_factor: 0.5 };
        let config = RewardConfig { correct: 2.0, soft_overlong_punishment: Some(overlong), ..Default::default() };
        let rewards = Rewards::new(&config).unwrap();
        assert_eq!(rewards.names().last(), Some("soft_overlong_punishment"));
        assert_eq!(rewards.weights().collect::<Vec<_>>(), [2.0, 1.0]);
        // 2 tokens and EOS: one more than 6 - 4, which is a quarter of the cache.
        let of_85 = score(&rewards, "85", false);
        assert_eq!((of_85.total, of_85.terms), (Some(1.875), vec![Some(1.0), Some(-0.125)]));
        assert_eq!(score(&rewards, "", false).terms[1], Some(0.0));
        assert_eq!(score(&rewards, "123456", true).terms[1], Some(-0.5));
        assert_eq!(score(&rewards, "1234567890", true).terms[1], Some(-0.5));
    }

    #[test]
    fn missing_terms_are_left_out_and_a_sum_without_terms_is_missing() {
        let terms = |a, b| -> Vec<(Box<dyn RewardFn>, f32)> {
            vec![(Box::new(Fixed("a", a)), 2.0), (Box::new(Fixed("b", b)), 1.0)]
        };
        let rewards = |a, b| Rewards::from_terms(terms(a, b)).unwrap();
        assert_eq!(score(&rewards(Some(3.0), None), "", false).total, Some(6.0));
        assert_eq!(score(&rewards(None, None), "", false).total, None);
        let overflow = score(&rewards(Some(f32::MAX), None), "", false);
        assert_eq!((overflow.total, overflow.failures.len()), (None, 1), "an overflow is a failure");
        assert!(overflow.failures[0].1.to_string().contains("got inf; its largest term is `a`"));
    }

    #[test]
    fn nan_and_infinite_rewards_are_failures() {
        for found in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let terms: Vec<(Box<dyn RewardFn>, f32)> =
                vec![(Box::new(Fixed("own", Some(found))), 1.0), (Box::new(Fixed("other", Some(1.0))), 1.0)];
            let rewards = Rewards::from_terms(terms).unwrap();
            let reward = score(&rewards, "", false);
            assert_eq!((reward.total, &reward.terms[..]), (None, &[None, Some(1.0)][..]), "{found}");
            let failure = reward.failures[0].1.to_string();
            assert_eq!(failure, format!("`own`: expected a finite reward, got {found}"));
            let item = Item::new("?");
            let error = rewards.probe(&RewardInput::new(&item, "a")).unwrap_err().to_string();
            assert!(error.contains("the reward `own` cannot judge a completion"), "{error}");
        }
    }

    #[test]
    fn a_failed_term_makes_the_total_none_and_is_reported() {
        struct Failing;
        impl RewardFn for Failing {
            fn name(&self) -> &str {
                "failing"
            }
            fn score(&self, _: &RewardInput<'_>) -> Option<f32> {
                None
            }
            fn score_batch(&self, _: &[RewardInput<'_>]) -> Vec<Score> {
                vec![]
            }
        }
        let terms: Vec<(Box<dyn RewardFn>, f32)> =
            vec![(Box::new(Fixed("fixed", Some(3.0))), 2.0), (Box::new(Failing), 1.0)];
        let reward = score(&Rewards::from_terms(terms).unwrap(), "85", false);
        assert_eq!((reward.total, &reward.terms[..]), (None, &[Some(3.0), None][..]));
        assert_eq!(reward.failures[0].0, 1);
        assert!(reward.failures[0].1.to_string().contains("`failing` judged too few"), "{:?}", reward.failures);
    }

    #[test]
    fn duplicate_names_nan_weights_and_no_reward_are_errors() {
        let regex = [("correct".to_owned(), crate::RegexConfig { pattern: "x".into(), weight: 1.0 })].into();
        let error = RewardConfig { correct: 1.0, regex, ..RewardConfig::default() }.validate().unwrap_err();
        assert!(error.to_string().contains("`correct` twice"), "{error}");
        let error = RewardConfig { partial: f32::NAN, ..RewardConfig::default() }.validate().unwrap_err();
        assert!(error.to_string().contains("`rewards.partial`: expected a finite number, got NaN"), "{error}");
        let none = RewardConfig::default();
        none.validate().unwrap();
        assert!(Rewards::new(&none).is_err());
    }
}
