//! The statistics of a row, merged from its tiles, and its gradient with respect to logp and entropy.

use super::gradient::RowGrad;
use super::partial::Partial;
use super::scales::Scales;

/// The sums of a row over the tiles so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowSums {
    max: f32,
    sum: f64,
    dot: f64,
    target: f32,
}

impl RowSums {
    pub(crate) const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0, dot: 0.0, target: f32::NEG_INFINITY };

    /// Adds the next tile to the right.
    pub(crate) fn merge(&mut self, tile: &Partial, holds_target: bool, scale: f32) {
        if holds_target {
            self.target = tile.target;
        }
        let (sum, dot) = (f64::from(tile.sum), f64::from(tile.dot));
        if tile.max == f32::NEG_INFINITY {
            // Without a finite entry, the sum is 0 or NaN.
            self.sum += sum;
            return;
        }
        if self.max == f32::NEG_INFINITY {
            (self.max, self.sum, self.dot) = (tile.max, self.sum + sum, dot);
            return;
        }
        let shift = f64::from(scale) * (f64::from(tile.max) - f64::from(self.max));
        let factor = (-shift.abs()).exp();
        if shift > 0.0 {
            self.dot = factor * (self.dot - self.sum * shift) + dot;
            self.sum = factor * self.sum + sum;
            self.max = tile.max;
        } else {
            self.dot += factor * (dot + sum * shift);
            self.sum += factor * sum;
        }
    }

    /// Returns the statistics of the row after all tiles have been merged.
    pub(crate) fn finish(&self, scale: f32) -> Row {
        let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
        // With an infinite target, the probability is infinity over infinity: NaN, not 1.
        let target = if self.target == f32::INFINITY { f64::NAN } else { self.target.into() };
        let margin = f64::from(scale) * (f64::from(self.max) - target) + self.sum.ln();
        // f64::max would drop a NaN.
        let logp = if margin.is_nan() { margin } else { -softplus(margin) };
        let others = -logp.exp_m1();
        let spread = if self.sum == 0.0 { 0.0 } else { self.sum.ln() - self.dot / self.sum };
        let part = |p: f64, log_p: f64| if p == 0.0 { 0.0 } else { -p * log_p };
        let entropy = part(logp.exp(), logp) + part(others, -softplus(-margin)) + others * spread;
        Row { max: self.max, weight: if self.sum == 0.0 { 0.0 } else { others / self.sum }, others, logp, entropy }
    }
}

/// The statistics of a row.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Row {
    max: f32,
    /// q / S: p_j = e_j weight for every j except for the target.
    weight: f64,
    /// q = 1 - p_y.
    pub(super) others: f64,
    /// log p_y, before logp_scale.
    pub(crate) logp: f64,
    pub(crate) entropy: f64,
}

impl Row {
    /// Computes the gradient's coefficients from dL/dlogp and dL/dentropy of the row.
    pub(crate) fn row_grad(&self, scales: &Scales, dlogp: f64, dentropy: f64) -> RowGrad {
        let (g, e, s) = (dlogp * scales.logp, dentropy, f64::from(scales.logit));
        let log_weight = if self.weight > 0.0 { self.weight.ln() } else { 0.0 };
        // Avoids 0 * inf: a probability of 0 does not contribute to the entropy.
        let p = self.logp.exp();
        let by_entropy = if p == 0.0 || e == 0.0 { 0.0 } else { e * p * (self.logp + self.entropy) };
        RowGrad {
            max: if self.max == f32::NEG_INFINITY { 0.0 } else { self.max },
            constant: (-s * self.weight * (g + e * (log_weight + self.entropy))) as f32,
            linear: (-s * self.weight * e) as f32,
            target: (s * (g * self.others - by_entropy)) as f32,
        }
    }
}
