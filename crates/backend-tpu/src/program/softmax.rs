//! The softmax in a program: statistics of rows of logits and their gradient, tile by tile.
//!
//! The target stays out of the sums, so that a collapsed softmax keeps its gradient. With M the largest of the other
//! logits of a row, d_j = s (z_j - M), e_j = exp(d_j), S = sum over j != y of e_j, D = sum of e_j d_j:
//!   margin = s (M - z_y) + ln S,  log p_y = -softplus(margin),  q = 1 - p_y = -expm1(log p_y),
//!   p_j = e_j q / S,  entropy = -p_y log p_y - q log q + q (ln S - D / S).
//! z are logits after their transform ([`super::transform`]); s, the factor of a row, is what its temperature makes of 1.
//!
//! Legend: R rows, W columns of a tile.

use super::mesh::MeshCoord;
use super::transform::Transform;
use stablehlo::{Dtype, Reducer, TensorType, Value};

/// Below this an exponential counts as 0 (1.6e-38), so that 0 * -inf never appears.
const LOWEST: f64 = -87.0;

/// Logits of rows and columns, and what is done with them: by the compiler ([`Tile`]) or by kernels of our own.
pub(crate) trait Columns {
    /// Statistics of the rows over these columns.
    fn statistics(&self, entropy: bool) -> Statistics;

    /// dL/dz `[R, W]`. Rows of zeros where `live` (predicates `[R]`) does not hold, whatever the logits are.
    fn gradient(&self, row_grad: &RowGrad, live: &Value) -> Value;
}

/// Logits of a tile, with what tells their columns.
pub(crate) struct Tile {
    /// f32 `[R, W]`; widened from what the tile is held in, not yet transformed.
    z: Value,
    transform: Transform,
    /// Predicates `[R, W]`: the target's column.
    is_target: Value,
    /// Predicates `[R, W]`: a column that counts. `None` when all do.
    counts: Option<Value>,
    /// Factor of the transformed logits, `[R]`.
    scale: Value,
}

/// What the temperature of a row multiplies, each `[R]`: by 1/T or by 1.
#[derive(Clone)]
pub(crate) struct Factors {
    /// The factor of logits, before the softmax.
    pub(crate) logits: Value,
    /// The factor of log-probabilities, after the softmax.
    pub(crate) logp: Value,
}

/// Statistics of rows, each `[R]`, relative to `max`.
#[derive(Clone)]
pub(crate) struct Statistics {
    /// M; -inf when the target is alone.
    pub(crate) max: Value,
    /// S, the sum of e_j over the columns but the target.
    pub(crate) sum: Value,
    /// D; `None` when no entropy is asked for.
    pub(crate) dot: Option<Value>,
    /// z_y, the target's logit.
    pub(crate) target: Value,
}

/// What the loss reads of a row, each `[R]`.
pub(crate) struct Row {
    /// Log-probability of the target, before its factor.
    pub(crate) logp: Value,
    /// The entropy in nats; `None` when none is asked for.
    pub(crate) entropy: Option<Value>,
}

/// dL/dz of a row, each `[R]`: e_j (constant + linear d_j), and `target` at the target.
pub(crate) struct RowGrad {
    pub(crate) max: Value,
    pub(crate) constant: Value,
    /// `None` when no derivative of the entropy is asked for.
    pub(crate) linear: Option<Value>,
    pub(crate) target: Value,
}

/// `[R]` to `[R, W]`.
pub(crate) fn spread(row: &Value, like: &Value) -> Value {
    row.broadcast_in_dim(like.shape(), &[0])
}

impl Tile {
    /// `logits`: `[R, W]`. `targets`: i32 `[R]`, -1 where there is none. `first`: index of the first column, an i32
    /// scalar. `limits`: columns that count, from the first to before the last, i32 scalars; `None` when all do. `scale`:
    /// factor of the transformed logits, `[R]`.
    pub(crate) fn new(
        logits: &Value,
        transform: Transform,
        targets: &Value,
        first: &Value,
        limits: Option<(&Value, &Value)>,
        scale: &Value,
    ) -> Self {
        let f = logits.builder();
        let shape = TensorType::new(Dtype::I32, logits.shape());
        let column = f.iota(1, shape) + first.broadcast_in_dim(logits.shape(), &[]);
        let all = |bound: &Value| bound.broadcast_in_dim(logits.shape(), &[]);
        let counts = limits.map(|(low, high)| column.ge(&all(low)) & column.lt(&all(high)));
        let (z, is_target) = (logits.convert(Dtype::F32), column.eq(&spread(targets, &column)));
        Self { z, transform, is_target, counts, scale: scale.clone() }
    }

    /// `z` where `here` holds and the column counts, -inf elsewhere.
    fn only(&self, z: &Value, here: &Value) -> Value {
        let least = z.like(f64::NEG_INFINITY);
        let z = here.select(z, &least);
        self.counts.as_ref().map_or(z.clone(), |counts| counts.select(&z, &least))
    }

    /// (d_j, e_j) relative to `max`, finite where the logits are; e_j is 0 at the target and where a column does not count.
    fn exponentials(&self, z: &Value, max: &Value) -> (Value, Value) {
        // A tile of -inf only: any finite number keeps the differences at -inf.
        let max = max.eq(&max.like(f64::NEG_INFINITY)).select(&max.like(0.0), max);
        let d = (z - spread(&max, z)) * spread(&self.scale, z);
        let zero = z.like(0.0);
        let lowest = z.like(LOWEST);
        let mut gone = &d.lt(&lowest) | &self.is_target;
        if let Some(counts) = &self.counts {
            gone = gone | !counts;
        }
        let e = gone.select(&zero, &d.exp());
        // At most 0 but at the target, where it may be infinite.
        (d.max(&lowest).min(&zero), e)
    }
}

impl Columns for Tile {
    fn statistics(&self, entropy: bool) -> Statistics {
        // Two passes: the maximum alone, which a compiler may make while it makes the logits, then everything else.
        let z = self.transform.apply(&self.z);
        let max = self.only(&z, &!&self.is_target).reduce(Reducer::Max, &[1]);
        let (d, e) = self.exponentials(&z, &max);
        let target = self.only(&z, &self.is_target);
        // At the target e is 0, whatever d is.
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

impl RowGrad {
    /// The `n` rows from `start` on (an i32 scalar).
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
    /// Statistics of no columns at all, for rows like `like`.
    pub(crate) fn empty(like: &Value, entropy: bool) -> Self {
        let least = like.like(f64::NEG_INFINITY);
        let zero = like.like(0.0);
        Self { max: least.clone(), sum: zero.clone(), dot: entropy.then_some(zero), target: least }
    }

    /// The same statistics relative to `max`, a logit that is at least as large.
    fn relative_to(&self, max: &Value, scale: &Value) -> Self {
        let least = max.like(f64::NEG_INFINITY);
        // -inf - -inf must not appear; nothing was summed then.
        let base = max.eq(&least).select(&max.like(0.0), max);
        let shift = ((&self.max - base) * scale).max(&max.like(LOWEST));
        let factor = self.max.eq(&least).select(&max.like(0.0), &shift.exp());
        let dot = self.dot.as_ref().map(|dot| &factor * (dot + &self.sum * &shift));
        Self { max: max.clone(), sum: factor * &self.sum, dot, target: self.target.clone() }
    }

    /// Statistics of the columns of both.
    pub(crate) fn merge(&self, other: &Self, scale: &Value) -> Self {
        let max = self.max.max(&other.max);
        let (a, b) = (self.relative_to(&max, scale), other.relative_to(&max, scale));
        let dot = a.dot.zip(b.dot).map(|(a, b)| a + b);
        Self { max, sum: a.sum + b.sum, dot, target: a.target.max(&b.target) }
    }

    /// Statistics of the columns of all devices that hold these rows.
    pub(crate) fn over_vocab(&self, coord: &MeshCoord, scale: &Value) -> Self {
        if coord.is_whole_vocab() {
            return self.clone();
        }
        let part = self.relative_to(&coord.over_vocab(&self.max, Reducer::Max), scale);
        Self {
            sum: coord.over_vocab(&part.sum, Reducer::Add),
            dot: part.dot.map(|dot| coord.over_vocab(&dot, Reducer::Add)),
            target: coord.over_vocab(&part.target, Reducer::Max),
            max: part.max,
        }
    }

    /// The statistics as a list, to be carried through a loop.
    pub(crate) fn to_list(&self) -> Vec<Value> {
        [&self.max, &self.sum, &self.target].into_iter().chain(&self.dot).cloned().collect()
    }

    /// The inverse of [`Statistics::to_list`].
    pub(crate) fn from_list(list: &[Value]) -> Self {
        let [max, sum, target] = [0, 1, 2].map(|i| list[i].clone());
        Self { max, sum, dot: list.get(3).cloned(), target }
    }

    /// Log-probability and entropy of every row.
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

    /// `dlogp`, `dentropy`: dL/dlogp and dL/dentropy, `[R]`.
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
            // 0 * inf must not appear: a probability of 0 has no part in the entropy.
            let by_entropy = p.eq(&zero).select(&zero, &(e * &p * (&row.logp + entropy)));
            target = target - by_entropy;
            linear = Some(-(s * &weight * e));
        }
        // A barrier, or statistics and gradient share their exponentials: for B200, XLA keeps those of a tile in f32.
        let max = self.max.builder().optimization_barrier(&[&self.max]).swap_remove(0);
        RowGrad { max, constant: -(s * &weight * by_logp), linear, target: s * target }
    }

    fn margin(&self, scale: &Value) -> Value {
        // An infinite target is infinity over infinity, and not a probability of 1.
        let is_infinite = self.target.eq(&self.target.like(f64::INFINITY));
        let target = is_infinite.select(&self.target.like(f64::NAN), &self.target);
        (&self.max - target) * scale + self.sum.log()
    }
}

/// ln(1 + e^x) without overflow; NaN stays NaN.
fn softplus(x: &Value) -> Value {
    x.max(&x.like(0.0)) + (-x.abs()).exp().log1p()
}
