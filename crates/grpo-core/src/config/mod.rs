//! What the loss is: one flat configuration with TRL's names, verl's where TRL has none, and [`Semantics`] to say whose
//! meaning they have where systems disagree.

pub(crate) mod checks;
mod names;
mod read;
pub(crate) mod rejection;
mod resolve;
mod set;
mod validate;
pub(crate) mod values;

pub use crate::objective::{LossParameters, LossType};
pub use names::{
    ImportanceSamplingLevel, KlEstimator, KlImportance, LossAggMode, RolloutIs, SamplerMode, Semantics, TemperatureMode,
};
pub use values::{Bound, Threshold, Thresholds};

use serde::{Deserialize, Serialize};

/// The loss configuration. Unknown keys are errors that name the nearest key; see [`LossConfig::from_json`].
///
/// Where a key's default depends on the system, `None` (null) stands for it.
///
/// ```
/// use grpo_core::LossConfig;
///
/// let in_rust = LossConfig::dapo().epsilon_high(0.28).beta(0.04);
/// let from_a_file = LossConfig::from_json(r#"{"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.04}"#)?;
/// assert_eq!(in_rust, from_a_file);
/// assert!(LossConfig::from_json(r#"{"epsilon_hi": 0.28}"#).is_err());
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", default)]
pub struct LossConfig {
    /// Whose meanings and defaults.
    pub semantics: Semantics,
    /// Objective, and under TRL aggregation.
    pub loss_type: LossType,
    /// Level of the importance ratio; `None` is what the loss is defined with: `sequence` for gspo (verl:
    /// `sequence_token`) and luspo, else `token`. TRL warns where luspo's is `token`; here that has to be asked for.
    pub importance_sampling_level: Option<ImportanceSamplingLevel>,
    /// Lower clip: the ratio is held above 1 - epsilon_low. In [0, 1]. geo_mean: a bound on -log ratio. dppo, prime_rl and ipo: how
    /// far the probability may fall. TRL's cispo does not use it. `None` is 0.3 for prime_rl and ipo, and 0.2 for all others.
    pub epsilon_low: Option<f64>,
    /// Upper clip: the ratio is held below 1 + epsilon_high; TRL's cispo holds it below epsilon_high itself. `None` is
    /// epsilon_low, which TRL's cispo refuses because there it would be a bound on the raw ratio. geo_mean: a bound on
    /// the log ratio. dppo: how far the probability may rise.
    pub epsilon_high: Option<f64>,
    /// Cap on the unclipped ratio (two-sided clipping, INTELLECT-2); above 1 + epsilon_high. `None` is off.
    pub delta: Option<f64>,
    /// Dual clip (arXiv 1912.09729): with a negative advantage the loss is at most -A c. dppo: cap of its ratio. `None` is
    /// 3 for vanilla and verl's grpo, 20 for dppo, else off.
    pub clip_ratio_c: Option<f64>,
    /// Log-ratios are held to +- this before exp, without a gradient outside. `None` is off, and 20 under
    /// verl's semantics where verl does it: vanilla, cispo, sapo, dppo.
    pub log_ratio_guard: Option<Bound>,
    /// Weight of the KL term; 0 is off, and then no reference log-probabilities are needed.
    pub beta: f64,
    /// Estimator of the KL term.
    pub kl_estimator: KlEstimator,
    /// Multiplies the KL term by the (differentiable, uncapped) importance ratio. `None` is TRL 1.16's true, and false
    /// elsewhere.
    pub use_bias_correction_kl: Option<bool>,
    /// What multiplies the KL term, where that is not for `use_bias_correction_kl` to say: true is `ratio`, false `off`.
    pub kl_importance: Option<KlImportance>,
    /// ref_logp - logp is held to +- this in the KL term, which has no gradient outside. `None` is 20 for verl's k3.
    pub kl_input_clamp: Option<Bound>,
    /// The KL term, multiplied, is held to +- this, without a gradient outside. `None` is 10 for verl's k3.
    pub kl_output_clamp: Option<Bound>,
    /// Weight of the entropy bonus: loss -= entropy_coef * mean entropy of active tokens (verl: averaged as the loss
    /// is). 0 is off.
    pub entropy_coef: f64,
    /// Weight of the negative log-likelihood of the sequences [`positive_rows`](crate::batch::StepData): loss += weight * mean of -logp over their
    /// tokens (VAPO, arXiv 2504.05118; NeMo-RL). 0 is off.
    pub positive_example_nll_weight: f64,
    /// Share of tokens, those of the highest entropy, whose policy term counts. 1 is all. In (0, 1]. arXiv 2506.01939.
    pub top_entropy_quantile: f64,
    /// The keys of single losses ([`crate::objective`]); flat in configuration files.
    #[serde(flatten)]
    pub parameters: LossParameters,
    /// Whether the ratio between old policy and sampler weighs the policy term where the batch has `sampler_logp`. `None`
    /// is TRL's true, and false elsewhere.
    pub vllm_importance_sampling_correction: Option<bool>,
    /// How that ratio is bounded, or what it masks.
    pub vllm_importance_sampling_mode: SamplerMode,
    /// Upper bound of that ratio.
    pub vllm_importance_sampling_clip_max: Option<f64>,
    /// Lower bound of that ratio.
    pub vllm_importance_sampling_clip_min: Option<f64>,
    /// verl's correction for the sampler; replaces TRL's.
    pub rollout_is: Option<RolloutIs>,
    /// Its bounds; two of them mean icepop, for which one stands for its reciprocal too. `None` is no correction.
    pub rollout_is_threshold: Option<Threshold>,
    /// Whether its weights are divided by their mean.
    pub rollout_is_batch_normalize: bool,
    /// verl's rejection of tokens or sequences by how far sampler and old policy are apart, as in `token_k1,seq_mean_k3`.
    /// What is rejected is masked.
    pub rollout_rs: Option<String>,
    /// Its bounds, one for each: `lower_upper` ratios for k1, an upper bound for the others.
    pub rollout_rs_threshold: Option<Thresholds>,
    /// Sequences of negative advantage whose mean of sampler (or old) logp - logp is above this do not count in the policy
    /// term. DeepSeek-V3.2. `None` is off.
    pub off_policy_mask_threshold: Option<f64>,
    /// Whether the sequences [`truncated_rows`](crate::batch::StepData) are masked.
    pub mask_truncated_completions: bool,
    /// Sampling temperature T, from 1e-6 to 1e6: f32 arithmetic has no digits left outside.
    pub temperature: f64,
    /// What the temperature divides; `None` is logits, and log-probabilities for MLLM-JAX.
    pub temperature_mode: Option<TemperatureMode>,
    /// Multiplies the logits before anything else happens to them (Cohere's `logit_scale`); from 1e-6 to 1e6, or minus that.
    pub logit_scale: f64,
    /// Then holds them within plus and minus this: cap * tanh(logits / cap) (Gemma 2's `final_logit_softcapping`; from 1e-6
    /// to 1e6), before the temperature divides them. `None` is off.
    pub final_logit_softcapping: Option<f64>,
    /// verl's aggregation; `None` is what `loss_type` says, and `token-mean` for verl.
    pub loss_agg_mode: Option<LossAggMode>,
    /// The average of the KL term; `None` is that of the policy term, but for sapo and geo_mean of verl.
    pub kl_agg_mode: Option<LossAggMode>,
    /// Whether fully masked sequences count in means over sequences. `None` is true, and verl's false.
    pub count_masked_rows: Option<bool>,
    /// Constant length of dr_grpo, in tokens.
    pub max_completion_length: Option<usize>,
    /// TRL: the batch is one of so many that are accumulated. 1 where the batch is the whole step.
    pub gradient_accumulation_steps: usize,
    /// TRL: batches in a generation batch; `None` is `gradient_accumulation_steps`.
    pub steps_per_generation: Option<usize>,
    /// TRL: processes whose gradients are averaged.
    pub num_processes: usize,
    /// verl: constant length of seq-mean-token-sum-norm; `None` is the width of the batch. tunix: divisor of
    /// sequence-mean-token-sum-norm; `None` is the number of sequences.
    pub loss_scale_factor: Option<f64>,
    /// verl: processes whose gradients are averaged.
    pub dp_size: usize,
    /// prompt-mean: completions of a prompt, which lie next to each other.
    pub num_generations: Option<usize>,
    /// token-mean-legacy: sequences of a micro-batch.
    pub micro_batch_size: Option<usize>,
}

impl Default for LossConfig {
    fn default() -> Self {
        Self {
            semantics: Semantics::Trl,
            loss_type: LossType::Grpo,
            importance_sampling_level: None,
            epsilon_low: None,
            epsilon_high: None,
            delta: None,
            clip_ratio_c: None,
            log_ratio_guard: None,
            beta: 0.0,
            kl_estimator: KlEstimator::K3,
            use_bias_correction_kl: None,
            kl_importance: None,
            kl_input_clamp: None,
            kl_output_clamp: None,
            entropy_coef: 0.0,
            positive_example_nll_weight: 0.0,
            top_entropy_quantile: 1.0,
            parameters: LossParameters::default(),
            vllm_importance_sampling_correction: None,
            vllm_importance_sampling_mode: SamplerMode::SequenceMask,
            vllm_importance_sampling_clip_max: Some(3.0),
            vllm_importance_sampling_clip_min: None,
            rollout_is: None,
            rollout_is_threshold: Some(Threshold { low: None, high: 2.0 }),
            rollout_is_batch_normalize: false,
            rollout_rs: None,
            rollout_rs_threshold: None,
            off_policy_mask_threshold: None,
            mask_truncated_completions: false,
            temperature: 1.0,
            temperature_mode: None,
            logit_scale: 1.0,
            final_logit_softcapping: None,
            loss_agg_mode: None,
            kl_agg_mode: None,
            count_masked_rows: None,
            max_completion_length: None,
            gradient_accumulation_steps: 1,
            steps_per_generation: None,
            num_processes: 1,
            loss_scale_factor: None,
            dp_size: 1,
            num_generations: None,
            micro_batch_size: None,
        }
    }
}
