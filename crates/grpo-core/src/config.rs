//! What the loss is: one flat configuration with TRL's names and, unless a field says otherwise, TRL's meanings.

use crate::error::{Error, Result};
use crate::strict::{self, UniqueKeys};
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;

/// What temperatures, logit scales and softcaps may be: f32 arithmetic has no digits left outside.
pub(crate) const TEMPERATURES: RangeInclusive<f64> = 1e-6..=1e6;

/// Which per-token objective is minimised and how tokens are averaged.
///
/// Weights per active token (see [`crate::weights`]); B sequences, |y| active tokens of a sequence, N active tokens
/// of the whole optimizer step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossType {
    /// Clipped ratio, mean over tokens then over sequences: 1/(B |y|). DeepSeekMath, arXiv 2402.03300.
    #[default]
    Grpo,
    /// Clipped ratio, mean over the step's active tokens: 1/N.
    Bnpo,
    /// Clipped ratio, constant length: 1/(B max_completion_length). arXiv 2503.20783.
    DrGrpo,
    /// Clipped ratio, mean over the generation batch's tokens: 1/num_items_in_batch. arXiv 2503.14476.
    Dapo,
    /// Clipped, detached ratio as a weight on the log-probability; averaged as dapo. arXiv 2506.13585.
    Cispo,
    /// grpo with a sequence-level ratio (geometric mean over tokens). arXiv 2507.18071.
    Gspo,
}

/// Where the importance ratio is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImportanceSamplingLevel {
    /// r_t = exp(logp_t - old_t).
    Token,
    /// r = exp(mean over active tokens of (logp_t - old_t)), one per sequence.
    Sequence,
}

/// Estimator of KL(policy || reference) per token, with d = ref_logp - logp (joschu.net/blog/kl-approx.html).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// -d.
    K1,
    /// d^2 / 2.
    K2,
    /// exp(d) - d - 1.
    #[default]
    K3,
}

/// What the temperature divides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TemperatureMode {
    /// logp = log_softmax(logits / T): the policy that was sampled at temperature T. TRL.
    #[default]
    ScaleLogits,
    /// logp = log_softmax(logits) / T; entropy is that of softmax(logits). MLLM-JAX.
    ScaleLogprobs,
}

/// The loss configuration. Unknown keys are errors that name the nearest key; see [`LossConfig::from_json`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LossConfig {
    /// Objective and aggregation.
    pub loss_type: LossType,
    /// Level of the importance ratio; `None` is `sequence` for gspo and `token` for every other loss.
    pub importance_sampling_level: Option<ImportanceSamplingLevel>,
    /// Lower clip: the ratio is held above 1 - epsilon_low. In [0, 1]. Not used by cispo.
    pub epsilon_low: f64,
    /// Upper clip: the ratio is held below 1 + epsilon_high; cispo (TRL's meaning) holds it below epsilon_high
    /// itself. `None` is epsilon_low (TRL), which cispo refuses because there it would be a bound on the raw ratio.
    pub epsilon_high: Option<f64>,
    /// Cap on the unclipped ratio (two-sided clipping, INTELLECT-2); above 1 + epsilon_high. `None` is off.
    pub delta: Option<f64>,
    /// Weight of the KL term; 0 is off, and then no reference log-probabilities are needed.
    pub beta: f64,
    /// Estimator of the KL term.
    pub kl_estimator: KlEstimator,
    /// Multiplies the KL term by the (differentiable, uncapped) importance ratio. TRL 1.16's default.
    pub use_bias_correction_kl: bool,
    /// Weight of the entropy bonus: loss -= entropy_coef * mean entropy of active tokens. 0 is off.
    pub entropy_coef: f64,
    /// Sampling temperature T, from 1e-6 to 1e6: f32 arithmetic has no digits left outside.
    pub temperature: f64,
    /// What the temperature divides.
    pub temperature_mode: TemperatureMode,
    /// Multiplies the logits before anything else happens to them (Cohere's `logit_scale`); from 1e-6 to 1e6, or minus that.
    pub logit_scale: f64,
    /// Then holds them within plus and minus this: cap * tanh(logits / cap) (Gemma 2's `final_logit_softcapping`; from 1e-6
    /// to 1e6), before the temperature divides them. `None` is off.
    pub final_logit_softcapping: Option<f64>,
    /// Constant length of dr_grpo, in tokens.
    pub max_completion_length: Option<usize>,
    /// Normaliser of dapo and cispo, in tokens; `None` counts the active tokens of the step (see
    /// [`crate::weights`]). Give it when one step's batch is only a part of the generation batch.
    pub num_items_in_batch: Option<f64>,
}

impl Default for LossConfig {
    fn default() -> Self {
        Self {
            loss_type: LossType::Grpo,
            importance_sampling_level: None,
            epsilon_low: 0.2,
            epsilon_high: None,
            delta: None,
            beta: 0.0,
            kl_estimator: KlEstimator::K3,
            use_bias_correction_kl: true,
            entropy_coef: 0.0,
            temperature: 1.0,
            temperature_mode: TemperatureMode::ScaleLogits,
            logit_scale: 1.0,
            final_logit_softcapping: None,
            max_completion_length: None,
            num_items_in_batch: None,
        }
    }
}

impl LossConfig {
    /// Reads and validates a JSON object; keys that are absent keep their defaults.
    ///
    /// # Errors
    /// [`Error::UnknownKey`], or [`Error::Config`] for values that are not legal alone or together.
    pub fn from_json(text: &str) -> Result<Self> {
        let UniqueKeys(value) = serde_json::from_str(text).map_err(|e| Error::Config(format!("not JSON: {e}")))?;
        Self::from_value(value)
    }

    /// As [`LossConfig::from_json`], from a parsed value (of YAML, TOML, the environment ...).
    ///
    /// # Errors
    /// As [`LossConfig::from_json`].
    pub fn from_value(value: serde_json::Value) -> Result<Self> {
        if !value.is_object() {
            return Err(Error::Config(format!("expected a map of loss keys, got {value}")));
        }
        let config: Self = strict::from_value(value)?;
        config.validate()?;
        Ok(config)
    }

    /// The level of the ratio, with the loss type's default resolved.
    pub fn level(&self) -> ImportanceSamplingLevel {
        self.importance_sampling_level.unwrap_or(match self.loss_type {
            LossType::Gspo => ImportanceSamplingLevel::Sequence,
            _ => ImportanceSamplingLevel::Token,
        })
    }

    /// Upper bound of the ratio: 1 + epsilon_high, or cispo's raw epsilon_high.
    pub fn ratio_high(&self) -> f64 {
        match self.loss_type {
            LossType::Cispo => self.epsilon_high.unwrap_or(f64::INFINITY),
            _ => 1.0 + self.epsilon_high.unwrap_or(self.epsilon_low),
        }
    }

    /// Lower bound of the ratio: 1 - epsilon_low.
    pub fn ratio_low(&self) -> f64 {
        1.0 - self.epsilon_low
    }

    /// Whether dL/dlogp of a token follows from that token alone, so that gradients can be made while the forward
    /// pass still runs.
    pub fn is_token_level(&self) -> bool {
        self.level() == ImportanceSamplingLevel::Token
    }

    /// Whether reference log-probabilities are needed.
    pub fn needs_ref_logp(&self) -> bool {
        self.beta != 0.0
    }

    /// Checks every field and every combination.
    ///
    /// # Errors
    /// [`Error::Config`] that names the fields and says why.
    pub fn validate(&self) -> Result<()> {
        let fail = |message: String| Err(Error::Config(message));
        let finite = [
            ("epsilon_low", Some(self.epsilon_low)),
            ("epsilon_high", self.epsilon_high),
            ("delta", self.delta),
            ("beta", Some(self.beta)),
            ("entropy_coef", Some(self.entropy_coef)),
            ("temperature", Some(self.temperature)),
            ("logit_scale", Some(self.logit_scale)),
            ("final_logit_softcapping", self.final_logit_softcapping),
            ("num_items_in_batch", self.num_items_in_batch),
        ];
        for (name, value) in finite {
            if let Some(value) = value
                && !value.is_finite()
            {
                return fail(format!("{name} must be a finite number, got {value}"));
            }
        }
        if !(0.0..=1.0).contains(&self.epsilon_low) {
            return fail(format!("epsilon_low must lie in [0, 1], got {}", self.epsilon_low));
        }
        if self.epsilon_high.is_some_and(|e| e < 0.0) {
            return fail(format!("epsilon_high must not be negative, got {:?}", self.epsilon_high.unwrap_or_default()));
        }
        if self.beta < 0.0 {
            return fail(format!("beta must not be negative, got {}", self.beta));
        }
        if self.temperature <= 0.0 {
            return fail(format!(
                "temperature must be above 0, got {}: greedy sampling has no log-probabilities to train on",
                self.temperature
            ));
        }
        if !TEMPERATURES.contains(&self.temperature) {
            return fail(format!("temperature must lie in [1e-6, 1e6], got {:e}", self.temperature));
        }
        if !TEMPERATURES.contains(&self.logit_scale.abs()) {
            return fail(format!(
                "logit_scale must lie in [1e-6, 1e6], or below 0 in [-1e6, -1e-6], got {:e}: 1 leaves logits as they are",
                self.logit_scale
            ));
        }
        if let Some(cap) = self.final_logit_softcapping.filter(|cap| !TEMPERATURES.contains(cap)) {
            return fail(format!(
                "final_logit_softcapping must lie in [1e-6, 1e6], got {cap:e}: leave it out for logits without a cap"
            ));
        }
        if self.num_items_in_batch.is_some_and(|n| n < 0.0) {
            return fail("num_items_in_batch counts tokens and must not be negative".into());
        }
        if self.max_completion_length == Some(0) {
            return fail("max_completion_length counts tokens and must be at least 1".into());
        }
        match self.loss_type {
            LossType::DrGrpo if self.max_completion_length.is_none() => {
                return fail(
                    "dr_grpo divides by a constant length: set max_completion_length to the generation limit in tokens"
                        .into(),
                );
            }
            LossType::Gspo if self.level() == ImportanceSamplingLevel::Token => {
                return fail(
                    "gspo is defined by its sequence-level ratio: leave importance_sampling_level out, set it to \
                     `sequence`, or use loss_type grpo"
                        .into(),
                );
            }
            LossType::Cispo if self.epsilon_high.is_none() => {
                return fail(
                    "cispo caps the raw ratio at epsilon_high (ScaleRL uses 5.0), so it has no default: set it".into(),
                );
            }
            LossType::Cispo if self.delta.is_some() => {
                return fail("delta caps the ratio of the clipped objectives; cispo has none: leave it out".into());
            }
            _ => {}
        }
        if let Some(delta) = self.delta
            && delta <= self.ratio_high()
        {
            return fail(format!(
                "delta ({delta}) must be above 1 + epsilon_high ({}), else it would bind before the clip does",
                self.ratio_high()
            ));
        }
        Ok(())
    }
}
