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
//!
//! A tile stays in the first-level cache between its maximum and its sums, while the next one is fetched. Either pass is
//! bound by multiply-adds: 12 per entry forward, 13 backward, conversions from and to bf16 in registers, no branch. Of 32
//! registers the sums take 2, constants 14 and a vector of entries 4.
#![allow(unsafe_code)]

use crate::convert::{Element, rounded};
use crate::isa::{MulAdd, instantiate};
use half::bf16;

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
    // Minimax on [-ln 2 / 2, ln 2 / 2] among those that begin with 1 + r: off by 3e-9 of e^r.
    let mut p = 1.381_454e-3;
    for c in [8.368_745e-3, 4.166_839e-2, 1.666_652_1e-1, 0.499_999_94, 1.0, 1.0] {
        p = M::mul_add(p, r, c);
    }
    // 0 for n = -127, without a comparison.
    (x, p * f32::from_bits(shifted.to_bits() << 23))
}

/// What one tile adds to a row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
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
    instantiate! {
        /// The same of bf16 logits.
        pub(crate) fn of_bf16(z: &[bf16], target: Option<usize>, scale: f32) -> Partial = partial
    }
}

#[inline(always)]
fn partial<M: MulAdd>(z: &[impl Element], target: Option<usize>, scale: f32) -> Partial {
    let Some(y) = target else { return sums::<M>(z, scale) };
    // A logit of -inf adds nothing.
    let mut others = [f32::NEG_INFINITY; TILE];
    others.iter_mut().zip(z).for_each(|(other, z)| *other = z.widened());
    others[y] = f32::NEG_INFINITY;
    Partial { target: z[y].widened(), ..sums::<M>(&others[..z.len()], scale) }
}

#[inline(always)]
fn sums<M: MulAdd>(z: &[impl Element], scale: f32) -> Partial {
    let (chunks, rest) = z.as_chunks::<LANES>();
    // NaN does not count here, but in the sums.
    let greater = |a: f32, b: f32| if a > b { a } else { b };
    let mut max = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for l in 0..LANES {
            max[l] = greater(chunk[l].widened(), max[l]);
        }
    }
    let max = rest.iter().fold(fold(max, greater), |max, z| greater(z.widened(), max));
    // A tile of -inf only: any finite number keeps the differences at -inf.
    let from = if max == f32::NEG_INFINITY { 0.0 } else { max };

    let (mut sum, mut dot) = ([0.0_f32; LANES], [0.0_f32; LANES]);
    let mut add = |chunk: [f32; LANES]| {
        for l in 0..LANES {
            let (d, e) = exp::<M>((chunk[l] - from) * scale);
            sum[l] += e;
            dot[l] = M::mul_add(e, d, dot[l]);
        }
    };
    for chunk in chunks {
        prefetch(chunk.as_ptr().wrapping_add(TILE));
        add(chunk.map(Element::widened));
    }
    if !rest.is_empty() {
        let mut last = [f32::NEG_INFINITY; LANES];
        last.iter_mut().zip(rest).for_each(|(last, z)| *last = z.widened());
        add(last);
    }
    Partial { max, sum: fold(sum, |a, b| a + b), dot: fold(dot, |a, b| a + b), target: 0.0 }
}

/// Has memory begin to fetch what will be read soon: the search for the next tile's maximum has nothing else to do, and
/// would wait. There need not be anything at `address`.
#[inline(always)]
fn prefetch<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which reads nothing and faults at no address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// `f` over all lanes, halves first: as many operations as registers halve, not a chain of [`LANES`].
#[inline(always)]
fn fold(lanes: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let eight: [f32; 8] = std::array::from_fn(|l| f(lanes[l], lanes[l + 8]));
    let four: [f32; 4] = std::array::from_fn(|l| f(eight[l], eight[l + 4]));
    f(f(four[0], four[2]), f(four[1], four[3]))
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
    pub(crate) fn gradient(z: &mut [f32], target: Option<usize>, slope: &Slope, scale: f32) = in_place
}

instantiate! {
    /// The same of bf16 logits, rounded to the nearest.
    pub(crate) fn gradient_bf16(z: &mut [bf16], target: Option<usize>, slope: &Slope, scale: f32) = in_place
}

instantiate! {
    /// Adds dL/dlogits of `z` to `out`, of the same length.
    pub(crate) fn add_gradient(z: &[f32], target: Option<usize>, slope: &Slope, scale: f32, out: &mut [f32]) = added
}

instantiate! {
    /// The same of bf16 logits.
    pub(crate) fn add_gradient_bf16(z: &[bf16], target: Option<usize>, slope: &Slope, scale: f32, out: &mut [f32])
        = added
}

instantiate! {
    /// Writes dL/dlogits of `z` to `out`, of the same length; rounded to the nearest bf16 value if `round`.
    pub(crate) fn gradient_to(z: &[f32], target: Option<usize>, slope: &Slope, scale: f32, out: &mut [f32], round: bool)
        = elsewhere
}

/// dL/dz of a logit that is not the target.
#[inline(always)]
fn derivative<M: MulAdd>(z: f32, slope: &Slope, scale: f32) -> f32 {
    let (d, e) = exp::<M>((z - slope.max) * scale);
    e * M::mul_add(slope.linear, d, slope.constant)
}

// The target may lie far above the others, where exp is not made for: what was made of it is replaced.

#[inline(always)]
fn in_place<M: MulAdd>(z: &mut [impl Element], target: Option<usize>, slope: &Slope, scale: f32) {
    for z in z.iter_mut() {
        *z = Element::nearest(derivative::<M>(z.widened(), slope, scale));
    }
    if let Some(y) = target {
        z[y] = Element::nearest(slope.target);
    }
}

#[inline(always)]
fn added<M: MulAdd>(z: &[impl Element], target: Option<usize>, slope: &Slope, scale: f32, out: &mut [f32]) {
    let target = target.map(|y| (y, out[y] + slope.target));
    for (out, z) in out.iter_mut().zip(z) {
        *out += derivative::<M>(z.widened(), slope, scale);
    }
    if let Some((y, sum)) = target {
        out[y] = sum;
    }
}

#[inline(always)]
fn elsewhere<M: MulAdd>(z: &[f32], target: Option<usize>, slope: &Slope, scale: f32, out: &mut [f32], round: bool) {
    let pairs = out.iter_mut().zip(z);
    if round {
        pairs.for_each(|(out, z)| *out = rounded(derivative::<M>(*z, slope, scale)));
    } else {
        pairs.for_each(|(out, z)| *out = derivative::<M>(*z, slope, scale));
    }
    if let Some(y) = target {
        out[y] = if round { rounded(slope.target) } else { slope.target };
    }
}

#[cfg(test)]
mod tests;
