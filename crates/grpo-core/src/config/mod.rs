//! The configuration of the loss: one flat set of keys with TRL's names, or verl's if TRL has none. [`Semantics`] selects the
//! meaning of a key if systems disagree.

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
use smart_default::SmartDefault;

/// The loss configuration. Unknown keys are errors that name the nearest key; see [`LossConfig::from_json`].
///
/// `None` (null) stands for a default that depends on the system.
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
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", default)]
pub struct LossConfig {
    /// The system whose meanings and defaults apply.
    pub semantics: Semantics,
    /// The loss, and under TRL's semantics the aggregation.
    pub loss_type: LossType,
    /// Level of the importance ratio; `None` selects the loss's own: `sequence` for gspo (verl:
    /// `sequence_token`) and luspo, else `token`. For luspo, TRL's default is `token`, with a warning; here it must be set.
    pub importance_sampling_level: Option<ImportanceSamplingLevel>,
    /// Lower clip: the ratio is clipped at 1 - epsilon_low. In [0, 1]. geo_mean: a bound on -log ratio. dppo, prime_rl and ipo: largest
    /// decrease of the probability. TRL's cispo does not use it. `None` is 0.3 for prime_rl and ipo, and 0.2 for all other losses.
    pub epsilon_low: Option<f64>,
    /// Upper clip: the ratio is clipped at 1 + epsilon_high; TRL's cispo clips it at epsilon_high itself. `None` is
    /// epsilon_low; TRL's cispo refuses `None`, because there the value bounds the raw ratio. geo_mean: a bound on
    /// the log ratio. dppo, prime_rl and ipo: largest increase of the probability.
    pub epsilon_high: Option<f64>,
    /// Cap on the unclipped ratio (two-sided clipping, INTELLECT-2); above 1 + epsilon_high. `None` turns it off.
    pub delta: Option<f64>,
    /// Dual clip (arXiv 1912.09729): with a negative advantage the loss is at most -A c. dppo: cap of the ratio. `None` is
    /// 3 for vanilla and verl's grpo, 20 for dppo, else off.
    pub clip_ratio_c: Option<f64>,
    /// Log-ratios are clamped to +- this value before exp, without a gradient outside. `None` is 20 under verl's semantics for the losses
    /// that verl guards (vanilla, grpo, cispo, sapo, dppo), else off.
    pub log_ratio_guard: Option<Bound>,
    /// Weight of the KL term; 0 turns it off, and no reference log-probabilities are needed.
    pub beta: f64,
    /// Estimator of the KL term.
    pub kl_estimator: KlEstimator,
    /// Multiplies the KL term by the (differentiable, uncapped) importance ratio. `None` is true under TRL's semantics (TRL 1.16), else
    /// false.
    pub use_bias_correction_kl: Option<bool>,
    /// Weight of the KL term. `None` follows `use_bias_correction_kl`: `ratio` if it is true, `off` if it is false.
    pub kl_importance: Option<KlImportance>,
    /// ref_logp - logp is clamped to +- this value in the KL term, without a gradient outside. `None` is 20 for verl's k3.
    pub kl_input_clamp: Option<Bound>,
    /// The weighted KL term is clamped to +- this value, without a gradient outside. `None` is 10 for verl's k3.
    pub kl_output_clamp: Option<Bound>,
    /// Weight of the entropy bonus: loss -= entropy_coef * mean entropy of active tokens (verl: averaged as the
    /// loss). 0 turns it off.
    pub entropy_coef: f64,
    /// Weight of the negative log-likelihood of the sequences [`positive_rows`](crate::batch::StepData): loss += weight * mean of -logp
    /// over their
    /// tokens (VAPO, arXiv 2504.05118; NeMo-RL). 0 turns it off.
    pub positive_example_nll_weight: f64,
    /// Share of tokens with the highest entropy whose policy term counts, in (0, 1]; 1 selects all. arXiv 2506.01939.
    #[default(1.0)]
    pub top_entropy_quantile: f64,
    /// The keys of single losses ([`crate::objective`]); flat in configuration files.
    #[serde(flatten)]
    pub parameters: LossParameters,
    /// `true` if the ratio between old policy and sampler weights the policy term of batches with `sampler_logp`. `None`
    /// is true under TRL's semantics, else false.
    pub vllm_importance_sampling_correction: Option<bool>,
    /// How the ratio between old policy and sampler is bounded or masked.
    pub vllm_importance_sampling_mode: SamplerMode,
    /// Upper bound of that ratio.
    #[default(Some(3.0))]
    pub vllm_importance_sampling_clip_max: Option<f64>,
    /// Lower bound of that ratio.
    pub vllm_importance_sampling_clip_min: Option<f64>,
    /// verl's correction for the sampler; replaces TRL's.
    pub rollout_is: Option<RolloutIs>,
    /// Bounds of verl's ratio. Two bounds select icepop; for icepop a single bound implies its reciprocal as the lower one. `None` turns
    /// the correction off.
    #[default(Some(Threshold { low: None, high: 2.0 }))]
    pub rollout_is_threshold: Option<Threshold>,
    /// `true` if verl's weights are divided by their mean.
    pub rollout_is_batch_normalize: bool,
    /// verl's rejection of tokens or sequences by the divergence of sampler and old policy, as in `token_k1,seq_mean_k3`.
    /// Rejected tokens are masked.
    pub rollout_rs: Option<String>,
    /// Bounds of `rollout_rs`, one per rule: `lower_upper` ratios for k1, an upper bound for all other rules.
    pub rollout_rs_threshold: Option<Thresholds>,
    /// Sequences of negative advantage whose mean of sampler (or old) logp - logp exceeds this value have no policy term.
    /// DeepSeek-V3.2. `None` turns it off.
    pub off_policy_mask_threshold: Option<f64>,
    /// `true` if the sequences [`truncated_rows`](crate::batch::StepData) are masked.
    pub mask_truncated_completions: bool,
    /// Sampling temperature T, from 1e-6 to 1e6; f32 precision does not suffice outside.
    #[default(1.0)]
    pub temperature: f64,
    /// The operand that the temperature divides; `None` is log-probabilities for MLLM-JAX, else logits.
    pub temperature_mode: Option<TemperatureMode>,
    /// Factor of the logits, applied first (Cohere's `logit_scale`); its magnitude is from 1e-6 to 1e6.
    #[default(1.0)]
    pub logit_scale: f64,
    /// Softcap of the logits, applied after `logit_scale` and before the temperature: cap * tanh(logits / cap) (Gemma 2's
    /// `final_logit_softcapping`); from 1e-6 to 1e6. `None` turns it off.
    pub final_logit_softcapping: Option<f64>,
    /// verl's aggregation; `None` is `token-mean` for verl, else the average of `loss_type`.
    pub loss_agg_mode: Option<LossAggMode>,
    /// Average of the KL term; `None` is the average that `loss_type` and `loss_agg_mode` select.
    pub kl_agg_mode: Option<LossAggMode>,
    /// `true` if fully masked sequences count in means over sequences. `None` is false under verl's semantics, else true.
    pub count_masked_rows: Option<bool>,
    /// Constant length of dr_grpo, in tokens.
    pub max_completion_length: Option<usize>,
    /// TRL: number of accumulated batches, of which this batch is one. 1 if the batch is the whole step.
    #[default(1)]
    pub gradient_accumulation_steps: usize,
    /// TRL: batches in a generation batch; `None` is `gradient_accumulation_steps`.
    pub steps_per_generation: Option<usize>,
    /// TRL: processes over which gradients are averaged.
    #[default(1)]
    pub num_processes: usize,
    /// verl: constant length of seq-mean-token-sum-norm; `None` is the width of the batch. tunix: divisor of
    /// sequence-mean-token-sum-norm; `None` is the number of sequences.
    pub loss_scale_factor: Option<f64>,
    /// verl: processes over which gradients are averaged.
    #[default(1)]
    pub dp_size: usize,
    /// prompt-mean: completions per prompt, which are contiguous.
    pub num_generations: Option<usize>,
    /// token-mean-legacy: sequences per micro-batch.
    pub micro_batch_size: Option<usize>,
}
