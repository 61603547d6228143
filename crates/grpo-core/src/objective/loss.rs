//! What a loss is: the trait that every file of this folder implements for its own.

use super::clip;
use super::ratio::Ratio;
use super::{PolicyTerm, TokenTerms};
use crate::backend_api::columns::LossSums;
use crate::backend_api::real::Real;
use crate::batch::TokenBatch;
use crate::batch::{PolicyValues, TokenFactors};
use crate::config::{ImportanceSamplingLevel, LossAggMode, LossConfig, Semantics};
use crate::error::Result;
use crate::metrics::Metrics;

/// A loss: its formula, and what follows from it for configuration, averages and metrics.
///
/// What a loss does not say of itself is that of PPO's clipped ratio (arXiv 1707.06347), one for each token, averaged over the
/// tokens of the step. `config` is the configuration that names the loss; the loss's own keys are in `config.parameters`.
pub trait Loss: Sync {
    /// The policy term of a token, without its factor and its weight. `ratio` is that of [`LossConfig::level`].
    fn policy<R: Real>(&self, config: &LossConfig, terms: &TokenTerms<R>, ratio: &Ratio<R>) -> PolicyTerm<R>
    where
        Self: Sized,
    {
        clip::policy(config, terms, &ratio.value)
    }

    /// What a token adds to the log-ratio that its sequence shares, by its own `advantage`: l - o.
    fn shared_part<R: Real>(&self, config: &LossConfig, logp: &R, old_logp: &R, advantage: &R) -> R
    where
        Self: Sized,
    {
        let _ = (config, advantage);
        logp.clone() - old_logp.clone()
    }

    /// Which values of the policy keep their gradient.
    fn bounds(&self, config: &LossConfig) -> Bounds {
        Bounds::Ratio { low: Some(config.ratio_low()), high: config.ratio_high() }
    }

    /// Whether the formula is PPO's clip, so that `delta` and the dual clip have a meaning.
    fn clips_ratio(&self, config: &LossConfig) -> bool {
        matches!(self.bounds(config), Bounds::Ratio { .. })
    }

    /// Upper bound of the ratio.
    fn ratio_high(&self, config: &LossConfig) -> f64 {
        1.0 + config.upper_epsilon()
    }

    /// Level of the importance ratio.
    fn level(&self, config: &LossConfig) -> ImportanceSamplingLevel {
        config.importance_sampling_level.unwrap_or(ImportanceSamplingLevel::Token)
    }

    /// Whether the loss is defined by the ratio of tokens alone.
    fn is_of_tokens_only(&self) -> bool {
        false
    }

    /// How the tokens of a sequence share a log-ratio beside that of the level; `None` where they share none.
    fn shared_log_ratio(&self) -> Option<SharedLogRatio> {
        None
    }

    /// Whether a sequence has one policy term, whose advantage is the mean of its tokens' and whose weight of the sampler is
    /// the geometric mean of theirs.
    fn is_of_sequences(&self) -> bool {
        false
    }

    /// Whether the ratio of old policy to sampler goes into the sequence's log-ratio, not into a factor of the policy term.
    fn takes_sampler_ratio(&self) -> bool {
        false
    }

    /// Whether the loss weighs its tokens by the sampler's log-probabilities itself.
    fn weighs_by_sampler(&self) -> bool {
        false
    }

    /// Whether `use_bias_correction_kl` is read under `semantics`.
    fn reads_kl_bias_correction(&self, semantics: Semantics) -> bool {
        let _ = semantics;
        true
    }

    /// Whether TRL corrects for the sampler without being asked.
    fn corrects_sampler_by_default(&self) -> bool {
        true
    }

    /// c of the dual clip, or another cap of the ratio.
    fn dual_clip(&self, config: &LossConfig) -> Option<f64> {
        // verl hands the key to every loss; most do not read it.
        config.clip_ratio_c.filter(|_| self.clips_ratio(config) && config.semantics != Semantics::Verl)
    }

    /// `log_ratio_guard` where it is not set.
    fn log_ratio_guard(&self, semantics: Semantics) -> Option<f64> {
        let _ = semantics;
        None
    }

    /// `epsilon_low` where it is not set.
    fn default_epsilon(&self) -> f64 {
        0.2
    }

    /// Largest legal `epsilon_low`: a ratio lies above 0.
    fn largest_epsilon_low(&self) -> f64 {
        1.0
    }

    /// TRL's average, which goes with the loss.
    fn average(&self, config: &LossConfig) -> Average {
        let _ = config;
        Average::StepTokens
    }

    /// The average of the policy term alone where a system has one of its own, whatever its mode.
    fn own_average(&self, semantics: Semantics) -> Option<OwnAverage> {
        let _ = semantics;
        None
    }

    /// The loss to name in its place where verl says with `loss_agg_mode` what this name says: how to average.
    fn names_average(&self) -> Option<&'static str> {
        None
    }

    /// Checks what the loss needs of the configuration, alone and together.
    ///
    /// # Errors
    /// [`crate::Error::Config`] that names the keys and says why.
    fn check(&self, config: &LossConfig) -> Result<()> {
        let _ = config;
        Ok(())
    }

    /// Whether tokens are chosen by what the policy says of all of them ([`Loss::choose`]).
    fn chooses_tokens(&self) -> bool {
        false
    }

    /// Writes the choice into `factors`. `batch` has active tokens.
    fn choose(&self, config: &LossConfig, batch: &TokenBatch, policy: &PolicyValues, factors: &mut TokenFactors) {
        let _ = (config, batch, policy, factors);
    }

    /// Whether [`PolicyTerm::statistic`] is one number per sequence, and so is the clip.
    fn clips_sequences(&self) -> bool {
        false
    }

    /// Whether [`PolicyTerm::statistic`] is made.
    fn has_statistic(&self) -> bool {
        false
    }

    /// Metrics of the bounds, where there are any, and of the loss's own statistic.
    fn metrics(&self, config: &LossConfig, clipped: &Clipped<'_>, metrics: &mut Metrics) {
        if self.bounds(config) != Bounds::None {
            clip::metrics(self.dual_clip(config).is_some() && self.clips_ratio(config), clipped, metrics);
        }
    }
}

/// How the log-ratio of a sequence is made of what its tokens add to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedLogRatio {
    /// Their mean over active tokens.
    Mean,
    /// Their sum.
    Sum,
}

/// Which values of the policy keep their gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bounds {
    /// All.
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
    /// Tokens whose probability has changed by less than these, or by less than these in KL divergence.
    Probability {
        /// How far it may fall.
        down: f64,
        /// How far it may rise.
        up: f64,
    },
}

/// TRL's averages over the tokens of a step ([`crate::aggregate`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Average {
    /// Over the step's active tokens: 1/N.
    StepTokens,
    /// Over the generation batch's tokens: 1/num_items_in_batch.
    GenerationTokens,
    /// Over the tokens of a sequence, then over sequences: 1/(B |y|).
    Sequences,
    /// A constant length, then over sequences: 1/(B max_completion_length).
    ConstantLength,
    /// Summed over the tokens of a sequence, then over sequences: 1/B.
    SequenceSums,
}

/// An average that a system has for one policy term, whatever its mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnAverage {
    /// That of a mode.
    Mode(LossAggMode),
    /// Over the tokens of a sequence, then over all rows, whatever counts elsewhere.
    AllRows,
}

/// What [`Loss::metrics`] are made of.
#[derive(Clone, Copy, Debug)]
pub struct Clipped<'a> {
    /// What was added up.
    pub sums: &'a LossSums<f64>,
    /// Active tokens.
    pub tokens: f64,
    /// What `sums` count: active tokens, or sequences where the clip is a sequence's.
    pub count: f64,
    /// Fully masked sequences where the clip is a sequence's, else 0: they have a shared ratio too, 1, which no bound clips.
    pub masked: usize,
}
