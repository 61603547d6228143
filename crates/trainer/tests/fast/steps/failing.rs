//! Reward functions that fail to score completions.

use super::scripted::{Power, Script, TWO, with_parts};
use super::*;
use grpo_core::{AdvantageConfig, AdvantageEstimator};
use rewards::RewardFailure;

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
fn unscored_completions_are_excluded_from_their_group(
    #[values(AdvantageEstimator::Group, AdvantageEstimator::Gdpo)] estimator: AdvantageEstimator,
) {
    let mut config = TrainConfig { warmup: WarmupConfig { steps: 0, ..Default::default() }, ..small() };
    (config.grpo.prompts_per_step, config.grpo.num_generations, config.grpo.steps_per_generation) = (1, 3, 1);
    (config.rollout.max_completion_length, config.model.shape_mut().max_position_embeddings) = (Some(4), 32);
    config.grpo.advantages = AdvantageConfig { estimator, whiten: None, ..Default::default() };
    let terms: Vec<(Box<dyn RewardFn>, f32)> = vec![(Box::new(Failing), 1.0), (Box::new(Power("zero", 0)), 1.0)];
    let script = Script { sampled: &["1.", "<.", "3."], greedy: "1." };
    let mut trainer = unjudged(config, terms, script);
    let report = trainer.grpo_step().unwrap();
    let advantages: Vec<f32> = report.samples.iter().map(|sample| sample.advantage).collect();
    assert!((advantages[0] + 0.707).abs() < 1e-3 && (advantages[2] - 0.707).abs() < 1e-3, "{advantages:?}");
    assert_eq!(advantages[1], 0.0);
    assert_eq!(report.samples[1].reward.total, None);
    assert_eq!((report.metric("rewards/failing/failures"), report.metric("reward")), (1.0, 3.0));
    assert_eq!(report.metrics.value("rewards/zero/failures"), None);
}

/// Returns a trainer whose rewards score reference answers, so that they pass the check before training.
fn unjudged(config: TrainConfig, terms: Vec<(Box<dyn RewardFn>, f32)>, script: Script) -> Trainer {
    let dataset = TaskMixture::from_tasks(
        vec![(Arc::new(data::task::Addition { max_number: 99, zero_pad: false }), 1.0)],
        0.1,
        0,
    );
    let parts = Parts {
        dataset: Box::new(dataset.unwrap()),
        rewards: Rewards::from_terms(terms).unwrap(),
        engine: Box::new(script),
        ..Parts::from_config(&config).unwrap()
    };
    Trainer::with_parts(config, parts).unwrap()
}

#[test]
fn consecutive_reward_failures_end_training_with_an_error() {
    let mut config = TrainConfig { warmup: WarmupConfig { steps: 0, ..Default::default() }, ..small() };
    (config.grpo.prompts_per_step, config.grpo.num_generations, config.grpo.steps_per_generation) = (1, 2, 1);
    (config.rollout.max_completion_length, config.model.shape_mut().max_position_embeddings) = (Some(4), 32);
    config.rewards.max_consecutive_failures = 5;
    let mut trainer = unjudged(config, vec![(Box::new(Failing), 1.0)], Script { sampled: &["<.", ">."], greedy: "1." });
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

#[test]
fn failing_rewards_are_reported_before_training() {
    // The reference answers of comparisons are not numbers.
    let error = with_parts(small(), vec![(Box::new(Failing), 1.0)], TWO).map(drop).unwrap_err().to_string();
    assert!(error.contains("`failing` cannot judge a completion: the judge is on strike"), "{error}");
}

#[test]
fn unscored_completions_of_an_evaluation_are_counted_and_fail() {
    let mut config = small();
    (config.rollout.max_completion_length, config.model.shape_mut().max_position_embeddings) = (Some(4), 32);
    (config.eval.num_generations, config.eval.num_problems, config.eval.pass_reward) =
        (2, Some(8), Some("failing".into()));
    let terms = || -> Vec<(Box<dyn RewardFn>, f32)> { vec![(Box::new(Failing), 1.0)] };
    // One of two samples gets a reward.
    let script = || Script { sampled: &["1.", "<."], greedy: "<." };
    let report = unjudged(config.clone(), terms(), script()).evaluate().unwrap();
    // All greedy completions, and half of the sampled ones.
    assert_eq!((report.failures["failing"], report.pass_at_1, report.mean_reward), (8 + 8, 0.0, Some(1.0)));
    config.eval.pass_at = vec![1];
    let report = unjudged(config, terms(), script()).evaluate().unwrap();
    assert_eq!((report.failures["failing"], report.pass_at_1), (8, 0.5));
}
