//! Reward functions that fail to score completions.

use super::scripted::{Script, Terms, one_group, power, with_parts};
use super::*;
use grpo_data::task::Addition;
use grpo_rewards::RewardFailure;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A task whose reference answers are numbers, so that the rewards pass the check before training.
const NUMBERS: Addition = Addition { max_number: 99, zero_pad: false };

/// Returns the number in the completion, and fails if it is not a number.
struct Failing;

impl RewardFn for Failing {
    fn name(&self) -> &str {
        "failing"
    }
    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        input.completion.parse().ok()
    }
    fn score_batch(&self, inputs: &[RewardInput<'_>]) -> Vec<std::result::Result<Option<f32>, RewardFailure>> {
        let failure = || RewardFailure::new("the judge is on strike");
        inputs.iter().map(|input| self.score(input).map(Some).ok_or_else(failure)).collect()
    }
}

/// Rewards 1 and 3, and one failure: advantages are those of two completions, and the third is not trained on.
#[rstest]
fn unscored_completions_are_excluded_from_their_group(#[values("group", "gdpo")] estimator: &str) {
    let mut config = one_group(small(), 3);
    config.grpo.advantages = serde_json::from_value(serde_json::json!({"estimator": estimator})).unwrap();
    let terms: Terms = vec![(Box::new(Failing), 1.0), power("zero", 0, 1.0)];
    let script = Script { sampled: &["1.", "<.", "3."], greedy: "1." };
    let mut trainer = with_parts(config, NUMBERS, terms, script).unwrap();
    let report = trainer.grpo_step().unwrap();
    let advantages: Vec<f32> = report.samples.iter().map(|sample| sample.advantage).collect();
    assert!((advantages[0] + 0.707).abs() < 1e-3 && (advantages[2] - 0.707).abs() < 1e-3, "{advantages:?}");
    assert_eq!(advantages[1], 0.0);
    assert_eq!(report.samples[1].reward.total, None);
    assert_eq!((report.metric("rewards/failing/failures"), report.metric("reward")), (1.0, 3.0));
    assert_eq!(report.metrics.value("rewards/zero/failures"), None);
}

#[test]
fn consecutive_reward_failures_end_training_with_an_error() {
    /// Scores until the flag is set, and fails then.
    struct OnStrike(Arc<AtomicBool>);
    impl RewardFn for OnStrike {
        fn name(&self) -> &str {
            "failing"
        }
        fn score(&self, _: &RewardInput<'_>) -> Option<f32> {
            Some(1.0)
        }
        fn score_batch(&self, inputs: &[RewardInput<'_>]) -> Vec<std::result::Result<Option<f32>, RewardFailure>> {
            let failure = RewardFailure::new("the judge is on strike");
            inputs.iter().map(|_| if self.0.load(Relaxed) { Err(failure.clone()) } else { Ok(Some(1.0)) }).collect()
        }
    }
    let mut config = one_group(small(), 2);
    config.rewards.max_consecutive_failures = 5;
    let script = Script { sampled: &["<.", ">."], greedy: "1." };
    let fails = Arc::new(AtomicBool::new(false));
    let terms: Terms = vec![(Box::new(OnStrike(Arc::clone(&fails))), 1.0)];
    let mut trainer = with_parts(config, NUMBERS, terms, script).unwrap();
    trainer.grpo_step().unwrap();
    fails.store(true, Relaxed);
    for _ in 0..2 {
        let report = trainer.grpo_step().unwrap();
        assert_eq!(report.metric("rewards/failing/failures"), 2.0);
        assert!(report.samples.iter().all(|sample| sample.advantage == 0.0), "a step without any reward");
    }
    let before = trainer.counters();
    let error = trainer.grpo_step().unwrap_err().to_string();
    assert!(error.contains("`failing` has failed to judge 5 completions in a row"), "{error}");
    assert!(error.contains("the judge is on strike"), "{error}");
    assert_eq!(trainer.counters(), before, "the step was taken back");
}

#[rstest]
fn a_reward_that_fails_for_the_whole_first_step_ends_the_training(#[values(false, true)] filters: bool) {
    let mut config = one_group(small(), 3);
    config.grpo.filter_groups.enable = filters;
    // One of two rewards fails for every completion.
    let terms = |failing| -> Terms { vec![power("power", 1, 1.0), (failing, 1.0)] };
    let script = || Script { sampled: &["<.", ">.", "=."], greedy: "1." };
    let mut trainer = with_parts(config.clone(), NUMBERS, terms(Box::new(Failing)), script()).unwrap();
    let before = trainer.counters();
    let error = trainer.grpo_step().unwrap_err().to_string();
    let expected = "the reward `failing` has failed to judge every completion of the first step (3 of 3); the last failure: the \
                    judge is on strike";
    assert_eq!(error, expected);
    assert_eq!(trainer.counters(), before, "the step was taken back");
    // A function that scores one of them is only counted.
    let script = Script { sampled: &["<.", ">.", "2."], greedy: "1." };
    config.grpo.filter_groups.enable = false;
    let mut trainer = with_parts(config, NUMBERS, terms(Box::new(Failing)), script).unwrap();
    assert_eq!(trainer.grpo_step().unwrap().metric("rewards/failing/failures"), 2.0);
}

#[test]
fn unscored_completions_of_an_evaluation_are_counted_and_fail() {
    let evaluated = |pass_at| {
        let mut config = one_group(small(), 2);
        let eval = &mut config.eval;
        (eval.num_generations, eval.num_problems, eval.pass_reward) = (2, Some(8), Some("failing".into()));
        eval.pass_at = pass_at;
        // One of two samples gets a reward.
        let script = Script { sampled: &["1.", "<."], greedy: "<." };
        with_parts(config, NUMBERS, vec![(Box::new(Failing), 1.0)], script).unwrap().evaluate().unwrap()
    };
    let report = evaluated(vec![]);
    // All greedy completions, and half of the sampled ones.
    assert_eq!((report.failures["failing"], report.pass_at_1, report.mean_reward), (8 + 8, 0.0, Some(1.0)));
    let report = evaluated(vec![1]);
    assert_eq!((report.failures["failing"], report.pass_at_1), (8, 0.5));
}
