//! The softmax in a program: statistics of rows of logits and their gradient, by tiles.
//!
//! The target is excluded from the sums, so that a collapsed softmax keeps its gradient. With M the maximum of the
//! other logits of a row, d_j = s (z_j - M), e_j = exp(d_j), S = sum over j != y of e_j, D = sum of e_j d_j:
//!   margin = s (M - z_y) + ln S,  log p_y = -softplus(margin),  q = 1 - p_y = -expm1(log p_y),
//!   p_j = e_j q / S,  entropy = -p_y log p_y - q log q + q (ln S - D / S).
//! z are transformed logits ([`super::transform`]); s is the factor of a row, from its temperature.
//!
//! Legend: R rows, W columns of a tile.

use super::transform::Transform;
use grpo_stablehlo::{Dtype, Reducer, TensorType, Value};

/// For smaller exponents, the exponential counts as 0 (1.6e-38), so that 0 * -inf never occurs.
const LOWEST: f64 = -87.0;

/// Rows and columns of logits, processed by plain operations ([`Tile`]) or by Mosaic kernels.
pub(crate) trait Columns {
    /// Computes the statistics of the rows over these columns.
    fn statistics(&self, entropy: bool) -> Statistics;

    /// Computes dL/dz `[R, W]`. Rows are zeros where `live` (predicates `[R]`) is false, for any logits.
    fn gradient(&self, row_grad: &RowGrad, live: &Value) -> Value;
}

/// The logits of a tile, and the roles of its columns.
pub(crate) struct Tile {
    /// f32 `[R, W]`, widened from the stored dtype, before the transform.
    z: Value,
    transform: Transform,
    /// Predicates `[R, W]`: the target's column.
    is_target: Value,
    /// Predicates `[R, W]`: columns of the vocabulary that the sampler kept; `None` if there are no others.
    counts: Option<Value>,
    /// The factor of the transformed logits, `[R]`.
    scale: Value,
}

/// The vocabulary entries of the columns of a tile.
pub(crate) struct Entries {
    /// i32 `[R, W]`: the index in the vocabulary.
    pub(crate) index: Value,
    /// Predicates `[R, W]`: entries of the vocabulary that the sampler kept and no other tile counts; `None` if all are.
    pub(crate) counts: Option<Value>,
}

impl Entries {
    /// Returns the entries of `logits` `[R, V]` of the whole vocabulary; from `end` on they are padding.
    pub(crate) fn all(logits: &Value, end: Option<usize>) -> Self {
        let index = logits.builder().iota(1, TensorType::new(Dtype::I32, logits.shape()));
        let counts = end.map(|end| index.lt(&index.like(end as i64)));
        Self { index, counts }
    }

    /// Restricts the entries to the ids of the sampling mask `kept` `[R, W]`, predicates, if there is one.
    pub(crate) fn only(self, kept: Option<Value>) -> Self {
        let counts = match (self.counts, kept) {
            (Some(counts), Some(kept)) => Some(counts & kept),
            (counts, kept) => counts.or(kept),
        };
        Self { counts, ..self }
    }
}

/// The effect of a row's temperature: 1/T multiplies either logits or log-probabilities. Each is `[R]`.
#[derive(Clone, Debug)]
pub struct Factors {
    /// The factor of logits, before the softmax.
    pub logits: Value,
    /// The factor of log-probabilities, after the softmax.
    pub logp: Value,
}

/// Statistics of rows, each `[R]`, relative to `max`.
#[derive(Clone)]
pub(crate) struct Statistics {
    /// M; -inf if there is no other column than the target.
    pub(crate) max: Value,
    /// S, the sum of e_j over all columns except for the target.
    pub(crate) sum: Value,
    /// D; `None` if no entropy is requested.
    pub(crate) dot: Option<Value>,
    /// z_y, the target's logit.
    pub(crate) target: Value,
}

/// The numbers of a row for the loss, each `[R]`.
pub(crate) struct Row {
    /// The log-probability of the target, before its factor.
    pub(crate) logp: Value,
    /// The entropy in nats; `None` if it is not requested.
    pub(crate) entropy: Option<Value>,
}

/// The coefficients of dL/dz of a row, each `[R]`: e_j (constant + linear d_j), and `target` at the target.
pub(crate) struct RowGrad {
    pub(crate) max: Value,
    pub(crate) constant: Value,
    /// `None` if the entropy needs no derivative.
    pub(crate) linear: Option<Value>,
    pub(crate) target: Value,
}

/// Broadcasts `[R]` to `[R, W]`.
pub(crate) fn spread(row: &Value, like: &Value) -> Value {
    row.broadcast_in_dim(like.shape(), &[0])
}

impl Tile {
    /// `logits` are `[R, W]`, and `entries` are their columns; `targets` are i32 `[R]`, -1 if there is none; `scale` is
    /// the factor of the transformed logits, `[R]`.
    pub(crate) fn new(
        logits: &Value,
        transform: Transform,
        targets: &Value,
        Entries { index, counts }: Entries,
        scale: &Value,
    ) -> Self {
        let (z, is_target) = (logits.convert(Dtype::F32), index.eq(&spread(targets, &index)));
        Self { z, transform, is_target, counts, scale: scale.clone() }
    }

    /// Returns `z` at columns of the vocabulary where `condition` holds, and -inf elsewhere.
    fn only(&self, z: &Value, condition: &Value) -> Value {
        let least = z.like(f64::NEG_INFINITY);
        let z = condition.select(z, &least);
        self.counts.as_ref().map_or(z.clone(), |counts| counts.select(&z, &least))
    }

    /// Returns (d_j, e_j) relative to `max`, finite for finite logits; e_j is 0 at the target and outside of the
    /// vocabulary.
    fn exponentials(&self, z: &Value, max: &Value) -> (Value, Value) {
        // If all logits are -inf, any finite number keeps the differences at -inf.
        let max = max.eq(&max.like(f64::NEG_INFINITY)).select(&max.like(0.0), max);
        let d = (z - spread(&max, z)) * spread(&self.scale, z);
        let zero = z.like(0.0);
        let lowest = z.like(LOWEST);
        let mut is_zero = &d.lt(&lowest) | &self.is_target;
        if let Some(counts) = &self.counts {
            is_zero = is_zero | !counts;
        }
        let e = is_zero.select(&zero, &d.exp());
        // d is at most 0, except at the target, where it may be infinite.
        (d.max(&lowest).min(&zero), e)
    }
}

impl Columns for Tile {
    fn statistics(&self, entropy: bool) -> Statistics {
        // Two passes: first the maximum, which the compiler may fuse into the product, then the rest.
        let z = self.transform.apply(&self.z);
        let max = self.only(&z, &!&self.is_target).reduce(Reducer::Max, &[1]);
        let (d, e) = self.exponentials(&z, &max);
        let target = self.only(&z, &self.is_target);
        // At the target, e is 0 for any d.
        let ed = entropy.then(|| &e * d);
        let mut operands = vec![(&target, Reducer::Max), (&e, Reducer::Add)];
        operands.extend(ed.as_ref().map(|ed| (ed, Reducer::Add)));
        let mut rows = z.builder().reduce(&operands, &[1]);
        let dot = entropy.then(|| rows.remove(2));
        let sum = rows.remove(1);
        Statistics { max, sum, dot, target: rows.remove(0) }
    }

    fn gradient(&self, row_grad: &RowGrad, live: &Value) -> Value {
        let z = self.transform.apply_again(&self.z);
        let (d, e) = self.exponentials(&z, &row_grad.max);
        let spread = |row: &Value| spread(row, &z);
        let factor = match &row_grad.linear {
            Some(linear) => spread(&row_grad.constant) + spread(linear) * d,
            None => spread(&row_grad.constant),
        };
        let mut at_target = self.is_target.clone();
        if let Some(counts) = &self.counts {
            at_target = at_target & counts;
        }
        let gradient = at_target.select(&spread(&row_grad.target), &(e * factor));
        spread(live).select(&self.transform.pull_back(&z, gradient), &z.like(0.0))
    }
}

impl Row {
    /// Returns log-probabilities and entropies for the loss: 0 where `active` is false, and without a requested entropy.
    pub(crate) fn scores(&self, active: &Value, factors: &Factors) -> (Value, Value) {
        let zero = self.logp.like(0.0);
        let logp = active.select(&(&self.logp * &factors.logp), &zero);
        (logp, self.entropy.as_ref().map_or(zero.clone(), |entropy| active.select(entropy, &zero)))
    }
}

impl RowGrad {
    /// Returns `n` rows from `start` (an i32 scalar).
    pub(crate) fn chunk(&self, start: &Value, n: usize) -> Self {
        let take = |row: &Value| row.dynamic_slice(&[start], &[n]);
        Self {
            max: take(&self.max),
            constant: take(&self.constant),
            linear: self.linear.as_ref().map(take),
            target: take(&self.target),
        }
    }
}

impl Statistics {
    /// Returns the statistics of no columns, for rows like `like`.
    pub(crate) fn empty(like: &Value, entropy: bool) -> Self {
        let least = like.like(f64::NEG_INFINITY);
        let zero = like.like(0.0);
        Self { max: least.clone(), sum: zero.clone(), dot: entropy.then_some(zero), target: least }
    }

    /// Rescales the statistics to `max`, a logit that is at least as large.
    fn relative_to(&self, max: &Value, scale: &Value) -> Self {
        let least = max.like(f64::NEG_INFINITY);
        // Avoids -inf - -inf; the sums are then empty.
        let base = max.eq(&least).select(&max.like(0.0), max);
        let shift = ((&self.max - base) * scale).max(&max.like(LOWEST));
        let factor = self.max.eq(&least).select(&max.like(0.0), &shift.exp());
        let dot = self.dot.as_ref().map(|dot| &factor * (dot + &self.sum * &shift));
        Self { max: max.clone(), sum: factor * &self.sum, dot, target: self.target.clone() }
    }

    /// Merges the statistics of two sets of columns.
    pub(crate) fn merge(&self, other: &Self, scale: &Value) -> Self {
        let max = self.max.max(&other.max);
        let (a, b) = (self.relative_to(&max, scale), other.relative_to(&max, scale));
        let dot = a.dot.zip(b.dot).map(|(a, b)| a + b);
        Self { max, sum: a.sum + b.sum, dot, target: a.target.max(&b.target) }
    }

    /// Returns the statistics as a list, for the carried values of a loop.
    pub(crate) fn to_list(&self) -> Vec<Value> {
        [&self.max, &self.sum, &self.target].into_iter().chain(&self.dot).cloned().collect()
    }

    /// Inverts [`Statistics::to_list`].
    pub(crate) fn from_list(list: &[Value]) -> Self {
        let [max, sum, target] = [0, 1, 2].map(|i| list[i].clone());
        Self { max, sum, dot: list.get(3).cloned(), target }
    }

    /// Computes log-probability and entropy of every row.
    pub(crate) fn row(&self, scale: &Value) -> Row {
        let zero = self.sum.like(0.0);
        let margin = self.margin(scale);
        let logp = -softplus(&margin);
        let entropy = self.dot.as_ref().map(|dot| {
            let others = -logp.expm1();
            let empty = self.sum.eq(&zero);
            let spread = empty.select(&zero, &(self.sum.log() - dot / &self.sum));
            let part = |p: &Value, log_p: &Value| p.eq(&zero).select(&zero, &-(p * log_p));
            let log_others = -softplus(&-&margin);
            part(&logp.exp(), &logp) + part(&others, &log_others) + others * spread
        });
        Row { logp, entropy }
    }

    /// Computes the coefficients of dL/dz from dL/dlogp and dL/dentropy, `[R]`.
    pub(crate) fn row_grad(&self, row: &Row, factors: &Factors, dlogp: &Value, dentropy: Option<&Value>) -> RowGrad {
        let zero = self.sum.like(0.0);
        let others = -row.logp.expm1();
        let weight = self.sum.eq(&zero).select(&zero, &(&others / &self.sum));
        let (g, s) = (dlogp * &factors.logp, &factors.logits);
        let (mut by_logp, mut target) = (g.clone(), &g * &others);
        let mut linear = None;
        if let (Some(e), Some(entropy)) = (dentropy, &row.entropy) {
            let log_weight = weight.gt(&zero).select(&weight.log(), &zero);
            by_logp = by_logp + e * (log_weight + entropy);
            let p = row.logp.exp();
            // Avoids 0 * inf: a probability of 0 does not contribute to the entropy.
            let by_entropy = p.eq(&zero).select(&zero, &(e * &p * (&row.logp + entropy)));
            target = target - by_entropy;
            linear = Some(-(s * &weight * e));
        }
        // Without the barrier, XLA for B200 keeps a tile of f32 exponentials of the statistics for the gradient.
        let max = self.max.builder().optimization_barrier(&[&self.max]).swap_remove(0);
        RowGrad { max, constant: -(s * &weight * by_logp), linear, target: s * target }
    }

    fn margin(&self, scale: &Value) -> Value {
        // With an infinite target, the probability is infinity over infinity: NaN, not 1.
        let is_infinite = self.target.eq(&self.target.like(f64::INFINITY));
        let target = is_infinite.select(&self.target.like(f64::NAN), &self.target);
        (&self.max - target) * scale + self.sum.log()
    }
}

/// Computes ln(1 + e^x) without overflow; NaN stays NaN.
fn softplus(x: &Value) -> Value {
    x.max(&x.like(0.0)) + (-x.abs()).exp().log1p()
}
