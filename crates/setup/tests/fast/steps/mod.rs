//! Steps of runs: their reports, their rewards and their errors.

mod evaluations;
mod failing;
mod scripted;

use crate::support::*;
use grpo_data::TaskMixture;
use grpo_data::task::Reverse;
use grpo_policy::Policy;
use grpo_rewards::{RewardFn, RewardInput, Rewards};
use grpo_run_config::WarmupConfig;
use grpo_trainer::{Error, Result, TrainConfig, TrainState, Trainer};
use rstest::rstest;
use std::sync::Arc;

#[test]
fn advantages_scaled_to_zero_leave_the_weights_alone() {
    let mut config = small();
    config.grpo.advantage_scale = 0.0;
    config.loss.beta = 0.0;
    config.optimizer.settings.weight_decay = 0.0;
    let mut run = warmed_up(config);
    let before = weights(&run);
    let report = run.grpo_step().unwrap();
    assert_eq!(report.metric("grad_norm"), 0.0);
    assert!(report.samples.iter().all(|s| s.advantage == 0.0));
    assert_eq!(before, weights(&run));
}

#[test]
fn the_first_step_clips_nothing_and_has_no_kl() {
    let mut config = small();
    config.grpo.max_steps = 1;
    config.grpo.num_iterations = 1;
    config.grpo.steps_per_generation = 1;
    config.warmup.steps = 0;
    let mut run = grpo_setup::trainer(config).unwrap();
    let report = run.grpo_step().unwrap();
    assert_eq!(report.metric("clip_ratio/region_mean"), 0.0);
    // The reference equals the policy; it is computed without autodiff and may round differently.
    assert!(report.metrics.value("kl").is_some_and(|kl| kl.abs() < 1e-10));
    assert!(report.metric("entropy") > 1.0);
    assert_eq!(report.samples.len(), 24);
}

#[test]
fn every_implementation_trains() {
    for implementation in grpo_core::Implementation::ALL {
        let mut config = small();
        config.grpo.max_steps = 1;
        config.grpo.implementation = implementation;
        config.warmup.steps = 1;
        let mut run = warmed_up(config);
        let before = weights(&run);
        assert!(run.grpo_step().unwrap().metric("grad_norm") > 0.0, "{implementation:?}");
        assert_ne!(before, weights(&run), "{implementation:?}");
    }
}

#[test]
fn the_warmup_ends_at_its_target() {
    let mut config = small();
    config.warmup.steps = 100;
    config.warmup.until_pass_at_1 = Some(0.0);
    let run = warmed_up(config);
    assert_eq!(run.counters().warmup_steps, 5, "the target is checked every fifth step");
}

#[test]
fn custom_parts_replace_the_built_in_ones() {
    let mut config = small();
    config.rollout.batch_size = 64;
    let tasks: grpo_data::WeightedTasks = vec![(Arc::new(Reverse { min_length: 2, max_length: 3 }), 1.0)];
    let dataset = Box::new(TaskMixture::from_tasks(tasks, 0.2, config.seed).unwrap());
    // Rewards short completions, and returns no reward for truncated ones.
    let rewards = scored("brief", |input| (!input.truncated).then(|| -(input.completion.len() as f32)));
    let mut parts = grpo_setup::parts(&config).unwrap();
    (parts.dataset, parts.rewards) = (dataset, rewards);
    let mut run = warm(Trainer::with_parts(config, parts).unwrap());
    let report = run.grpo_step().unwrap();
    assert!(report.samples.iter().all(|s| s.task == "reverse"));
    assert!(report.metrics.get("rewards/brief/mean").is_some());
    // A completion without a reward has an advantage of 0.
    assert!(report.samples.iter().all(|s| s.reward.total.is_some() || s.advantage == 0.0));
}

#[test]
fn a_completion_without_room_behind_its_prompt_is_refused() {
    let mut config = small();
    config.rollout.max_completion_length = Some(60);
    let error = grpo_setup::trainer(config).err().unwrap().to_string();
    assert!(error.contains("rollout.max_completion_length"), "{error}");
}
