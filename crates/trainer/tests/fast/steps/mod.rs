//! Runs give the same bits with any number of threads, after an interruption, and with other micro-batches.

mod algorithm;
mod evaluations;
mod failing;
mod scripted;

use crate::{scored, warm};
use data::TaskMixture;
use data::task::Reverse;
use grpo_core::rewards::SoftOverlong;
use models::NamedTensor;
use policy::Policy;
use rewards::{RewardFn, RewardInput, Rewards};
use rstest::rstest;
use run_config::{GrpoConfig, KlControlType, RolloutConfig, WarmupConfig};
use std::sync::Arc;
use trainer::{Error, Parts, Phase, Result, TrainConfig, TrainState, Trainer};

/// Returns a short run with off-policy updates, micro-batches and a reference policy.
fn small() -> TrainConfig {
    let mut config = TrainConfig {
        model: models::ModelConfig { hidden_size: 32, intermediate_size: 32, ..Default::default() }.into(),
        warmup: WarmupConfig { steps: 3, until_pass_at_1: None, batch_size: 48, ..TrainConfig::built_in().warmup },
        rollout: RolloutConfig { max_completion_length: Some(4), batch_size: 8, ..Default::default() },
        grpo: GrpoConfig {
            max_steps: 4,
            prompts_per_step: 6,
            num_generations: 4,
            num_iterations: 2,
            steps_per_generation: 2,
            gradient_accumulation_steps: 3,
            ..Default::default()
        },
        ..TrainConfig::built_in()
    };
    config.eval.num_problems = Some(16);
    config.rewards.partial = 1.0;
    config.loss.beta = 0.05;
    config
}

/// Returns the same configuration with every feature that has state of its own or draws more samples.
fn everything() -> TrainConfig {
    let mut config = small();
    config.rewards.soft_overlong_punishment =
        Some(SoftOverlong { max_completion_len: 4, soft_punish_cache: 3, penalty_factor: 0.5 });
    config.loss.entropy_coef = 0.01;
    let grpo = &mut config.grpo;
    grpo.use_kl_in_reward = true;
    grpo.kl_ctrl.r#type = KlControlType::Adaptive;
    grpo.kl_ctrl.horizon = 100.0;
    grpo.use_adaptive_entropy = true;
    grpo.entropy_target = 3.5;
    grpo.sync_ref_model = true;
    grpo.ref_model_sync_steps = 3;
    grpo.filter_groups.enable = true;
    grpo.advantages.estimator = grpo_core::AdvantageEstimator::Remax;
    config
}

/// Returns PPO with the KL in the reward.
fn ppo() -> TrainConfig {
    let mut config = small();
    config.grpo.use_kl_in_reward = true;
    config.grpo.advantages.estimator = grpo_core::AdvantageEstimator::Gae;
    config
}

/// Returns LoRA with a KL to the base model.
fn adapters() -> TrainConfig {
    let mut config = TrainConfig { lora: Some(models::LoraConfig { r: 2, ..Default::default() }), ..small() };
    config.loss.beta = 0.05;
    config
}

/// Returns a run right after its warm-up.
fn warmed_up(config: TrainConfig) -> Trainer {
    warm(Trainer::new(config).unwrap())
}

/// Returns a run after its last step.
fn finished(run: Trainer) -> Trainer {
    let mut run = warm(run);
    while run.phase() == Phase::Grpo {
        run.grpo_step().unwrap();
    }
    run
}

fn whole_run(config: TrainConfig) -> TrainState {
    finished(Trainer::new(config).unwrap()).state().unwrap()
}

fn weights(run: &Trainer) -> Vec<NamedTensor> {
    run.state().unwrap().policy
}

#[track_caller]
fn assert_same_bits(a: &TrainState, b: &TrainState) {
    assert_eq!((a.counters, &a.coefficients), (b.counters, &b.coefficients));
    for (a, b) in [(&a.policy, &b.policy), (&a.optimizer, &b.optimizer), (&a.ref_policy, &b.ref_policy)] {
        assert_eq!(a.len(), b.len());
        for (a, b) in a.iter().zip(b) {
            assert_eq!((&a.name, &a.shape), (&b.name, &b.shape));
            assert!(a.data.iter().zip(&b.data).all(|(x, y)| x.to_bits() == y.to_bits()), "{} differs", a.name);
        }
    }
}

#[test]
fn equal_seeds_give_equal_bits_and_other_seeds_differ() {
    let first = whole_run(small());
    assert_same_bits(&first, &whole_run(small()));
    assert_ne!(first.policy, whole_run(TrainConfig { seed: 1, ..small() }).policy);
}

#[test]
fn the_number_of_threads_does_not_matter() {
    let on = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| whole_run(small()))
    };
    assert_same_bits(&on(1), &on(3));
}

#[rstest]
#[case::in_the_warmup(2, everything())]
#[case::between_the_phases(3, ppo())]
#[case::in_grpo(5, everything())]
#[case::in_grpo_with_adapters(5, adapters())]
#[case::at_the_end(7, small())]
fn a_restored_run_continues_bit_for_bit(#[case] steps: usize, #[case] config: TrainConfig) {
    assert_continues(steps, config);
}

#[rstest]
#[ignore = "GRPO_TESTS=all"]
fn a_run_of_every_kind_continues_bit_for_bit(
    #[values(2, 3, 5, 7)] steps: usize,
    #[values(small(), everything(), ppo(), adapters())] config: TrainConfig,
) {
    assert_continues(steps, config);
}

fn assert_continues(steps: usize, config: TrainConfig) {
    let uninterrupted = whole_run(config.clone());
    let mut first = Trainer::new(config.clone()).unwrap();
    for _ in 0..steps {
        match first.phase() {
            Phase::Warmup => drop(first.warmup_step().unwrap()),
            Phase::Grpo => drop(first.grpo_step().unwrap()),
            Phase::Done => unreachable!("the run has 7 steps"),
        }
    }
    // An evaluation in between changes nothing.
    first.evaluate().unwrap();
    let saved = first.state().unwrap();
    let mut second = Trainer::new(config).unwrap();
    second.restore(&saved).unwrap();
    assert_same_bits(&saved, &second.state().unwrap());
    assert_same_bits(&uninterrupted, &finished(second).state().unwrap());
}

#[test]
fn a_mismatched_state_is_refused_and_changes_nothing() {
    let good = whole_run(small());
    let mut run = Trainer::new(small()).unwrap();
    let fresh = run.state().unwrap();
    let mut refuse = |change: &dyn Fn(&mut TrainState)| {
        let mut state = good.clone();
        change(&mut state);
        assert!(matches!(run.restore(&state), Err(Error::Policy(policy::Error::State { .. }))));
        assert_same_bits(&run.state().unwrap(), &fresh);
    };
    refuse(&|s| s.policy.truncate(1));
    refuse(&|s| s.optimizer.truncate(1));
    refuse(&|s| s.ref_policy.clear());
    refuse(&|s| s.coefficients.kl_coef = Some(trainer::coefficients::Exact(0.1)));
    refuse(&|s| s.counters.grpo_steps = 99);
    refuse(&|s| s.counters.warm = false);
    refuse(&|s| s.policy[0].shape.reverse());
}

#[test]
fn advantages_scaled_to_zero_leave_the_weights_alone() {
    let mut config = small();
    config.grpo.advantage_scale = 0.0;
    config.loss.beta = 0.0;
    config.optimizer.adamw.weight_decay = 0.0;
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
    let mut run = Trainer::new(config).unwrap();
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

/// Among them are losses that share a ratio, choose tokens or correct for the sampler.
#[rstest]
#[case::grpo(r#"{"beta": 0.05}"#)]
#[case::vespo(r#"{"loss_type": "vespo", "vllm_importance_sampling_correction": true, "vllm_importance_sampling_mode": "token_truncate"}"#)]
#[case::geo_mean(r#"{"loss_type": "geo_mean", "beta": 0.1}"#)]
#[case::high_entropy(r#"{"top_entropy_quantile": 0.5, "entropy_coef": 0.01}"#)]
#[case::truncated(r#"{"loss_type": "dapo", "mask_truncated_completions": true}"#)]
#[case::kl_cov(r#"{"semantics": "verl", "loss_type": "kl_cov", "kl_cov_ratio": 0.1}"#)]
#[case::verl(r#"{"semantics": "verl", "loss_agg_mode": "seq-mean-token-mean", "rollout_is": "token", "rollout_rs": "seq_mean_k3",
    "rollout_rs_threshold": 0.5}"#)]
#[case::imitation(r#"{"loss_type": "dapo", "positive_example_nll_weight": 0.2}"#)]
#[case::kl_against_the_sampler(r#"{"kl_importance": "sampler", "beta": 0.1}"#)]
#[case::prompts(r#"{"loss_agg_mode": "prompt-mean", "kl_importance": "score_function", "beta": 0.1}"#)]
fn results_do_not_depend_on_micro_batches(#[case] loss: &str) {
    let with = |gradient_accumulation_steps| {
        let mut config = small();
        config.loss = serde_json::from_str(loss).unwrap();
        config.grpo.gradient_accumulation_steps = gradient_accumulation_steps;
        config.grpo.max_steps = 1;
        config.warmup.steps = 1;
        let mut run = warmed_up(config);
        let report = run.grpo_step().unwrap();
        let masks = run.config().loss.mask_truncated_completions;
        let counts = |sample: &trainer::step::Sample| sample.advantage != 0.0 && !(masks && sample.truncated);
        let trains = report.samples.iter().any(counts);
        assert_eq!(report.metric("grad_norm") > 0.0, trains);
        weights(&run)
    };
    for (a, b) in with(1).iter().zip(&with(3)) {
        let largest = a.data.iter().zip(&b.data).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
        assert!(largest < 2e-4, "{} {largest}", a.name);
    }
}

#[test]
fn phases_keep_their_order() {
    let mut run = Trainer::new(small()).unwrap();
    assert!(matches!(run.grpo_step(), Err(Error::Argument { .. })));
    let mut run = finished(run);
    assert_eq!(run.phase(), Phase::Done);
    assert!(run.warmup_step().is_err() && run.grpo_step().is_err());
    let counters = run.counters();
    assert_eq!((counters.warmup_steps, counters.grpo_steps, counters.optimizer_steps), (3, 4, 16));
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
    let tasks: data::WeightedTasks = vec![(Arc::new(Reverse { min_length: 2, max_length: 3 }), 1.0)];
    let dataset = Box::new(TaskMixture::from_tasks(tasks, 0.2, config.seed).unwrap());
    // Rewards short completions, and returns no reward for truncated ones.
    let rewards = scored("brief", |input| (!input.truncated).then(|| -(input.completion.len() as f32)));
    let parts = Parts { dataset, rewards, ..Parts::from_config(&config).unwrap() };
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
    let error = Trainer::new(config).err().unwrap().to_string();
    assert!(error.contains("rollout.max_completion_length"), "{error}");
}
