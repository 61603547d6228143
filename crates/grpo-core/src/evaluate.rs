//! From log-probabilities to the loss and its derivatives, for backends that run on the host.
//!
//! An [`Evaluator`] holds what is known of a step before the policy runs (weights, old log-probabilities, advantages).
//! A backend feeds it log-probabilities span by span, as its tiles finish, and gets dL/dlogp and dL/dentropy back.
//! Derivatives come from [`Dual`]; the sequence-level ratio is a mean, so its derivative is one number per sequence
//! pulled back to every active token of it.

use crate::batch::{Advantages, TokenBatch};
use crate::config::{ImportanceSamplingLevel, LossConfig, LossType};
use crate::error::{Error, Result};
use crate::metrics::Metrics;
use crate::objective::{TokenLoss, TokenTerms, token_loss};
use crate::real::{Dual, Real, Scalar};
use crate::weights::{TokenWeights, token_weights};
use std::borrow::Cow;
use std::ops::Range;

/// The loss of one batch, waiting for the policy's log-probabilities.
///
/// Positions are indices into [`TokenBatch::active_rows`]: masked rows do not exist here.
#[derive(Debug)]
pub struct Evaluator<'a> {
    config: &'a LossConfig,
    batch: &'a TokenBatch,
    weights: Cow<'a, TokenWeights>,
    /// Active position where each sequence starts: [B + 1].
    starts: Vec<usize>,
}

/// Running sums of one pass over a batch; made by [`Evaluator::totals`], closed by [`Evaluator::finish`].
#[derive(Clone, Debug)]
pub struct Totals {
    loss: f64,
    magnitude: f64,
    kl: f64,
    entropy: f64,
    /// Clipped tokens per sequence: [B].
    low_clipped: Vec<f64>,
    high_clipped: Vec<f64>,
}

impl Totals {
    /// Sum of |weight x token loss|: what the loss is a difference of, and so what its rounding is relative to.
    pub fn magnitude(&self) -> f64 {
        self.magnitude
    }
}

impl<'a> Evaluator<'a> {
    /// Prepares the loss of `batch`; weights are the batch's own, or those of the batch as one whole step.
    ///
    /// # Errors
    /// [`Error::Config`] for an illegal configuration or a batch that lacks what it needs (reference log-probabilities
    /// when beta is not 0).
    pub fn new(config: &'a LossConfig, batch: &'a TokenBatch) -> Result<Self> {
        config.validate()?;
        if config.needs_ref_logp() && batch.ref_logp().is_none() {
            return Err(Error::Config(format!(
                "beta is {} but the batch has no ref_logp: set it, or set beta to 0",
                config.beta
            )));
        }
        let weights = match batch.weights() {
            Some(weights) => Cow::Borrowed(weights),
            None => Cow::Owned(token_weights(config, batch)),
        };
        let mut starts = vec![0];
        for sequence in 0..batch.sequences() {
            starts.push(starts[sequence] + batch.active_in(sequence));
        }
        Ok(Self { config, batch, weights, starts })
    }

    /// Active position where each sequence starts, `[B + 1]`.
    pub fn sequence_starts(&self) -> &[usize] {
        &self.starts
    }

    /// Sums at zero.
    pub fn totals(&self) -> Totals {
        let sequences = self.batch.sequences();
        Totals {
            loss: 0.0,
            magnitude: 0.0,
            kl: 0.0,
            entropy: 0.0,
            low_clipped: vec![0.0; sequences],
            high_clipped: vec![0.0; sequences],
        }
    }

    /// Evaluates the active positions `span`, adding to `totals`.
    ///
    /// `logp`, `entropy`: values in nats, `[span]`. `dlogp`, `dentropy`: dL/dlogp and dL/dentropy with the aggregation
    /// weight inside, `[span]`, overwritten. At sequence level a span has to hold whole sequences
    /// ([`LossConfig::is_token_level`] tells).
    ///
    /// # Panics
    /// When the slices do not have the span's length, or a sequence-level span cuts a sequence: errors of a backend,
    /// not of a caller.
    pub fn evaluate<R: Scalar>(
        &self,
        span: Range<usize>,
        logp: &[R],
        entropy: &[R],
        dlogp: &mut [R],
        dentropy: &mut [R],
        totals: &mut Totals,
    ) {
        for list in [logp.len(), entropy.len(), dlogp.len(), dentropy.len()] {
            assert_eq!(list, span.len(), "one entry per active position of the span");
        }
        // The last sequence that starts at or before the span: empty ones before it own no position.
        let mut sequence = self.starts.partition_point(|s| *s <= span.start) - 1;
        let mut from = span.start;
        while from < span.end {
            let part = from..self.starts[sequence + 1].min(span.end);
            let local = part.start - span.start..part.end - span.start;
            match self.config.level() {
                ImportanceSamplingLevel::Token => {
                    self.token_level(sequence, part.clone(), &logp[local.clone()], &mut dlogp[local], totals);
                }
                ImportanceSamplingLevel::Sequence => {
                    let whole = self.starts[sequence]..self.starts[sequence + 1];
                    assert_eq!(part, whole, "a sequence-level span holds whole sequences");
                    self.sequence_level(sequence, part.clone(), &logp[local.clone()], &mut dlogp[local], totals);
                }
            }
            from = part.end;
            sequence += 1;
        }
        for (i, position) in span.enumerate() {
            let weight = self.config.entropy_coef * self.weights.entropy[self.batch.active_rows()[position]];
            let value = entropy[i].to_f64();
            dentropy[i] = R::from_f64(-weight);
            totals.entropy += value;
            if weight != 0.0 {
                totals.loss -= weight * value;
            }
        }
    }

    /// Closes a pass over all active positions: the loss and the metrics, under TRL's names.
    pub fn finish(&self, totals: Totals) -> (f64, Metrics) {
        let tokens = self.batch.active_tokens() as f64;
        let mut metrics = Metrics::default();
        metrics.mean("entropy", totals.entropy, tokens);
        if self.config.beta != 0.0 {
            metrics.mean("kl", totals.kl, tokens);
        }
        // A shared ratio is one value per sequence, so it counts once; per-token values are weighted by token.
        let per_sequence = self.shared_value();
        let count = if per_sequence { self.batch.sequences() as f64 } else { tokens };
        let low: f64 = totals.low_clipped.iter().sum();
        let high: f64 = totals.high_clipped.iter().sum();
        if self.config.loss_type == LossType::Cispo {
            metrics.mean("cispo_clip_ratio", high, count);
        } else {
            metrics.mean("clip_ratio/low_mean", low, count);
            metrics.mean("clip_ratio/high_mean", high, count);
            metrics.mean("clip_ratio/region_mean", low + high, count);
            // A fully masked sequence has a shared ratio too: 1, which no bound clips.
            for sequence in (0..self.batch.sequences()).filter(|s| per_sequence || self.length(*s) > 0) {
                let length = if per_sequence { 1.0 } else { self.length(sequence) as f64 };
                metrics.min("clip_ratio/low_min", totals.low_clipped[sequence] / length);
                metrics.max("clip_ratio/high_max", totals.high_clipped[sequence] / length);
            }
        }
        (totals.loss, metrics)
    }

    fn length(&self, sequence: usize) -> usize {
        self.starts[sequence + 1] - self.starts[sequence]
    }

    /// Whether ratio and advantage, and so the clip indicators, are one value for all tokens of a sequence.
    fn shared_value(&self) -> bool {
        self.config.level() == ImportanceSamplingLevel::Sequence
            && matches!(self.batch.advantages(), Advantages::PerSequence(_))
    }

    fn token_level<R: Scalar>(
        &self,
        sequence: usize,
        part: Range<usize>,
        logp: &[R],
        dlogp: &mut [R],
        totals: &mut Totals,
    ) {
        for (i, position) in part.enumerate() {
            let row = self.batch.active_rows()[position];
            let logp = Dual::variable(logp[i]);
            let old = match self.batch.old_logp() {
                Some(old) => Dual::fixed(R::from_f64(old[row].into())),
                None => logp.stop_gradient(),
            };
            let value = token_loss(self.config, &self.terms(sequence, row, logp, logp - old));
            let weight = self.weights.policy[row];
            dlogp[i] = weighted(weight, value.loss.tangent);
            self.count(sequence, weight, &value, 1.0, totals);
        }
    }

    fn sequence_level<R: Scalar>(
        &self,
        sequence: usize,
        part: Range<usize>,
        logp: &[R],
        dlogp: &mut [R],
        totals: &mut Totals,
    ) {
        let length = part.len() as f64;
        let log_ratio = match self.batch.old_logp() {
            Some(old) => {
                let rows = &self.batch.active_rows()[part.clone()];
                rows.iter().zip(logp).map(|(row, l)| l.to_f64() - f64::from(old[*row])).sum::<f64>() / length
            }
            None => 0.0,
        };
        let log_ratio = R::from_f64(log_ratio);
        let clip_share = if self.shared_value() { 1.0 / length } else { 1.0 };
        let mut through_ratio = 0.0;
        for (i, position) in part.enumerate() {
            let row = self.batch.active_rows()[position];
            let weight = self.weights.policy[row];
            let of_ratio =
                token_loss(self.config, &self.terms(sequence, row, Dual::fixed(logp[i]), Dual::variable(log_ratio)));
            let of_logp =
                token_loss(self.config, &self.terms(sequence, row, Dual::variable(logp[i]), Dual::fixed(log_ratio)));
            through_ratio += weighted(weight, of_ratio.loss.tangent).to_f64();
            dlogp[i] = weighted(weight, of_logp.loss.tangent);
            self.count(sequence, weight, &of_logp, clip_share, totals);
        }
        let shared = R::from_f64(through_ratio / length);
        for d in dlogp {
            *d = *d + shared;
        }
    }

    fn terms<R: Scalar>(&self, sequence: usize, row: usize, logp: Dual<R>, log_ratio: Dual<R>) -> TokenTerms<Dual<R>> {
        TokenTerms {
            logp,
            log_ratio,
            ref_logp: self.batch.ref_logp().map(|q| Dual::fixed(R::from_f64(q[row].into()))),
            advantage: Dual::fixed(R::from_f64(self.batch.advantage(sequence, row).into())),
        }
    }

    fn count<R: Scalar>(
        &self,
        sequence: usize,
        weight: f64,
        value: &TokenLoss<Dual<R>>,
        clip_share: f64,
        totals: &mut Totals,
    ) {
        if weight != 0.0 {
            totals.loss += weight * value.loss.value.to_f64();
            totals.magnitude += (weight * value.loss.value.to_f64()).abs();
        }
        totals.kl += value.kl.map_or(0.0, |kl| kl.value.to_f64());
        totals.low_clipped[sequence] += clip_share * value.low_clipped.value.to_f64();
        totals.high_clipped[sequence] += clip_share * value.high_clipped.value.to_f64();
    }
}

/// weight * derivative, where a weight of 0 wins over an infinite derivative.
fn weighted<R: Scalar>(weight: f64, derivative: R) -> R {
    if weight == 0.0 { R::from_f64(0.0) } else { R::from_f64(weight * derivative.to_f64()) }
}
