//! Row statistics of logits and their gradient, shared by every implementation but the reference.
//!
//! Avoids a second copy of the softmax math, and numbers that depend on how the work was cut: a row is always summed in
//! tiles of [`TILE`] entries, merged from left to right in f64, so its bits are those of the row alone.
//!
//! The target stays out of the sums. With M the largest of the other logits, d_j = logit_scale (z_j - M), e_j = exp(d_j)
//! and S = sum over j != y of e_j:
//!   margin = logit_scale (M - z_y) + ln S,  log p_y = -softplus(margin),  q = 1 - p_y = -expm1(log p_y),
//!   p_j = e_j q / S,  entropy = -p_y log p_y - q log q + q (ln S - sum e_j d_j / S).
//! Nothing cancels, however collapsed the distribution is, and differences of logits are taken before they are scaled.

use crate::convert::rounded;
use crate::isa::{MulAdd, instantiate};

/// Vocabulary entries that are summed in f32 before they join the row's f64 sums.
pub(crate) const TILE: usize = 512;

/// Elements that are handled side by side: a register of AVX-512, or two or four of less.
const LANES: usize = 16;
/// Where exp's argument is held: e^x is 0 there, and the products with it are finite.
const LOWEST: f32 = -88.0;

/// (max(x, LOWEST), e^x) for x <= 0, within 2 units in the last place; e^x is 0 below -126.5 ln 2. NaN stays NaN.
#[inline(always)]
fn exp<M: MulAdd>(x: f32) -> (f32, f32) {
    const LN2_HIGH: f32 = 0.693_359_4; // 10 bits: n * LN2_HIGH is exact
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits; 127 more, and they are the exponent of 2^n.
    const SHIFT: f32 = 12_582_912.0 + 127.0;
    // In this order a NaN is kept, and it is one instruction.
    let x = if LOWEST > x { LOWEST } else { x };
    let shifted = M::mul_add(x, std::f32::consts::LOG2_E, SHIFT);
    let n = shifted - SHIFT;
    let r = M::mul_add(n, -LN2_LOW, M::mul_add(n, -LN2_HIGH, x));
    // Minimax polynomial of Cephes' expf on [-ln 2 / 2, ln 2 / 2].
    let mut p = 1.987_569_1e-4;
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5, 1.0, 1.0] {
        p = M::mul_add(p, r, c);
    }
    // 0 for n = -127, without a comparison.
    (x, p * f32::from_bits(shifted.to_bits() << 23))
}

/// What one tile adds to a row.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Partial {
    /// Largest logit but the target's; -inf when there is none.
    max: f32,
    /// Sum over j != y of e_j, relative to `max`.
    sum: f32,
    /// Sum over j != y of e_j d_j, relative to `max`.
    dot: f32,
    /// The target's logit, in the tile that holds it.
    target: f32,
}

impl Partial {
    instantiate! {
        /// `z`: at most [`TILE`] logits, of which `target` is left out.
        pub(crate) fn new(z: &[f32], target: Option<usize>, scale: f32) -> Partial = partial
    }
}

#[inline(always)]
fn partial<M: MulAdd>(z: &[f32], target: Option<usize>, scale: f32) -> Partial {
    let mut others = [f32::NEG_INFINITY; TILE];
    let (z, target) = match target {
        None => (z, 0.0),
        Some(y) => {
            let others = &mut others[..z.len()];
            others.copy_from_slice(z);
            others[y] = f32::NEG_INFINITY;
            (&*others, z[y])
        }
    };
    let (chunks, rest) = z.as_chunks::<LANES>();
    let mut last = [f32::NEG_INFINITY; LANES];
    last[..rest.len()].copy_from_slice(rest);

    // NaN does not count here, but in the sums.
    let mut max = last;
    for chunk in chunks {
        for l in 0..LANES {
            max[l] = if chunk[l] > max[l] { chunk[l] } else { max[l] };
        }
    }
    let max = max.into_iter().fold(f32::NEG_INFINITY, f32::max);
    // A tile of -inf only: any finite number keeps the differences at -inf.
    let from = if max == f32::NEG_INFINITY { 0.0 } else { max };

    let (mut sum, mut dot) = ([0.0_f32; LANES], [0.0_f32; LANES]);
    for chunk in chunks.iter().chain(std::slice::from_ref(&last)) {
        for l in 0..LANES {
            let (d, e) = exp::<M>((chunk[l] - from) * scale);
            sum[l] += e;
            dot[l] = M::mul_add(e, d, dot[l]);
        }
    }
    Partial { max, sum: sum.iter().sum(), dot: dot.iter().sum(), target }
}

/// The sums of a row so far.
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
            // No finite entry: the sum is 0, or NaN.
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

    pub(crate) fn finish(&self, scale: f32) -> Row {
        let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
        let margin = f64::from(scale) * (f64::from(self.max) - f64::from(self.target)) + self.sum.ln();
        // f64::max would swallow a NaN.
        let logp = if margin.is_nan() { margin } else { -softplus(margin) };
        let others = -logp.exp_m1();
        let spread = if self.sum == 0.0 { 0.0 } else { self.sum.ln() - self.dot / self.sum };
        let part = |p: f64, log_p: f64| if p == 0.0 { 0.0 } else { -p * log_p };
        let entropy = part(logp.exp(), logp) + part(others, -softplus(-margin)) + others * spread;
        Row { max: self.max, weight: if self.sum == 0.0 { 0.0 } else { others / self.sum }, others, logp, entropy }
    }
}

/// Statistics of a row.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Row {
    max: f32,
    /// q / S: p_j = e_j weight for every j but the target.
    weight: f64,
    /// q = 1 - p_y.
    others: f64,
    /// log p_y, before logp_scale.
    pub(crate) logp: f64,
    pub(crate) entropy: f64,
}

/// dL/dz of a row as a function of d_j and e_j.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Slope {
    max: f32,
    /// dL/dz_j = e_j (constant + linear d_j).
    constant: f32,
    linear: f32,
    /// dL/dz_y.
    target: f32,
}

impl Row {
    /// `dlogp`, `dentropy`: dL/dlogp and dL/dentropy of the row.
    pub(crate) fn slope(&self, scales: &Scales, dlogp: f64, dentropy: f64) -> Slope {
        let (g, e, s) = (dlogp * scales.logp, dentropy, f64::from(scales.logit));
        let log_weight = if self.weight > 0.0 { self.weight.ln() } else { 0.0 };
        // 0 * inf must not appear: a probability of 0 has no part in the entropy.
        let p = self.logp.exp();
        let by_entropy = if p == 0.0 || e == 0.0 { 0.0 } else { e * p * (self.logp + self.entropy) };
        Slope {
            max: if self.max == f32::NEG_INFINITY { 0.0 } else { self.max },
            constant: (-s * self.weight * (g + e * (log_weight + self.entropy))) as f32,
            linear: (-s * self.weight * e) as f32,
            target: (s * (g * self.others - by_entropy)) as f32,
        }
    }
}

/// What the temperature multiplies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scales {
    /// Logits before the softmax.
    pub(crate) logit: f32,
    /// Log-probabilities after it.
    pub(crate) logp: f64,
}

impl Scales {
    pub(crate) fn new(loss: &grpo_core::LossConfig) -> Self {
        Self { logit: loss.logit_scale() as f32, logp: loss.logp_scale() }
    }
}

instantiate! {
    /// Overwrites logits with dL/dlogits. `target`: index of the target if it is among them.
    pub(crate) fn gradient(z: &mut [f32], target: Option<usize>, slope: &Slope, scale: f32) = gradient_in_place
}

instantiate! {
    /// Writes dL/dlogits of `z` to `out`, of the same length; rounded to the nearest bf16 value if `round`.
    pub(crate) fn gradient_to(z: &[f32], target: Option<usize>, slope: &Slope, scale: f32, out: &mut [f32], round: bool)
        = gradient_elsewhere
}

/// dL/dz of one logit that is not the target.
#[inline(always)]
fn derivative<M: MulAdd>(z: f32, slope: &Slope, scale: f32) -> f32 {
    let (d, e) = exp::<M>((z - slope.max) * scale);
    e * M::mul_add(slope.linear, d, slope.constant)
}

#[inline(always)]
fn gradient_in_place<M: MulAdd>(z: &mut [f32], target: Option<usize>, slope: &Slope, scale: f32) {
    for z in z.iter_mut() {
        *z = derivative::<M>(*z, slope, scale);
    }
    // It may lie far above the others, where exp is not made for, so what was made of it is of no use.
    if let Some(y) = target {
        z[y] = slope.target;
    }
}

#[inline(always)]
fn gradient_elsewhere<M: MulAdd>(
    z: &[f32],
    target: Option<usize>,
    slope: &Slope,
    scale: f32,
    out: &mut [f32],
    round: bool,
) {
    for (out, z) in out.iter_mut().zip(z) {
        *out = derivative::<M>(*z, slope, scale);
    }
    if let Some(y) = target {
        out[y] = slope.target;
    }
    if round {
        out.iter_mut().for_each(|out| *out = rounded(*out));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_exp<M: MulAdd>() {
        let mut worst = (0.0, 0.0);
        // Every 61st float from -0.0 down to LOWEST, and all near the ends of the reduction.
        let mut bits = (-1e-30_f32).to_bits();
        while f32::from_bits(bits) >= -87.3 {
            let x = f32::from_bits(bits);
            let exact = f64::from(x).exp();
            let unit = f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
            let error = (f64::from(exp::<M>(x).1) - exact).abs() / unit;
            worst = if error > worst.0 { (error, x) } else { worst };
            bits += 61;
        }
        assert!(worst.0 <= 2.0, "{} units in the last place at {}", worst.0, worst.1);
        let values = [0.0, -0.0, -87.7, -1e30, f32::NEG_INFINITY].map(|x| exp::<M>(x).1);
        assert_eq!(values, [1.0, 1.0, 0.0, 0.0, 0.0]);
        assert!(exp::<M>(f32::NAN).1.is_nan());
    }

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        check_exp::<crate::isa::Fused>();
        check_exp::<crate::isa::Separate>();
    }

    fn level() -> crate::isa::Level {
        crate::Isa::detect().checked().unwrap()
    }

    fn row(z: &[f32], y: usize, scale: f32, tile: usize) -> Row {
        let mut sums = RowSums::EMPTY;
        for (i, part) in z.chunks(tile).enumerate() {
            let target = y.checked_sub(i * tile).filter(|y| *y < part.len());
            sums.merge(&Partial::new(level(), part, target, scale), target.is_some(), scale);
        }
        sums.finish(scale)
    }

    #[test]
    fn extreme_rows_stay_finite_and_keep_their_gradient() {
        // 30 nats above the rest: f32 `1 - p` would be 0.
        let collapsed = row(&[30.0, 0.0, 0.0], 0, 1.0, 2);
        let rest = 2.0 * (-30.0_f64).exp();
        assert!((collapsed.logp / -rest - 1.0).abs() < 1e-6, "{collapsed:?}");
        assert!((collapsed.others / rest - 1.0).abs() < 1e-6, "{collapsed:?}");
        for z in [[1e4, -1e4, 0.0], [3e38, -3e38, 3e38], [f32::NEG_INFINITY, 2.0, 1.0], [f32::MIN; 3]] {
            for tile in [1, 3] {
                let mut z = z;
                let row = row(&z, 2, 1.0, tile);
                assert!(row.logp.is_finite() && row.entropy.is_finite() && row.entropy >= 0.0, "{z:?}: {row:?}");
                let scales = Scales { logit: 1.0, logp: 1.0 };
                gradient(level(), &mut z, Some(2), &row.slope(&scales, 1.0, 1.0), 1.0);
                assert!(z.iter().all(|z| z.is_finite()), "{z:?}");
                assert!(z.iter().sum::<f32>().abs() < 1e-6, "{z:?}");
            }
        }
        let alone = row(&[7.0], 0, 1.0, 1);
        assert_eq!((alone.logp, alone.entropy, alone.others), (0.0, 0.0, 0.0));
        let nan = row(&[f32::NAN, 1.0, 2.0], 2, 1.0, 1);
        assert!(nan.logp.is_nan(), "a NaN must not be hidden: {nan:?}");
    }
}
