//! Configurations and parts of the tests.
// Each test binary uses some of it.
#![allow(dead_code)]

pub(crate) mod agents;
pub(crate) mod conversations;

use grpo_core::rewards::SoftOverlong;
use grpo_models::{NamedTensor, Tokenizer};
use grpo_rewards::{RewardFn, RewardInput, Rewards};
use grpo_run_config::{GrpoConfig, KlControlType, RolloutConfig, WarmupConfig};
use grpo_trainer::{Phase, TrainConfig, TrainState, Trainer};

/// A reward function from a closure.
pub(crate) struct Scored<F>(pub(crate) &'static str, pub(crate) F);

impl<F: Fn(&RewardInput<'_>) -> Option<f32> + Send + Sync> RewardFn for Scored<F> {
    fn name(&self) -> &str {
        self.0
    }
    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        self.1(input)
    }
}

/// Returns the rewards of a run with a single reward function.
pub(crate) fn scored<F>(name: &'static str, score: F) -> Rewards
where
    F: Fn(&RewardInput<'_>) -> Option<f32> + Send + Sync + 'static,
{
    Rewards::from_terms(vec![(Box::new(Scored(name, score)), 1.0)]).unwrap()
}

/// Returns a run after its warm-up.
pub(crate) fn warm(mut run: Trainer) -> Trainer {
    while run.phase() == Phase::Warmup {
        run.warmup_step().unwrap();
    }
    run
}

/// A tokenizer with one token per character of Latin-1, for models without one.
pub(crate) struct Latin1 {
    pub(crate) vocab_size: usize,
}

impl Tokenizer for Latin1 {
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn eos_id(&self) -> u32 {
        2
    }

    /// Returns one token in eight, so that some completions end and some are truncated.
    fn stop_ids(&self) -> Vec<u32> {
        (self.eos_id()..self.vocab_size as u32).step_by(8).collect()
    }

    fn pad_id(&self) -> u32 {
        0
    }

    fn encode(&self, text: &str) -> grpo_models::Result<Vec<u32>> {
        Ok(text.chars().map(u32::from).collect())
    }

    fn encode_prompt(&self, text: &str) -> grpo_models::Result<Vec<u32>> {
        self.encode(text)
    }

    fn decode(&self, ids: &[u32]) -> grpo_models::Result<String> {
        Ok(ids.iter().filter_map(|id| char::from_u32(*id)).collect())
    }
}

/// Returns a short run with off-policy updates, micro-batches and a reference policy.
pub(crate) fn small() -> TrainConfig {
    let mut config = TrainConfig {
        model: grpo_models::ModelConfig { hidden_size: 32, intermediate_size: 32, ..Default::default() }.into(),
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
pub(crate) fn everything() -> TrainConfig {
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
pub(crate) fn ppo() -> TrainConfig {
    let mut config = small();
    config.grpo.use_kl_in_reward = true;
    config.grpo.advantages.estimator = grpo_core::AdvantageEstimator::Gae;
    config
}

/// Returns LoRA with a KL to the base model.
pub(crate) fn adapters() -> TrainConfig {
    let mut config = TrainConfig { lora: Some(grpo_models::LoraConfig { r: 2, ..Default::default() }), ..small() };
    config.loss.beta = 0.05;
    config
}

/// Returns a run right after its warm-up.
pub(crate) fn warmed_up(config: TrainConfig) -> Trainer {
    warm(grpo_setup::trainer(config).unwrap())
}

/// Returns a run after its last step.
pub(crate) fn finished(run: Trainer) -> Trainer {
    let mut run = warm(run);
    while run.phase() == Phase::Grpo {
        run.grpo_step().unwrap();
    }
    run
}

pub(crate) fn whole_run(config: TrainConfig) -> TrainState {
    finished(grpo_setup::trainer(config).unwrap()).state().unwrap()
}

pub(crate) fn weights(run: &Trainer) -> Vec<NamedTensor> {
    run.state().unwrap().policy
}
