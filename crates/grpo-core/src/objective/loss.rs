//! The trait [`Loss`], which every loss of this folder implements.

use super::clip;
use super::ratio::Ratio;
use super::{PolicyTerm, TokenTerms};
use crate::backend_api::real::Real;
use crate::backend_api::token_columns::LossSums;
use crate::batch::TokenBatch;
use crate::batch::{PolicyValues, TokenFactors};
use crate::config::{ImportanceSamplingLevel, LossAggMode, LossConfig, Semantics};
use crate::error::Result;
use crate::metrics::Metrics;

/// A loss: its formula, and the settings, averages and metrics that follow from the formula.
///
/// The default methods describe PPO's clipped ratio (arXiv 1707.06347) per token, averaged over the tokens of the step.
/// `config` is the configuration that selects the loss; the loss's own keys are in `config.parameters`.
pub trait Loss: Sync {
    /// Returns the policy term of a token before its factor and weight. `ratio` has the level [`LossConfig::level`].
    fn policy<R: Real>(&self, config: &LossConfig, terms: &TokenTerms<R>, ratio: &Ratio<R>) -> PolicyTerm<R>
    where
        Self: Sized,
    {
        clip::policy(config, terms, &ratio.value)
    }

    /// Returns the contribution of a token to the log-ratio that its sequence shares; `advantage` is the token's own. The default is l - o.
    fn shared_part<R: Real>(&self, config: &LossConfig, logp: &R, old_logp: &R, advantage: &R) -> R
    where
        Self: Sized,
    {
        let _ = (config, advantage);
        logp.clone() - old_logp.clone()
    }

    /// Returns the range in which the policy's values keep their gradient.
    fn bounds(&self, config: &LossConfig) -> Bounds {
        Bounds::Ratio { low: Some(config.ratio_low()), high: config.ratio_high() }
    }

    /// Returns `true` if the formula is PPO's clip, which `delta` and the dual clip need.
    fn clips_ratio(&self, config: &LossConfig) -> bool {
        matches!(self.bounds(config), Bounds::Ratio { .. })
    }

    /// Returns the upper bound of the ratio.
    fn ratio_high(&self, config: &LossConfig) -> f64 {
        1.0 + config.upper_epsilon()
    }

    /// Returns the level of the importance ratio.
    fn level(&self, config: &LossConfig) -> ImportanceSamplingLevel {
        config.importance_sampling_level.unwrap_or(ImportanceSamplingLevel::Token)
    }

    /// Returns `true` if the loss is defined for token-level ratios only.
    fn is_of_tokens_only(&self) -> bool {
        false
    }

    /// Returns how the tokens of a sequence share a log-ratio in addition to [`Loss::level`]; `None` if they share none.
    fn shared_log_ratio(&self) -> Option<SharedLogRatio> {
        None
    }

    /// Returns `true` if a sequence has one policy term. Its advantage is the mean of its tokens' advantages, and its sampler weight is
    /// the geometric mean of its tokens' weights.
    fn is_of_sequences(&self) -> bool {
        false
    }

    /// Returns `true` if the ratio of old policy to sampler is added to the sequence's log-ratio instead of multiplying the policy term.
    fn takes_sampler_ratio(&self) -> bool {
        false
    }

    /// Returns `true` if the loss itself weights its tokens by the sampler's log-probabilities.
    fn weighs_by_sampler(&self) -> bool {
        false
    }

    /// Returns `true` if `use_bias_correction_kl` is read under `semantics`.
    fn reads_kl_bias_correction(&self, semantics: Semantics) -> bool {
        let _ = semantics;
        true
    }

    /// Returns `true` if TRL corrects for the sampler by default.
    fn corrects_sampler_by_default(&self) -> bool {
        true
    }

    /// Returns c of the dual clip, or another cap of the ratio.
    fn dual_clip(&self, config: &LossConfig) -> Option<f64> {
        // verl passes the key to every loss; most losses ignore it.
        config.clip_ratio_c.filter(|_| self.clips_ratio(config) && config.semantics != Semantics::Verl)
    }

    /// Returns the default of `log_ratio_guard`.
    fn log_ratio_guard(&self, semantics: Semantics) -> Option<f64> {
        let _ = semantics;
        None
    }

    /// Returns the default of `epsilon_low`.
    fn default_epsilon(&self) -> f64 {
        0.2
    }

    /// Returns the largest legal `epsilon_low`. The default is 1, because a ratio is above 0.
    fn largest_epsilon_low(&self) -> f64 {
        1.0
    }

    /// Returns TRL's average for this loss.
    fn average(&self, config: &LossConfig) -> Average {
        let _ = config;
        Average::StepTokens
    }

    /// Returns the average of the policy term alone, if a system has a fixed one that ignores its aggregation mode.
    fn own_average(&self, semantics: Semantics) -> Option<OwnAverage> {
        let _ = semantics;
        None
    }

    /// Returns the loss to use instead under `semantics: verl`, if this name stands for an average that verl sets with `loss_agg_mode`.
    fn names_average(&self) -> Option<&'static str> {
        None
    }

    /// Checks the settings that the loss requires.
    ///
    /// # Errors
    /// [`crate::Error::Config`] that names the keys and the reason.
    fn check(&self, config: &LossConfig) -> Result<()> {
        let _ = config;
        Ok(())
    }

    /// Returns `true` if the loss selects tokens by the log-probabilities of the whole step ([`Loss::choose`]).
    fn chooses_tokens(&self) -> bool {
        false
    }

    /// Writes the selection into `factors`. `batch` has active tokens.
    fn choose(&self, config: &LossConfig, batch: &TokenBatch, policy: &PolicyValues, factors: &mut TokenFactors) {
        let _ = (config, batch, policy, factors);
    }

    /// Returns `true` if the clip and [`PolicyTerm::statistic`] have one value per sequence.
    fn clips_sequences(&self) -> bool {
        false
    }

    /// Returns `true` if the loss computes [`PolicyTerm::statistic`].
    fn has_statistic(&self) -> bool {
        false
    }

    /// Adds the metrics of the bounds, if there are any, and of the loss's own statistic.
    fn metrics(&self, config: &LossConfig, clipped: &Clipped<'_>, metrics: &mut Metrics) {
        if self.bounds(config) != Bounds::None {
            clip::metrics(self.dual_clip(config).is_some() && self.clips_ratio(config), clipped, metrics);
        }
    }
}

/// How the contributions of its tokens make the log-ratio of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedLogRatio {
    /// The mean over active tokens.
    Mean,
    /// The sum over active tokens.
    Sum,
}

/// The range in which the policy's values keep their gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bounds {
    /// No bounds.
    None,
    /// Ratios between these.
    Ratio {
        /// Lower bound, where there is one.
        low: Option<f64>,
        /// Upper bound.
        high: f64,
    },
    /// Log-ratios of a token between these.
    LogRatio {
        /// Lower bound.
        low: f64,
        /// Upper bound.
        high: f64,
    },
    /// Bounds on the change of a token's probability, or on its KL divergence.
    Probability {
        /// Largest decrease.
        down: f64,
        /// Largest increase.
        up: f64,
    },
}

/// TRL's averages over the tokens of a step ([`crate::aggregate`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Average {
    /// Mean over the step's active tokens: 1/N.
    StepTokens,
    /// Sum divided by the tokens of the generation batch: 1/num_items_in_batch.
    GenerationTokens,
    /// Mean over the tokens of a sequence, then over sequences: 1/(B |y|).
    Sequences,
    /// Sum divided by a constant length, then mean over sequences: 1/(B max_completion_length).
    ConstantLength,
    /// Sum over the tokens of a sequence, then mean over sequences: 1/B.
    SequenceSums,
}

/// An average that a system fixes for one policy term, independent of its aggregation mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnAverage {
    /// The average of an aggregation mode.
    Mode(LossAggMode),
    /// Mean over the tokens of a sequence, then over all rows, including fully masked ones.
    AllRows,
}

/// The inputs of [`Loss::metrics`].
#[derive(Clone, Copy, Debug)]
pub struct Clipped<'a> {
    /// Sums over the active tokens.
    pub sums: &'a LossSums<f64>,
    /// Active tokens.
    pub tokens: f64,
    /// Number of terms in `sums`: active tokens, or sequences if the clip has one value per sequence.
    pub count: f64,
    /// Number of fully masked sequences if the clip has one value per sequence, else 0. Their shared ratio is 1, which no bound clips.
    pub masked: usize,
}
