//! The choices that a loss configuration names.

use serde::{Deserialize, Serialize};
use strum::IntoStaticStr;

/// Whose meaning names and defaults have where systems disagree: TRL 1.16, verl 0.9 or MLLM-JAX.
/// `docs/losses/semantics.md` lists every difference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, IntoStaticStr)]
#[cfg_attr(test, derive(strum::VariantArray))]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Semantics {
    /// TRL.
    #[default]
    Trl,
    /// verl: `loss_type` is its `loss_mode`, `beta` its `kl_loss_coef`, and so on.
    Verl,
    /// The JAX system that this one continues.
    MllmJax,
}

impl Semantics {
    /// The name used in configuration.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// Where the importance ratio is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImportanceSamplingLevel {
    /// r_t = exp(logp_t - old_t).
    Token,
    /// r = exp(mean over active tokens of (logp_t - old_t)), one per sequence.
    Sequence,
    /// The value of `sequence` with the gradient of `token`: exp(logp_t - sg(logp_t) + sg(log r)).
    SequenceToken,
}

/// Estimator of KL(policy || reference) per token, with d = ref_logp - logp (joschu.net/blog/kl-approx.html). The forms
/// with a `+` have the value of their base and the gradient of k2 (verl).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// -d.
    #[serde(alias = "kl")]
    K1,
    /// d^2 / 2.
    #[serde(alias = "mse", alias = "k2+", alias = "mse+")]
    K2,
    /// exp(d) - d - 1; held to verl's bounds under its semantics.
    #[default]
    K3,
    /// k3 held to verl's bounds under any semantics: d to +-20, the value to +-10.
    LowVarKl,
    /// |d|.
    Abs,
    /// k1, gradient of k2.
    #[serde(rename = "k1+", alias = "kl+")]
    K1Plus,
    /// k3, gradient of k2.
    #[serde(rename = "k3+")]
    K3Plus,
    /// low_var_kl, gradient of k2.
    #[serde(rename = "low_var_kl+")]
    LowVarKlPlus,
    /// abs, gradient of k2.
    #[serde(rename = "abs+")]
    AbsPlus,
}

impl KlEstimator {
    /// What gives the value, and whether the gradient is that of k2 instead.
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

/// What the temperature divides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TemperatureMode {
    /// logp = log_softmax(logits / T): the policy that was sampled at temperature T. TRL.
    #[default]
    ScaleLogits,
    /// logp = log_softmax(logits) / T; entropy is that of softmax(logits). MLLM-JAX.
    ScaleLogprobs,
}

/// verl's names of what tokens are divided by, and those of two systems more. Where they stand, they replace the average
/// that `loss_type` implies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LossAggMode {
    /// Divided by the step's tokens.
    #[serde(alias = "token_mean")]
    TokenMean,
    /// Summed over tokens, divided by nothing.
    #[serde(alias = "token_sum")]
    TokenSum,
    /// Sum over the tokens of a sequence, mean over sequences.
    #[serde(alias = "seq_mean_token_sum")]
    SeqMeanTokenSum,
    /// The same, divided by `loss_scale_factor` too, or by the width of the batch. tunix: sequence-mean-token-scale.
    #[serde(alias = "seq_mean_token_sum_norm", alias = "sequence-mean-token-scale")]
    SeqMeanTokenSumNorm,
    /// Mean over the tokens of a sequence, mean over sequences.
    #[serde(alias = "seq_mean_token_mean", alias = "sequence-mean-token-mean", alias = "sequence_mean")]
    SeqMeanTokenMean,
    /// tunix: sum over all tokens, divided by `loss_scale_factor`, or by the number of sequences.
    SequenceMeanTokenSumNorm,
    /// SkyRL: mean over the tokens of a prompt's completions (`num_generations` sequences), mean over prompts.
    #[serde(alias = "prompt_mean")]
    PromptMean,
    /// SkyRL: mean over the tokens of a micro-batch (`micro_batch_size` sequences), mean over micro-batches.
    #[serde(alias = "token_mean_legacy")]
    TokenMeanLegacy,
}

/// The ratio that multiplies the KL term, with its derivative: samples of another policy than the one whose KL is asked for
/// have to be weighed, and the derivative of the weight is that of the sampling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlImportance {
    /// None: the estimate as it is.
    Off,
    /// The importance ratio of the loss, neither capped nor clipped (TRL's `use_bias_correction_kl`, DeepSeek-V3.2).
    Ratio,
    /// exp(logp - sg(logp)): 1, with the derivative of the token's probability (NeMo-RL).
    ScoreFunction,
    /// exp(logp - sampler_logp) of the token (NeMo-RL's `use_on_policy_kl_approximation`).
    Sampler,
}

/// What happens to the ratio between the policy that is trained from and the one that sampled, exp(old - sampler), before
/// it weighs the policy term. TRL's four; the geometric ones take the mean of the sequence's log-ratios for their sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SamplerMode {
    /// Each token's ratio, held within the bounds.
    TokenTruncate,
    /// Each token's ratio, 0 outside of the bounds.
    TokenMask,
    /// The product over the sequence, held within the bounds.
    SequenceTruncate,
    /// The product over the sequence, 0 outside of the bounds.
    #[default]
    SequenceMask,
    /// The geometric mean over the sequence, held within the bounds.
    GeometricTruncate,
    /// The geometric mean over the sequence, 0 outside of the bounds.
    GeometricMask,
    /// Each token's ratio, 0 in a sequence whose geometric mean is outside of the bounds (NeMo-RL, OpenRLHF).
    #[serde(alias = "seq-mask-tis")]
    SeqMaskTis,
}

impl SamplerMode {
    /// Whether each token has a weight of its own.
    pub fn is_of_tokens(self) -> bool {
        matches!(self, Self::TokenTruncate | Self::TokenMask | Self::SeqMaskTis)
    }
}

/// verl's correction for the same mismatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RolloutIs {
    /// Each token's ratio, at most the threshold.
    Token,
    /// The product over the sequence, at most the threshold.
    Sequence,
    /// Each token's ratio, 0 outside of the threshold's two bounds.
    Icepop,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, Implementation, LossType};
    use strum::VariantArray;

    #[test]
    fn names_are_those_of_configuration_files() {
        fn check<T: VariantArray + Serialize>(name: impl Fn(&T) -> &'static str) {
            for variant in T::VARIANTS {
                assert_eq!(serde_json::to_value(variant).unwrap(), name(variant));
            }
        }
        check(|semantics: &Semantics| semantics.name());
        check(|loss: &LossType| loss.name());
        check(|implementation: &Implementation| implementation.name());
        check(|dtype: &Dtype| dtype.name());
        assert_eq!(
            (LossType::DppoTv.name(), Dtype::Bf16.name(), Semantics::MllmJax.name()),
            ("dppo_tv", "bf16", "mllm_jax")
        );
    }
}
