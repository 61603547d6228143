//! Enumerations of a loss configuration.

use serde::{Deserialize, Serialize};

/// The system whose meanings and defaults apply if systems disagree: TRL 1.16, verl 0.9 or MLLM-JAX.
/// `docs/losses/semantics.md` lists every difference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Semantics {
    /// TRL.
    #[default]
    Trl,
    /// verl: `loss_type` is its `loss_mode`, `beta` its `kl_loss_coef`, and so on.
    Verl,
    /// MLLM-JAX, the predecessor of this project.
    MllmJax,
}

impl Semantics {
    /// Returns the name used in configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Trl => "trl",
            Self::Verl => "verl",
            Self::MllmJax => "mllm_jax",
        }
    }
}

/// The level at which the importance ratio is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ImportanceSamplingLevel {
    /// r_t = exp(logp_t - old_t).
    Token,
    /// r = exp(mean over active tokens of (logp_t - old_t)), one per sequence.
    Sequence,
    /// The value of `sequence` with the gradient of `token`: exp(logp_t - sg(logp_t) + sg(log r)).
    SequenceToken,
}

/// Estimators of KL(policy || reference) per token, with d = ref_logp - logp (joschu.net/blog/kl-approx.html). Estimators
/// with a `+` have the value of their base and the gradient of k2 (verl).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum KlEstimator {
    /// -d.
    #[serde(alias = "kl")]
    K1,
    /// d^2 / 2.
    #[serde(alias = "mse", alias = "k2+", alias = "mse+")]
    K2,
    /// exp(d) - d - 1; clamped to verl's bounds under its semantics.
    #[default]
    K3,
    /// k3, clamped to verl's bounds under any semantics: d to +-20, the value to +-10.
    LowVarKl,
    /// |d|.
    Abs,
    /// Value of k1, gradient of k2.
    #[serde(rename = "k1+", alias = "kl+")]
    K1Plus,
    /// Value of k3, gradient of k2.
    #[serde(rename = "k3+")]
    K3Plus,
    /// Value of low_var_kl, gradient of k2.
    #[serde(rename = "low_var_kl+")]
    LowVarKlPlus,
    /// Value of abs, gradient of k2.
    #[serde(rename = "abs+")]
    AbsPlus,
}

impl KlEstimator {
    /// Returns the estimator of the value, and `true` if the gradient is k2's.
    pub fn parts(self) -> (Self, bool) {
        match self {
            Self::K1Plus => (Self::K1, true),
            Self::K3Plus => (Self::K3, true),
            Self::LowVarKlPlus => (Self::LowVarKl, true),
            Self::AbsPlus => (Self::Abs, true),
            plain => (plain, false),
        }
    }
}

/// The operand that the temperature divides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TemperatureMode {
    /// logp = log_softmax(logits / T): the distribution that was sampled at temperature T. TRL.
    #[default]
    ScaleLogits,
    /// logp = log_softmax(logits) / T; the entropy is the entropy of softmax(logits). MLLM-JAX.
    ScaleLogprobs,
}

/// Explicit aggregation modes: verl's, and three from other systems. A mode replaces the average that `loss_type` implies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum LossAggMode {
    /// Sum divided by the step's tokens.
    #[serde(alias = "token_mean")]
    TokenMean,
    /// Sum over tokens, without a divisor.
    #[serde(alias = "token_sum")]
    TokenSum,
    /// Sum over the tokens of a sequence, mean over sequences.
    #[serde(alias = "seq_mean_token_sum")]
    SeqMeanTokenSum,
    /// `seq-mean-token-sum`, divided by `loss_scale_factor` or by the width of the batch. tunix: sequence-mean-token-scale.
    #[serde(alias = "seq_mean_token_sum_norm", alias = "sequence-mean-token-scale")]
    SeqMeanTokenSumNorm,
    /// Mean over the tokens of a sequence, mean over sequences.
    #[serde(alias = "seq_mean_token_mean", alias = "sequence-mean-token-mean", alias = "sequence_mean")]
    SeqMeanTokenMean,
    /// tunix: sum over all tokens, divided by `loss_scale_factor` or by the number of sequences.
    SequenceMeanTokenSumNorm,
    /// SkyRL: mean over the tokens of a prompt's completions (`num_generations` sequences), mean over prompts.
    #[serde(alias = "prompt_mean")]
    PromptMean,
    /// SkyRL: mean over the tokens of a micro-batch (`micro_batch_size` sequences), mean over micro-batches.
    #[serde(alias = "token_mean_legacy")]
    TokenMeanLegacy,
}

/// The ratio that multiplies the KL term. It is differentiated too: samples from another policy need an importance weight, and its
/// derivative is the derivative of the sampling distribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum KlImportance {
    /// No ratio.
    Off,
    /// The importance ratio of the loss, neither capped nor clipped (TRL's `use_bias_correction_kl`, DeepSeek-V3.2).
    Ratio,
    /// exp(logp - sg(logp)): value 1, with the derivative of the token's probability (NeMo-RL).
    ScoreFunction,
    /// exp(logp - sampler_logp) of the token (NeMo-RL's `use_on_policy_kl_approximation`).
    Sampler,
}

/// How the ratio between old policy and sampler, exp(old - sampler), is bounded before it weights the policy term. The token and
/// sequence modes are TRL's; the geometric modes use the mean of the sequence's log-ratios instead of the sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SamplerMode {
    /// Ratio per token, clamped to the bounds.
    TokenTruncate,
    /// Ratio per token, 0 outside the bounds.
    TokenMask,
    /// Product over the sequence, clamped to the bounds.
    SequenceTruncate,
    /// Product over the sequence, 0 outside the bounds.
    #[default]
    SequenceMask,
    /// Geometric mean over the sequence, clamped to the bounds.
    GeometricTruncate,
    /// Geometric mean over the sequence, 0 outside the bounds.
    GeometricMask,
    /// Ratio per token, 0 in a sequence whose geometric mean is outside the bounds (NeMo-RL, OpenRLHF).
    #[serde(alias = "seq-mask-tis")]
    SeqMaskTis,
}

impl SamplerMode {
    /// Returns `true` if each token has its own weight.
    pub fn is_of_tokens(self) -> bool {
        matches!(self, Self::TokenTruncate | Self::TokenMask | Self::SeqMaskTis)
    }
}

/// verl's correction for the mismatch between sampler and old policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RolloutIs {
    /// Ratio per token, at most the threshold.
    Token,
    /// Product over the sequence, at most the threshold.
    Sequence,
    /// Ratio per token, 0 outside the two bounds of the threshold.
    Icepop,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, Implementation, LossType};

    #[test]
    fn names_are_those_of_configuration_files() {
        fn check<T: Serialize>(variants: &[T], name: impl Fn(&T) -> &'static str) {
            for variant in variants {
                assert_eq!(serde_json::to_value(variant).unwrap(), name(variant));
            }
        }
        check(&[Semantics::Trl, Semantics::Verl, Semantics::MllmJax], |semantics| semantics.name());
        check(LossType::ALL, |loss| loss.name());
        check(&Implementation::ALL, |implementation| implementation.name());
        check(&[Dtype::F32, Dtype::Bf16], |dtype| dtype.name());
        assert!(Implementation::ALL.iter().all(|each| Implementation::from_name(each.name()) == Some(*each)));
        assert_eq!(
            (LossType::DppoTv.name(), Dtype::Bf16.name(), Semantics::MllmJax.name()),
            ("dppo_tv", "bf16", "mllm_jax")
        );
    }
}
