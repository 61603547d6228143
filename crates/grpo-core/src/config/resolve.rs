//! Resolution of defaults that depend on the system.

use super::{
    Bound, ImportanceSamplingLevel, KlEstimator, KlImportance, LossAggMode, LossConfig, RolloutIs, SamplerMode,
    Semantics, TemperatureMode, Threshold,
};
use crate::objective::{Average, Bounds, Clip, LossTraits, OwnAverage};

/// The correction for the difference between sampler and old policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SamplerCorrection {
    /// The mode of the weight.
    pub(crate) mode: SamplerMode,
    /// Bounds of the ratio.
    pub(crate) low: Option<f64>,
    pub(crate) high: Option<f64>,
    /// Largest |log ratio| before exp.
    pub(crate) guard: Option<f64>,
    /// `true` if weights are divided by their mean.
    pub(crate) normalize: bool,
}

impl LossConfig {
    /// Returns the facts about the loss.
    pub(crate) fn traits(&self) -> &'static LossTraits {
        self.loss_type.traits()
    }

    /// Returns the level of the ratio.
    pub fn level(&self) -> ImportanceSamplingLevel {
        let traits = self.traits();
        match traits.verl_level.filter(|_| self.semantics == Semantics::Verl) {
            // The loss has its own sequence-level ratio and ignores the key.
            _ if traits.shared_log_ratio.is_some() => ImportanceSamplingLevel::Token,
            Some(level) => level,
            None => self.importance_sampling_level.unwrap_or(traits.level),
        }
    }

    /// Returns the range in which the policy's values keep their gradient.
    pub fn bounds(&self) -> Bounds {
        let (down, up, high) = (self.lower_epsilon(), self.upper_epsilon(), self.ratio_high());
        match self.traits().clip {
            Clip::None => Bounds::None,
            Clip::Ratio => Bounds::Ratio { low: Some(self.ratio_low()), high },
            Clip::Weight => Bounds::Ratio { low: (self.semantics == Semantics::Verl).then(|| self.ratio_low()), high },
            Clip::LogRatio => Bounds::LogRatio { low: -down, high: up },
            Clip::ConstantLogRatio(bound) => Bounds::LogRatio { low: -bound, high: bound },
            Clip::Probability => Bounds::Probability { down, up },
        }
    }

    /// Returns `true` if the formula is PPO's clip, which `delta` and the dual clip need.
    pub(crate) fn clips_ratio(&self) -> bool {
        self.traits().clip == Clip::Ratio
    }

    /// Returns `true` if dL/dlogp of a token depends on that token alone, so that gradients can be computed during the forward
    /// pass. Otherwise the tokens of a sequence share a log-ratio.
    pub fn is_token_level(&self) -> bool {
        self.level() == ImportanceSamplingLevel::Token && self.traits().shared_log_ratio.is_none()
    }

    /// Returns `true` if the loss of a token depends on a selection among all tokens of the step, which takes one more forward pass:
    /// [`LossConfig::prepare`].
    pub fn selects_tokens(&self) -> bool {
        self.top_entropy_quantile < 1.0 || self.off_policy_mask_threshold.is_some() || self.traits().chooses_tokens
    }

    /// Returns the upper bound of the ratio: 1 + epsilon_high, or epsilon_high itself for TRL's cispo.
    pub fn ratio_high(&self) -> f64 {
        match self.traits().clip {
            Clip::Weight if self.semantics != Semantics::Verl => self.epsilon_high.unwrap_or(f64::INFINITY),
            _ => 1.0 + self.upper_epsilon(),
        }
    }

    /// Returns the lower bound of the ratio: 1 - epsilon_low.
    pub fn ratio_low(&self) -> f64 {
        1.0 - self.lower_epsilon()
    }

    /// Returns epsilon_low, or the loss's default.
    pub fn lower_epsilon(&self) -> f64 {
        self.epsilon_low.unwrap_or(self.traits().epsilon)
    }

    /// Returns epsilon_high, or [`LossConfig::lower_epsilon`] if it is not set.
    pub fn upper_epsilon(&self) -> f64 {
        self.epsilon_high.unwrap_or(self.lower_epsilon())
    }

    /// Returns `true` if reference log-probabilities are needed.
    pub fn needs_ref_logp(&self) -> bool {
        self.beta != 0.0
    }

    /// Returns `true` if a key or the loss itself requires the sampler's log-probabilities. TRL's correction is on by default and applies
    /// only if they are present.
    pub fn asks_for_sampler_logp(&self) -> bool {
        self.vllm_importance_sampling_correction == Some(true)
            || self.rollout_is.is_some()
            || self.rollout_rs.is_some()
            || self.weighs_kl_by_sampler()
            || self.traits().weighs_by_sampler
    }

    /// Returns `true` if the KL term requires the sampler's log-probabilities.
    pub(crate) fn weighs_kl_by_sampler(&self) -> bool {
        self.beta != 0.0 && self.kl_importance() == KlImportance::Sampler
    }

    /// Returns the weight of the KL term.
    pub fn kl_importance(&self) -> KlImportance {
        let reads = self.semantics != Semantics::Trl || self.traits().trl_reads_kl_bias_correction;
        // TRL has no straight-through estimators.
        let by_default = self.semantics == Semantics::Trl && !self.kl_estimator.parts().1;
        let corrects = reads && self.use_bias_correction_kl.unwrap_or(by_default);
        self.kl_importance.unwrap_or(if corrects { KlImportance::Ratio } else { KlImportance::Off })
    }

    /// Returns the operand that the temperature divides.
    pub fn temperature_mode(&self) -> TemperatureMode {
        self.temperature_mode.unwrap_or(match self.semantics {
            Semantics::MllmJax => TemperatureMode::ScaleLogprobs,
            _ => TemperatureMode::ScaleLogits,
        })
    }

    /// Returns c of the dual clip, or dppo's cap.
    pub fn dual_clip(&self) -> Option<f64> {
        let (traits, is_verl) = (self.traits(), self.semantics == Semantics::Verl);
        let default = traits.dual_clip.or(traits.verl_dual_clip.filter(|_| is_verl));
        // verl passes the key to every loss; losses without a default ignore it.
        let reads = default.is_some() || (self.clips_ratio() && !is_verl);
        self.clip_ratio_c.filter(|_| reads).or(default)
    }

    /// Returns the largest |log ratio| before exp.
    pub fn guard(&self) -> Option<f64> {
        let own = || self.traits().verl_log_ratio_guard.filter(|_| self.semantics == Semantics::Verl);
        self.log_ratio_guard.map_or_else(own, Bound::value)
    }

    /// Returns the bounds of the KL term's exponent and of its value.
    pub fn kl_clamps(&self) -> (Option<f64>, Option<f64>) {
        let bounded = match self.kl_estimator.parts().0 {
            KlEstimator::LowVarKl => true,
            KlEstimator::K3 => self.semantics == Semantics::Verl,
            _ => false,
        };
        let own = |bound| if bounded { Bound::At(bound) } else { Bound::Off };
        let input = self.kl_input_clamp.unwrap_or(own(20.0));
        (input.value(), self.kl_output_clamp.unwrap_or(own(10.0)).value())
    }

    /// Returns the explicit aggregation mode, if the average does not follow from `loss_type`.
    pub fn agg_mode(&self) -> Option<LossAggMode> {
        self.loss_agg_mode.or((self.semantics == Semantics::Verl).then_some(LossAggMode::TokenMean))
    }

    /// Returns the average of `loss_type`, if there is no mode.
    pub(crate) fn average(&self) -> Average {
        let traits = self.traits();
        traits.mllm_jax_average.filter(|_| self.semantics == Semantics::MllmJax).unwrap_or(traits.average)
    }

    /// Returns the fixed average of the policy term alone, if verl has one.
    pub(crate) fn verl_average(&self) -> Option<OwnAverage> {
        self.traits().verl_average.filter(|_| self.semantics == Semantics::Verl)
    }

    /// Returns `true` if fully masked sequences count in means over sequences.
    pub fn counts_masked_rows(&self) -> bool {
        self.count_masked_rows.unwrap_or(self.semantics != Semantics::Verl)
    }

    /// Returns the correction for batches with `sampler_logp`, if any.
    pub(crate) fn sampler_correction(&self) -> Option<SamplerCorrection> {
        if let Some(rollout_is) = self.rollout_is {
            let Threshold { low, high } = self.rollout_is_threshold?;
            // verl selects icepop by two bounds at any level; one bound of icepop implies its reciprocal.
            let low = low.or((rollout_is == RolloutIs::Icepop).then_some(1.0 / high));
            let mode = match (rollout_is == RolloutIs::Sequence, low.is_some()) {
                (true, true) => SamplerMode::SequenceMask,
                (true, false) => SamplerMode::SequenceTruncate,
                (false, true) => SamplerMode::TokenMask,
                (false, false) => SamplerMode::TokenTruncate,
            };
            let normalize = self.rollout_is_batch_normalize;
            return Some(SamplerCorrection { mode, low, high: Some(high), guard: Some(20.0), normalize });
        }
        let by_default = self.semantics == Semantics::Trl && self.traits().trl_corrects_sampler;
        let wanted = self.vllm_importance_sampling_correction.unwrap_or(by_default);
        wanted.then_some(SamplerCorrection {
            mode: self.vllm_importance_sampling_mode,
            low: self.vllm_importance_sampling_clip_min,
            high: self.vllm_importance_sampling_clip_max,
            guard: None,
            normalize: false,
        })
    }
}
