//! The step from log-probabilities to the loss and its derivatives, for backends that run on the host.
//!
//! An [`Evaluator`] holds the inputs that are known before the policy runs (weights, old log-probabilities, advantages).
//! A backend passes it log-probabilities span by span, as tiles finish, and receives dL/dlogp and dL/dentropy.
//! Derivatives come from [`crate::backend_api::real::Dual`]. A log-ratio that a sequence shares is a sum over its tokens, so the
//! derivative by it is one number per sequence, which every active token receives.
//!
//! [`LossConfig::prepare`] has added the quantities that need the whole batch.

use crate::aggregate::batch_weights;
use crate::backend_api::real::{List, Scalar};
use crate::backend_api::token_columns::{LossSums, Recorded, TokenColumns};
use crate::batch::{Advantages, TokenBatch, TokenWeights};
use crate::config::{ImportanceSamplingLevel, LossConfig};
use crate::error::{Error, Result};
use crate::metrics::Metrics;
use crate::objective::{Clipped, batch_loss, weighted};
use std::borrow::Cow;
use std::ops::Range;

/// The loss of one batch, before the policy's log-probabilities are known.
///
/// Positions are indices into [`TokenBatch::active_rows`], so masked rows have none.
#[derive(Debug)]
pub struct Evaluator<'a> {
    config: &'a LossConfig,
    batch: &'a TokenBatch,
    weights: Cow<'a, TokenWeights>,
    /// First active position of each sequence: [B + 1].
    starts: Vec<usize>,
}

/// Running sums of one pass over a batch; created by [`Evaluator::totals`], consumed by [`Evaluator::finish`].
#[derive(Clone, Debug)]
pub struct Totals {
    /// `low_min` and `high_max` follow from the lists below.
    sums: LossSums<f64>,
    magnitude: f64,
    /// Clipped tokens per sequence: [B].
    low_clipped: Vec<f64>,
    high_clipped: Vec<f64>,
}

impl Totals {
    /// Returns the sum of |weight x token loss|. The terms of the loss may cancel, so its rounding error is relative to this sum.
    pub fn magnitude(&self) -> f64 {
        self.magnitude
    }
}

impl<'a> Evaluator<'a> {
    /// Prepares the loss of `batch` with the batch's own weights, or with the weights of the batch as one whole step.
    ///
    /// # Errors
    /// [`Error::Config`] for an illegal configuration or a batch without a required input (reference log-probabilities
    /// if beta is not 0).
    pub fn new(config: &'a LossConfig, batch: &'a TokenBatch) -> Result<Self> {
        config.validate()?;
        if config.needs_ref_logp() && batch.ref_logp().is_none() {
            return Err(Error::Config(format!(
                "beta is {} but the batch has no ref_logp: set it, or set beta to 0",
                config.beta
            )));
        }
        if batch.factors().is_none() && config.selects_tokens() {
            return Err(Error::Config(
                "this loss selects tokens by scores of the whole batch: call LossConfig::prepare first".into(),
            ));
        }
        if config.weighs_kl_by_sampler() && batch.sampler_logp().is_none() {
            return Err(Error::Config(
                "kl_importance: sampler compares the policy with the sampler, but the batch has no sampler_logp".into(),
            ));
        }
        let weights = batch_weights(config, batch)?;
        let mut starts = vec![0];
        for sequence in 0..batch.sequences() {
            starts.push(starts[sequence] + batch.active_in(sequence));
        }
        Ok(Self { config, batch, weights, starts })
    }

    /// Returns the first active position of each sequence, `[B + 1]`.
    pub fn sequence_starts(&self) -> &[usize] {
        &self.starts
    }

    /// Returns sums of zero.
    pub fn totals(&self) -> Totals {
        let none = vec![0.0; self.batch.sequences()];
        Totals { sums: LossSums::empty(), magnitude: 0.0, low_clipped: none.clone(), high_clipped: none }
    }

    /// Evaluates the active positions `span` and adds to `totals`.
    ///
    /// `logp`, `entropy`: values in nats, `[span]`. `dlogp`, `dentropy`: dL/dlogp and dL/dentropy including the aggregation
    /// weight, `[span]`, overwritten. If tokens share a log-ratio ([`LossConfig::is_token_level`] is `false`), a span holds whole
    /// sequences.
    ///
    /// # Panics
    /// If the slices do not have the span's length, or if a span cuts a sequence whose tokens share a log-ratio. Both are bugs of a backend.
    pub fn evaluate<R: Scalar>(
        &self,
        span: Range<usize>,
        logp: &[R],
        entropy: &[R],
        dlogp: &mut [R],
        dentropy: &mut [R],
        totals: &mut Totals,
    ) {
        for list in [dlogp.len(), dentropy.len()] {
            assert_eq!(list, span.len(), "one entry per active position of the span");
        }
        let first = span.start;
        self.each_token(span, logp, entropy, |token| {
            dlogp[token.position - first] = R::from_f64(token.dlogp);
            dentropy[token.position - first] = R::from_f64(-token.columns.entropy_weight);
            count(token.sequence, token.columns, token.summands, totals);
        });
    }

    /// Calls `visit` for each active position of `span`, in order. The arguments are those of [`Evaluator::evaluate`].
    pub(crate) fn each_token<R: Scalar>(
        &self,
        span: Range<usize>,
        logp: &[R],
        entropy: &[R],
        mut visit: impl FnMut(EvaluatedToken<'_>),
    ) {
        for list in [logp.len(), entropy.len()] {
            assert_eq!(list, span.len(), "one entry per active position of the span");
        }
        // The last sequence that starts at or before the span. Sequences without active tokens before it have no position.
        let mut sequence = self.starts.partition_point(|s| *s <= span.start) - 1;
        let mut from = span.start;
        while from < span.end {
            let part = from..self.starts[sequence + 1].min(span.end);
            let whole = self.starts[sequence]..self.starts[sequence + 1];
            if !self.config.is_token_level() {
                assert_eq!(part, whole, "where tokens share a ratio, a span holds whole sequences");
            }
            let at = |position: usize| position - span.start;
            let columns = |position: usize| self.columns(sequence, self.batch.active_rows()[position]);
            let mut record = |position: usize, columns: &TokenColumns<f64>, summands: LossSums<f64>, dlogp: f64| {
                visit(EvaluatedToken { sequence, position, columns, summands, dlogp });
            };
            if self.config.is_token_level() {
                for position in part.clone() {
                    let columns = columns(position);
                    let inputs = (&logp[at(position)].to_f64(), &entropy[at(position)].to_f64());
                    let (token, slope) = batch_loss(self.config, &columns, self.recorded(), inputs, |own| *own);
                    record(position, &columns, token, slope);
                }
            } else {
                let tokens: Vec<TokenColumns<f64>> = part.clone().map(columns).collect();
                let column = |i| List(tokens.iter().map(|token| *token.iter().nth(i).unwrap_or(&0.0)).collect());
                let columns = TokenColumns::from_fn(column);
                let list = |values: &[R]| List(part.clone().map(|position| values[at(position)].to_f64()).collect());
                let inputs = (&list(logp), &list(entropy));
                let (sums, slopes) = batch_loss(self.config, &columns, self.recorded(), inputs, List::sum);
                for (i, position) in part.clone().enumerate() {
                    record(position, &tokens[i], sums.map(|list| list.0[i]), slopes.0[i]);
                }
            }
            from = part.end;
            sequence += 1;
        }
    }

    /// Returns the batch.
    pub fn batch(&self) -> &'a TokenBatch {
        self.batch
    }

    /// Returns the configuration.
    pub fn config(&self) -> &'a LossConfig {
        self.config
    }

    /// Ends a pass over all active positions and returns its sums, the input of [`Evaluator::metrics`].
    pub fn finish(&self, totals: Totals) -> LossSums<f64> {
        let (mut low_min, mut high_max) = (f64::INFINITY, f64::NEG_INFINITY);
        for sequence in (0..self.batch.sequences()).filter(|s| self.length(*s) > 0) {
            let length = if self.shares_clip() { 1.0 } else { self.length(sequence) as f64 };
            low_min = low_min.min(totals.low_clipped[sequence] / length);
            high_max = high_max.max(totals.high_clipped[sequence] / length);
        }
        LossSums {
            low_clipped: totals.low_clipped.iter().sum(),
            high_clipped: totals.high_clipped.iter().sum(),
            low_min,
            high_max,
            ..totals.sums
        }
    }

    /// Computes metrics from the sums: TRL's, verl's `ppo_kl` and `pg_clipfrac_lower`, and tunix's `is_ratio/*`.
    pub fn metrics(&self, sums: &LossSums<f64>) -> Metrics {
        let tokens = self.batch.active_tokens() as f64;
        let mut metrics = Metrics::default();
        metrics.mean("entropy", sums.entropy, tokens);
        if self.config.beta != 0.0 {
            metrics.mean("kl", sums.kl, tokens);
        }
        metrics.mean("ppo_kl", -sums.log_ratio, tokens);
        metrics.mean("is_ratio/mean", sums.ratio, tokens);
        if tokens > 0.0 {
            metrics.min("is_ratio/min", sums.ratio_min);
            metrics.max("is_ratio/max", sums.ratio_max);
        }
        if self.config.positive_example_nll_weight != 0.0 {
            let imitated = self.weights.nll.iter().filter(|weight| **weight != 0.0).count();
            metrics.mean("positive_nll_loss", sums.nll, imitated as f64);
        }
        // A shared ratio is one value per sequence and counts once; values per token are weighted by token.
        let count = if self.shares_clip() { self.batch.sequences() as f64 } else { tokens };
        let masked =
            if self.shares_clip() { (0..self.batch.sequences()).filter(|s| self.length(*s) == 0).count() } else { 0 };
        self.config.loss_type.metrics(self.config, &Clipped { sums, tokens, count, masked }, &mut metrics);
        if let Some(factors) = self.batch.factors() {
            metrics.merge(&factors.metrics);
        }
        metrics
    }

    /// Returns the weights per token of the step that the batch belongs to.
    pub fn weights(&self) -> &TokenWeights {
        &self.weights
    }

    fn length(&self, sequence: usize) -> usize {
        self.starts[sequence + 1] - self.starts[sequence]
    }

    /// Returns the weight of a row's entropy in the bonus.
    fn entropy_weight(&self, row: usize) -> f64 {
        self.weights.entropy[row] * self.batch.factors().map_or(1.0, |factors| factors.entropy[row])
    }

    /// Returns the inputs of an active row of `sequence` other than its log-probability.
    pub fn columns(&self, sequence: usize, row: usize) -> TokenColumns<f64> {
        let (config, batch, weights, factors) = (self.config, self.batch, &self.weights, self.batch.factors());
        let of = |list: Option<&[f32]>| list.map_or(0.0, |list| list[row].into());
        let share = 1.0 / self.length(sequence).max(1) as f64;
        TokenColumns {
            advantage: self.advantage(sequence, row),
            token_advantage: batch.advantage(sequence, row).into(),
            policy_weight: weights.policy[row],
            kl_weight: weights.kl[row],
            nll_weight: weights.nll[row],
            entropy_weight: self.entropy_weight(row),
            policy_factor: factors.map_or(1.0, |factors| factors.policy[row]),
            log_ratio_scale: factors.map_or(1.0, |factors| factors.log_ratio_scale[row]),
            log_ratio_bias: factors.map_or(0.0, |factors| factors.log_ratio_bias[row]),
            kl_cov_mask: factors.map_or(0.0, |factors| factors.kl_cov_mask[row]),
            share,
            clip_share: if self.shares_clip() { share } else { 1.0 },
            old_logp: of(batch.old_logp()),
            ref_logp: of(batch.ref_logp()),
            sampler_logp: of(batch.sampler_logp()),
            reciprocal_temperature: config.reciprocal_temperature(batch, row),
        }
    }

    /// Returns which policies have log-probabilities in the batch.
    fn recorded(&self) -> Recorded {
        let batch = self.batch;
        Recorded {
            old: batch.old_logp().is_some(),
            reference: batch.ref_logp().is_some(),
            sampler: batch.sampler_logp().is_some(),
        }
    }

    /// Returns `true` if ratio and advantage, and therefore the clip, have one value per sequence.
    pub fn shares_clip(&self) -> bool {
        (self.config.level() == ImportanceSamplingLevel::Sequence || self.config.traits().clips_sequences)
            && matches!(self.batch.advantages(), Advantages::PerSequence(_))
    }

    /// Returns the advantage of a row. A loss with one term per sequence uses the mean of its tokens (verl's geo_mean).
    fn advantage(&self, sequence: usize, row: usize) -> f64 {
        match self.batch.advantages() {
            Advantages::PerToken(advantages) if self.config.traits().is_of_sequences => {
                let rows = &self.batch.active_rows()[self.starts[sequence]..self.starts[sequence + 1]];
                rows.iter().map(|row| f64::from(advantages[*row])).sum::<f64>() / rows.len().max(1) as f64
            }
            _ => self.batch.advantage(sequence, row).into(),
        }
    }
}

/// The result of one active position.
pub(crate) struct EvaluatedToken<'a> {
    sequence: usize,
    pub(crate) position: usize,
    pub(crate) columns: &'a TokenColumns<f64>,
    pub(crate) summands: LossSums<f64>,
    /// dL/dlogp.
    pub(crate) dlogp: f64,
}

/// Adds the summands of a token.
fn count(sequence: usize, columns: &TokenColumns<f64>, mut token: LossSums<f64>, totals: &mut Totals) {
    let terms = [token.policy, weighted(&columns.kl_weight, &token.kl), weighted(&columns.nll_weight, &token.nll)];
    totals.magnitude += terms[0].abs() + terms[1].abs() + terms[2].abs();
    for of_clip in [&mut token.low_clipped, &mut token.high_clipped, &mut token.statistic] {
        *of_clip *= columns.clip_share;
    }
    totals.low_clipped[sequence] += token.low_clipped;
    totals.high_clipped[sequence] += token.high_clipped;
    totals.sums.merge(&token);
}
