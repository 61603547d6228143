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
use crate::objective::{TokenInputs, TokenLoss, sequence_slope, token_slope};
use crate::real::{Dual, Scalar};
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

/// What a pass over a batch adds up, wherever it was added up: on the host ([`Totals`]) or on a device
/// ([`crate::vectors`]). Micro-batches and devices merge by sum, minimum and maximum.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sums {
    /// Of weight x token loss, entropy bonus included.
    pub loss: f64,
    /// Of the KL term over active tokens.
    pub kl: f64,
    /// Of the entropy over active tokens, in nats.
    pub entropy: f64,
    /// Of tokens clipped below; of sequences where the clip is a sequence's ([`Evaluator::shares_clip`]).
    pub low_clipped: f64,
    /// The same above.
    pub high_clipped: f64,
    /// Smallest share of a sequence's active tokens that is clipped below; infinite without active tokens.
    pub low_min: f64,
    /// Largest share that is clipped above; minus infinity without active tokens.
    pub high_max: f64,
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
        let (mut low_min, mut high_max) = (f64::INFINITY, f64::NEG_INFINITY);
        for sequence in (0..self.batch.sequences()).filter(|s| self.length(*s) > 0) {
            let length = if self.shares_clip() { 1.0 } else { self.length(sequence) as f64 };
            low_min = low_min.min(totals.low_clipped[sequence] / length);
            high_max = high_max.max(totals.high_clipped[sequence] / length);
        }
        let sums = Sums {
            loss: totals.loss,
            kl: totals.kl,
            entropy: totals.entropy,
            low_clipped: totals.low_clipped.iter().sum(),
            high_clipped: totals.high_clipped.iter().sum(),
            low_min,
            high_max,
        };
        (sums.loss, self.metrics(&sums))
    }

    /// TRL's metrics from what was added up.
    pub fn metrics(&self, sums: &Sums) -> Metrics {
        let tokens = self.batch.active_tokens() as f64;
        let mut metrics = Metrics::default();
        metrics.mean("entropy", sums.entropy, tokens);
        if self.config.beta != 0.0 {
            metrics.mean("kl", sums.kl, tokens);
        }
        // A shared ratio is one value per sequence, so it counts once; per-token values are weighted by token.
        let count = if self.shares_clip() { self.batch.sequences() as f64 } else { tokens };
        if self.config.loss_type == LossType::Cispo {
            metrics.mean("cispo_clip_ratio", sums.high_clipped, count);
        } else {
            metrics.mean("clip_ratio/low_mean", sums.low_clipped, count);
            metrics.mean("clip_ratio/high_mean", sums.high_clipped, count);
            metrics.mean("clip_ratio/region_mean", sums.low_clipped + sums.high_clipped, count);
            // A fully masked sequence has a shared ratio too: 1, which no bound clips.
            let masked = self.shares_clip() && (0..self.batch.sequences()).any(|s| self.length(s) == 0);
            if masked || sums.low_min.is_finite() {
                metrics.min("clip_ratio/low_min", if masked { 0.0 } else { sums.low_min });
                metrics.max("clip_ratio/high_max", if masked { sums.high_max.max(0.0) } else { sums.high_max });
            }
        }
        metrics
    }

    /// Per-token weights of the step that the batch belongs to.
    pub fn weights(&self) -> &TokenWeights {
        &self.weights
    }

    fn length(&self, sequence: usize) -> usize {
        self.starts[sequence + 1] - self.starts[sequence]
    }

    /// Whether ratio and advantage, and so the clip, are one value for all tokens of a sequence.
    pub fn shares_clip(&self) -> bool {
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
            let old = self.batch.old_logp().map(|old| R::from_f64(old[row].into()));
            let (value, slope) = token_slope(self.config, &self.inputs(sequence, row, logp[i]), old.as_ref());
            let weight = self.weights.policy[row];
            dlogp[i] = weighted(weight, slope);
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
        let clip_share = if self.shares_clip() { 1.0 / length } else { 1.0 };
        let mut through_ratio = 0.0;
        for (i, position) in part.enumerate() {
            let row = self.batch.active_rows()[position];
            let weight = self.weights.policy[row];
            let inputs = self.inputs(sequence, row, logp[i]);
            let (value, slope, of_ratio) = sequence_slope(self.config, &inputs, &log_ratio);
            through_ratio += weighted(weight, of_ratio).to_f64();
            dlogp[i] = weighted(weight, slope);
            self.count(sequence, weight, &value, clip_share, totals);
        }
        let shared = R::from_f64(through_ratio / length);
        for d in dlogp {
            *d = *d + shared;
        }
    }

    fn inputs<R: Scalar>(&self, sequence: usize, row: usize, logp: R) -> TokenInputs<R> {
        TokenInputs {
            logp,
            ref_logp: self.batch.ref_logp().map(|q| R::from_f64(q[row].into())),
            advantage: R::from_f64(self.batch.advantage(sequence, row).into()),
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
