//! What a configuration means: defaults that depend on the system, made explicit.

use super::{
    Bound, ImportanceSamplingLevel, KlEstimator, KlImportance, LossAggMode, LossConfig, LossType, RolloutIs,
    SamplerMode, Semantics, TemperatureMode, Threshold,
};

/// The function of one token that is minimised ([`crate::objective`]), whatever the systems call it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Objective {
    /// Clipped ratio.
    Clipped,
    /// Detached, bounded ratio on the log-probability.
    Cispo,
    /// Gate on the ratio.
    Sapo,
    /// Detached weight of the sequence on the log-probability.
    Vespo,
    /// Geometric mean of clipped ratios.
    GeoMean,
    /// The log-probability alone.
    PolicyGradient,
    /// Unclipped ratio, with a penalty on chosen tokens.
    KlCov,
    /// Detached ratio within a trust region.
    Dppo(Trust),
    /// Quadratic penalty on the log-ratio.
    Dro,
    /// Ratio within a trust region, and the same penalty.
    PrimeRl(Region),
}

/// What prime-rl's trust region asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Region {
    /// The side to which the advantage pushes.
    OneSided,
    /// Both sides.
    TwoSided,
}

/// What bounds dppo's trust region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Trust {
    /// Difference of the token's probabilities.
    TotalVariation,
    /// KL divergence of "this token or another".
    BinaryKl,
}

/// How sampler and old policy are reconciled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SamplerCorrection {
    /// How log-ratios of a sequence become one.
    pub(crate) mode: SamplerMode,
    /// Bounds of the ratio.
    pub(crate) low: Option<f64>,
    pub(crate) high: Option<f64>,
    /// Largest |log ratio| before exp.
    pub(crate) guard: Option<f64>,
    /// Whether weights are divided by their mean.
    pub(crate) normalize: bool,
}

impl LossConfig {
    /// The per-token function.
    pub fn objective(&self) -> Objective {
        match self.loss_type {
            LossType::Grpo
            | LossType::Bnpo
            | LossType::DrGrpo
            | LossType::Dapo
            | LossType::Gspo
            | LossType::Luspo
            | LossType::Vanilla
            | LossType::ClipCov => Objective::Clipped,
            LossType::Cispo => Objective::Cispo,
            LossType::Sapo => Objective::Sapo,
            LossType::Vespo => Objective::Vespo,
            LossType::GeoMean => Objective::GeoMean,
            LossType::Gpg | LossType::Reinforce => Objective::PolicyGradient,
            LossType::KlCov => Objective::KlCov,
            LossType::DppoTv => Objective::Dppo(Trust::TotalVariation),
            LossType::DppoKl => Objective::Dppo(Trust::BinaryKl),
            LossType::Dro => Objective::Dro,
            LossType::PrimeRl => Objective::PrimeRl(Region::OneSided),
            LossType::Ipo => Objective::PrimeRl(Region::TwoSided),
        }
    }

    /// The level of the ratio.
    pub fn level(&self) -> ImportanceSamplingLevel {
        match (self.importance_sampling_level, self.loss_type, self.semantics) {
            // verl has no such key, and one gspo.
            (_, LossType::Gspo, Semantics::Verl) => ImportanceSamplingLevel::SequenceToken,
            // They take the ratio of a sequence in their own way, and do not read the key.
            (_, LossType::Vespo | LossType::GeoMean, _) => ImportanceSamplingLevel::Token,
            (Some(level), ..) => level,
            (None, LossType::Gspo | LossType::Luspo, _) => ImportanceSamplingLevel::Sequence,
            (None, ..) => ImportanceSamplingLevel::Token,
        }
    }

    /// Whether dL/dlogp of a token follows from that token alone, so that gradients can be made while the forward
    /// pass still runs. Otherwise tokens of a sequence share a log-ratio.
    pub fn is_token_level(&self) -> bool {
        self.level() == ImportanceSamplingLevel::Token
            && !matches!(self.objective(), Objective::Vespo | Objective::GeoMean)
    }

    /// Whether it has to be known what the policy says of all tokens before the loss of any is, which costs a forward
    /// pass more: [`LossConfig::prepare`].
    pub fn selects_tokens(&self) -> bool {
        self.top_entropy_quantile < 1.0
            || self.off_policy_mask_threshold.is_some()
            || matches!(self.loss_type, LossType::ClipCov | LossType::KlCov)
    }

    /// Whether TRL's cispo bounds the raw ratio.
    pub(crate) fn bounds_raw_ratio(&self) -> bool {
        self.loss_type == LossType::Cispo && self.semantics != Semantics::Verl
    }

    /// Upper bound of the ratio: 1 + epsilon_high, or TRL's cispo's raw epsilon_high.
    pub fn ratio_high(&self) -> f64 {
        match self.bounds_raw_ratio() {
            true => self.epsilon_high.unwrap_or(f64::INFINITY),
            false => 1.0 + self.upper_epsilon(),
        }
    }

    /// Lower bound of the ratio: 1 - epsilon_low.
    pub fn ratio_low(&self) -> f64 {
        1.0 - self.epsilon_low
    }

    /// epsilon_high, or epsilon_low in its place.
    pub fn upper_epsilon(&self) -> f64 {
        self.epsilon_high.unwrap_or(self.epsilon_low)
    }

    /// Whether reference log-probabilities are needed.
    pub fn needs_ref_logp(&self) -> bool {
        self.beta != 0.0
    }

    /// Whether the sampler's log-probabilities are asked for in so many words. TRL's correction is on by default, and looks
    /// whether they are there.
    pub fn asks_for_sampler_logp(&self) -> bool {
        self.vllm_importance_sampling_correction == Some(true)
            || self.rollout_is.is_some()
            || self.rollout_rs.is_some()
            || self.weighs_kl_by_sampler()
    }

    /// Whether the KL term cannot be without them.
    pub(crate) fn weighs_kl_by_sampler(&self) -> bool {
        self.beta != 0.0 && self.kl_importance() == KlImportance::Sampler
    }

    /// What multiplies the KL term.
    pub fn kl_importance(&self) -> KlImportance {
        // TRL's GMPO has use_bias_correction_kl, and does not read it; straight-through estimators TRL has not.
        let reads = self.semantics != Semantics::Trl || self.objective() != Objective::GeoMean;
        let by_default = self.semantics == Semantics::Trl && !self.kl_estimator.parts().1;
        let corrects = reads && self.use_bias_correction_kl.unwrap_or(by_default);
        self.kl_importance.unwrap_or(if corrects { KlImportance::Ratio } else { KlImportance::Off })
    }

    /// What the temperature divides.
    pub fn temperature_mode(&self) -> TemperatureMode {
        self.temperature_mode.unwrap_or(match self.semantics {
            Semantics::MllmJax => TemperatureMode::ScaleLogprobs,
            _ => TemperatureMode::ScaleLogits,
        })
    }

    /// c of the dual clip, or dppo's cap.
    pub fn dual_clip(&self) -> Option<f64> {
        let is_vanilla = self.loss_type == LossType::Vanilla
            || (self.loss_type == LossType::Grpo && self.semantics == Semantics::Verl);
        match self.objective() {
            Objective::Dppo(_) => self.clip_ratio_c.or(Some(20.0)),
            Objective::Clipped if is_vanilla => self.clip_ratio_c.or(Some(3.0)),
            // verl hands the key to every loss; the others do not read it.
            Objective::Clipped if self.semantics != Semantics::Verl => self.clip_ratio_c,
            _ => None,
        }
    }

    /// Largest |log ratio| before exp.
    pub fn guard(&self) -> Option<f64> {
        let of_verl = matches!(
            self.loss_type,
            LossType::Grpo | LossType::Vanilla | LossType::Cispo | LossType::Sapo | LossType::DppoTv | LossType::DppoKl
        );
        let own = if of_verl && self.semantics == Semantics::Verl { Bound::At(20.0) } else { Bound::Off };
        self.log_ratio_guard.unwrap_or(own).value()
    }

    /// Bounds of the KL term's exponent and of its value.
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

    /// sapo's temperatures for positive and other advantages.
    pub fn sapo_temperatures(&self) -> (f64, f64) {
        (self.tau_pos.unwrap_or(self.sapo_temperature_pos), self.tau_neg.unwrap_or(self.sapo_temperature_neg))
    }

    /// The average, where it does not go with `loss_type`.
    pub fn agg_mode(&self) -> Option<LossAggMode> {
        self.loss_agg_mode.or((self.semantics == Semantics::Verl).then_some(LossAggMode::TokenMean))
    }

    /// Whether fully masked sequences count in means over sequences.
    pub fn counts_masked_rows(&self) -> bool {
        self.count_masked_rows.unwrap_or(self.semantics != Semantics::Verl)
    }

    /// What is done where a batch has `sampler_logp`.
    pub(crate) fn sampler_correction(&self) -> Option<SamplerCorrection> {
        if let Some(rollout_is) = self.rollout_is {
            let Threshold { low, high } = self.rollout_is_threshold?;
            // verl reads two bounds as icepop whatever the level; one bound of icepop is its reciprocal too.
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
        // TRL's GMPO knows no sampler.
        let by_default = self.semantics == Semantics::Trl && self.objective() != Objective::GeoMean;
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
