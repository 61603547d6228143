//! The section `grpo`: the training loop around the loss, with the names of TRL's GRPOConfig and verl's `algorithm`.

use grpo_core::advantages::{AdvantageConfig, AdvantageEstimator, DynamicSampling};
use grpo_core::config::KlEstimator;
use grpo_core::controllers::{AdaptiveEntropy, AdaptiveKl, FixedKl, KlController};
use grpo_core::objective::ValueLossConfig;
use grpo_core::{Implementation, LossConfig};
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// The settings of the GRPO loop.
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GrpoConfig {
    /// The number of rollout steps, each of `num_iterations x steps_per_generation` optimizer steps.
    #[default(200)]
    pub max_steps: u64,
    /// The number of passes over the training rows of `data.files`, instead of `max_steps`. The run records the resulting number of steps.
    /// Additional rows that dynamic sampling (`filter_groups`) draws do not count.
    pub num_train_epochs: Option<f64>,
    /// The number of different prompts per rollout step.
    #[default(8)]
    pub prompts_per_step: usize,
    /// The number of completions per prompt, the group size of group-relative advantages.
    #[default(8)]
    pub num_generations: usize,
    /// The number of passes over each generation batch (mu in the papers).
    #[default(1)]
    pub num_iterations: usize,
    /// The number of optimizer steps per pass; the generation batch is split evenly into whole groups.
    #[default(1)]
    pub steps_per_generation: usize,
    /// The number of micro-batches per optimizer step. It changes time and memory, and the gradient only by rounding.
    #[default(8)]
    pub gradient_accumulation_steps: usize,
    /// The implementation of the loss on `policy.device: host`. It changes time and memory, and results only within tolerance.
    pub implementation: Implementation,
    /// The estimator of advantages and its options. The section `rewards` has the weights of reward functions, so `reward_weights` stays
    /// empty. `gae` is PPO: the policy gets a value head, which is trained as well. Optimal token baselines are refused, because scoring
    /// returns no sums of squared probabilities. Truncated completions take part in the comparison even if the loss masks them.
    pub advantages: AdvantageConfig,
    /// The factor of the value loss in PPO's loss, with `advantages.estimator: gae`.
    #[default(ValueLossConfig::default().vf_coef)]
    pub vf_coef: f64,
    /// The clip range of PPO's values around the values at sampling; `None` (null) disables clipping.
    #[default(ValueLossConfig::default().cliprange_value)]
    pub cliprange_value: Option<f64>,
    /// The factor of every advantage; 1 is GRPO, 0 is a control run that must not learn.
    #[default(1.0)]
    pub advantage_scale: f32,
    /// Dynamic sampling (DAPO): which groups are trained on, and how often replacements for others are sampled.
    pub filter_groups: FilterGroupsConfig,
    /// `true` if coefficient x KL(policy || reference) is subtracted from the reward of each token before advantages are computed.
    /// Estimators of one advantage per completion use the sum over its tokens (TRL's RLOO).
    pub use_kl_in_reward: bool,
    /// The estimator of the KL in the reward. verl and TRL's RLOO use k1.
    #[default(KlEstimator::K1)]
    pub kl_penalty: KlEstimator,
    /// The coefficient of the KL in the reward.
    pub kl_ctrl: KlControlConfig,
    /// `true` if the coefficient of the entropy bonus adapts after each optimizer step, starting with `loss.entropy_coef`, and is applied
    /// while the entropy is at most `entropy_target` (Skywork-OR1).
    pub use_adaptive_entropy: bool,
    /// The minimum coefficient of the adaptive entropy bonus.
    #[default(AdaptiveEntropy::default().entropy_coef_min)]
    pub entropy_coef_min: f64,
    /// The maximum coefficient of the adaptive entropy bonus.
    #[default(AdaptiveEntropy::default().entropy_coef_max)]
    pub entropy_coef_max: f64,
    /// The change of the adaptive entropy coefficient per optimizer step.
    #[default(AdaptiveEntropy::default().entropy_coef_delta)]
    pub entropy_coef_delta: f64,
    /// The target of the adaptive entropy bonus: the mean entropy of a token in nats.
    #[default(AdaptiveEntropy::default().entropy_target)]
    pub entropy_target: f64,
    /// `true` if the reference policy moves towards the policy every `ref_model_sync_steps` optimizer steps (TR-DPO).
    pub sync_ref_model: bool,
    /// The alpha, in [0, 1], in ref = alpha x policy + (1 - alpha) x ref.
    #[default(0.6)]
    pub ref_model_mixup_alpha: f64,
    /// The number of optimizer steps between two such updates of the reference policy.
    #[default(512)]
    pub ref_model_sync_steps: u64,
}

impl GrpoConfig {
    /// Returns the number of sequences of a step.
    pub fn sequences(&self) -> usize {
        self.prompts_per_step * self.num_generations
    }

    /// Replaces `num_train_epochs` by the number of steps for as many passes over `rows` training rows.
    pub fn count_epochs(&mut self, rows: usize) {
        if let Some(epochs) = self.num_train_epochs.take() {
            // Rounding errors must not add a step.
            let steps = epochs * rows as f64 / self.prompts_per_step as f64;
            self.max_steps = ((steps - 1e-9 * steps).ceil() as u64).max(1);
        }
    }

    /// Returns the number of optimizer steps of a step.
    pub fn updates(&self) -> usize {
        self.num_iterations * self.steps_per_generation
    }

    /// Returns `true` if a step scores its completions with the policy before training. With a single update, the policy is its own old policy and
    /// every ratio is 1.
    pub fn scores_old_policy(&self) -> bool {
        self.updates() > 1 || self.use_kl_in_reward
    }

    /// Returns `true` if a step can fail after one of its updates was applied. A failing update itself changes nothing.
    pub fn fails_after_an_update(&self) -> bool {
        self.updates() > 1 || self.sync_ref_model || self.use_adaptive_entropy
    }

    /// Returns the maximum number of sequences of a micro-batch.
    pub fn micro_batch_sequences(&self) -> usize {
        let groups = self.prompts_per_step.div_ceil(self.steps_per_generation);
        (groups * self.num_generations).div_ceil(self.gradient_accumulation_steps)
    }

    /// Returns the value loss of PPO; `None` if no value head is trained.
    pub fn value_loss(&self) -> Option<ValueLossConfig> {
        let Self { vf_coef, cliprange_value, .. } = *self;
        (self.advantages.estimator == AdvantageEstimator::Gae).then_some(ValueLossConfig { vf_coef, cliprange_value })
    }

    /// Returns the controller of the entropy bonus at the start of a run; `None` if the coefficient stays `loss.entropy_coef`.
    pub fn entropy_controller(&self, loss: &LossConfig) -> Option<AdaptiveEntropy> {
        self.use_adaptive_entropy.then(|| AdaptiveEntropy {
            entropy_coef: loss.entropy_coef,
            entropy_coef_min: self.entropy_coef_min,
            entropy_coef_max: self.entropy_coef_max,
            entropy_coef_delta: self.entropy_coef_delta,
            entropy_target: self.entropy_target,
            ..AdaptiveEntropy::default()
        })
    }
}

/// Dynamic sampling, with verl's names. A generation batch has `prompts_per_step` prompts; further batches are sampled until enough
/// groups are kept, and surplus groups are dropped.
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FilterGroupsConfig {
    /// `true` if groups are filtered.
    pub enable: bool,
    /// The reward by which groups are filtered: `reward`, the weighted sum of all rewards (before the KL), or the name of a reward function
    /// such as `correct`.
    #[default(REWARD.into())]
    pub metric: String,
    /// The maximum number of generation batches of a step, at least 1; if they do not have enough groups, the run ends with an error, as in
    /// verl and NeMo-RL. verl's 0 (no limit) would sample forever once all groups have equal rewards.
    #[default(10)]
    pub max_num_gen_batches: usize,
    /// The rule by which groups are kept.
    pub keep: DynamicSampling,
}

/// The name of the weighted sum of all rewards.
pub const REWARD: &str = "reward";

/// The coefficient of the KL in the reward, with the keys of verl's `kl_ctrl`.
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KlControlConfig {
    /// The type of the coefficient, fixed or adaptive.
    pub r#type: KlControlType,
    /// The coefficient; for an adaptive one, its initial value.
    #[default(AdaptiveKl::default().kl_coef)]
    pub kl_coef: f64,
    /// The target of an adaptive coefficient: the KL in nats per token.
    #[default(AdaptiveKl::default().target_kl)]
    pub target_kl: f64,
    /// The number of completions over which an adaptive coefficient changes by at most a fifth.
    #[default(AdaptiveKl::default().horizon)]
    pub horizon: f64,
}

/// The types of the KL coefficient in the reward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlControlType {
    /// The coefficient is constant.
    #[default]
    Fixed,
    /// The coefficient adapts so that the KL approaches `target_kl`.
    Adaptive,
}

impl KlControlConfig {
    /// Returns the controller of the coefficient at the start of a run.
    pub fn controller(&self) -> KlController {
        let Self { kl_coef, target_kl, horizon, .. } = *self;
        match self.r#type {
            KlControlType::Fixed => KlController::Fixed(FixedKl { kl_coef }),
            KlControlType::Adaptive => KlController::Adaptive(AdaptiveKl { kl_coef, target_kl, horizon }),
        }
    }
}
