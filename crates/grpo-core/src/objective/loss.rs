//! The trait [`Loss`], which every loss of this folder implements, and [`LossTraits`], the facts about a loss.

use super::clip;
use super::ratio::Ratio;
use super::{PolicyTerm, TokenTerms};
use crate::backend_api::real::Real;
use crate::backend_api::token_columns::LossSums;
use crate::batch::TokenBatch;
use crate::batch::{PolicyValues, TokenFactors};
use crate::config::{ImportanceSamplingLevel, LossAggMode, LossConfig};
use crate::error::Result;
use crate::metrics::Metrics;

/// A loss: facts, formula, checks, selection of tokens and metrics.
///
/// The defaults describe PPO's clipped ratio (arXiv 1707.06347) per token, averaged over the tokens of the step.
/// `config` is the configuration that selects the loss; the loss's own keys are in `config.parameters`.
pub trait Loss {
    /// Facts about the loss.
    const TRAITS: LossTraits = LossTraits::PPO;

    /// Returns the policy term of a token before its factor and weight. `ratio` has the level [`LossConfig::level`].
    fn policy<R: Real>(&self, config: &LossConfig, terms: &TokenTerms<R>, ratio: &Ratio<R>) -> PolicyTerm<R> {
        clip::policy(config, terms, &ratio.value)
    }

    /// Returns the contribution of a token to the log-ratio that its sequence shares; `advantage` is the token's own. The default is l - o.
    fn shared_part<R: Real>(&self, config: &LossConfig, logp: &R, old_logp: &R, advantage: &R) -> R {
        let _ = (config, advantage);
        logp.clone() - old_logp.clone()
    }

    /// Checks the settings that the loss requires.
    ///
    /// # Errors
    /// [`crate::Error::Config`] that names the keys and the reason.
    fn check(&self, config: &LossConfig) -> Result<()> {
        let _ = config;
        Ok(())
    }

    /// Writes the selection of a loss with [`LossTraits::chooses_tokens`] into `factors`. `batch` has active tokens.
    fn choose(&self, config: &LossConfig, batch: &TokenBatch, policy: &PolicyValues, factors: &mut TokenFactors) {
        let _ = (config, batch, policy, factors);
    }

    /// Adds the metrics of the bounds, if there are any, and of the loss's own statistic.
    fn metrics(&self, config: &LossConfig, clipped: &Clipped<'_>, metrics: &mut Metrics) {
        if config.bounds() != Bounds::None {
            clip::metrics(config.clips_ratio() && config.dual_clip().is_some(), clipped, metrics);
        }
    }
}

/// Facts about a loss, from which [`LossConfig`] resolves its defaults and checks. A loss names those that differ from
/// [`LossTraits::PPO`].
#[derive(Clone, Copy, Debug)]
pub struct LossTraits {
    /// The quantity that the epsilons bound.
    pub clip: Clip,
    /// Level of the importance ratio unless `importance_sampling_level` is set.
    pub level: ImportanceSamplingLevel,
    /// The level under verl's semantics, if verl has no key for it.
    pub verl_level: Option<ImportanceSamplingLevel>,
    /// `true` if the loss is defined for token-level ratios only.
    pub is_of_tokens_only: bool,
    /// How the tokens of a sequence share a log-ratio of the loss's own, which has no level; `None` if they share none.
    pub shared_log_ratio: Option<SharedLogRatio>,
    /// `true` if a sequence has one policy term. Its advantage is the mean of its tokens' advantages, and its sampler weight is
    /// the geometric mean of its tokens' weights.
    pub is_of_sequences: bool,
    /// `true` if the clip and [`PolicyTerm::statistic`] have one value per sequence at every level.
    pub clips_sequences: bool,
    /// `true` if the ratio of old policy to sampler is added to the sequence's log-ratio instead of multiplying the policy term.
    pub takes_sampler_ratio: bool,
    /// `true` if the loss itself weights its tokens by the sampler's log-probabilities.
    pub weighs_by_sampler: bool,
    /// `true` if TRL corrects for the sampler by default.
    pub trl_corrects_sampler: bool,
    /// `true` if TRL reads `use_bias_correction_kl`.
    pub trl_reads_kl_bias_correction: bool,
    /// `true` if the loss selects tokens by the log-probabilities of the whole step ([`Loss::choose`]).
    pub chooses_tokens: bool,
    /// Default of `clip_ratio_c`, the bound of the dual clip or another cap of the ratio.
    pub dual_clip: Option<f64>,
    /// Default of `clip_ratio_c` under verl's semantics.
    pub verl_dual_clip: Option<f64>,
    /// Default of `log_ratio_guard` under verl's semantics.
    pub verl_log_ratio_guard: Option<f64>,
    /// Default of `epsilon_low`.
    pub epsilon: f64,
    /// Largest legal `epsilon_low`: 1 for a bound of a ratio, which is above 0.
    pub largest_epsilon_low: f64,
    /// TRL's average for this loss.
    pub average: Average,
    /// The average of MLLM-JAX, if it differs from TRL's.
    pub mllm_jax_average: Option<Average>,
    /// The average of the policy term alone in verl, if it is fixed and ignores the aggregation mode.
    pub verl_average: Option<OwnAverage>,
    /// The loss to use instead under `semantics: verl`, if this name stands for an average that verl sets with `loss_agg_mode`.
    pub names_average: Option<&'static str>,
}

impl LossTraits {
    /// The clipped ratio of PPO per token, averaged over the tokens of the step.
    pub const PPO: Self = Self {
        clip: Clip::Ratio,
        level: ImportanceSamplingLevel::Token,
        verl_level: None,
        is_of_tokens_only: false,
        shared_log_ratio: None,
        is_of_sequences: false,
        clips_sequences: false,
        takes_sampler_ratio: false,
        weighs_by_sampler: false,
        trl_corrects_sampler: true,
        trl_reads_kl_bias_correction: true,
        chooses_tokens: false,
        dual_clip: None,
        verl_dual_clip: None,
        verl_log_ratio_guard: None,
        epsilon: 0.2,
        largest_epsilon_low: 1.0,
        average: Average::StepTokens,
        mllm_jax_average: None,
        verl_average: None,
        names_average: None,
    };

    /// A loss of single tokens without bounds.
    pub const UNCLIPPED: Self = Self { clip: Clip::None, is_of_tokens_only: true, ..Self::PPO };
}

/// The quantity whose change `epsilon_low` and `epsilon_high` bound ([`LossConfig::bounds`]).
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Clip {
    /// No quantity.
    None,
    /// The ratio, by PPO's formula, which `delta` and the dual clip extend.
    Ratio,
    /// The ratio as a weight without a gradient (cispo). Systems other than verl have no lower bound, and `epsilon_high` bounds the ratio
    /// itself instead of its distance from 1.
    Weight,
    /// The log-ratio of a token.
    LogRatio,
    /// The log-ratio of a token, by a constant.
    ConstantLogRatio(f64),
    /// The probability of a token.
    Probability,
}

/// How the contributions of its tokens make the log-ratio of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
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
#[non_exhaustive]
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
#[non_exhaustive]
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
