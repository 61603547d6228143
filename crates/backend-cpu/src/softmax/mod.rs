//! Row statistics of logits and their gradient, shared by every implementation but the reference.
//!
//! Avoids a second copy of the softmax math, and numbers that depend on how the work was cut: a row is always summed in
//! tiles of [`TILE`] entries, merged from left to right in f64, so its bits are those of the row alone.
//!
//! The target stays out of the sums. With M the largest of the other logits, d_j = logit_scale (z_j - M), e_j = exp(d_j)
//! and S = sum over j != y of e_j:
//!   margin = logit_scale (M - z_y) + ln S,  log p_y = -softplus(margin),  q = 1 - p_y = -expm1(log p_y),
//!   p_j = e_j q / S,  entropy = -p_y log p_y - q log q + q (ln S - sum e_j d_j / S).
//! z_j are logits after [`Transform`], and logit_scale is what [`Scales`] says of the row.
//! Nothing cancels, however collapsed the distribution is, and differences of logits are taken before they are scaled.
//!
//! A tile stays in the first-level cache between its maximum and its sums, while the next one is fetched. The sums are
//! bound by multiply-adds, 12 per entry; conversions from and to bf16 happen in registers; no branch. Of 32 registers the
//! sums take 2, constants 14 and a vector of entries 4. A caller that has room keeps e_j, and saves a gradient its exps.

mod exp;
mod tanh;
mod transform;

use crate::arch::{MulAdd, prefetch, simd_dispatch};
use crate::convert::{Element, rounded};
use exp::{exp, held};
use grpo_core::{LossConfig, TemperatureFactors};
use half::bf16;
pub(crate) use transform::{Transform, transform_bf16_to, transform_to};

/// Vocabulary entries that are summed in f32 before they join the row's f64 sums.
pub(crate) const TILE: usize = 512;

/// Elements that are handled side by side: a register of AVX-512, or two or four of less.
const LANES: usize = 16;

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
    simd_dispatch! {
        /// `z`: at most [`TILE`] logits, of which `target` is left out.
        pub(crate) fn new(z: &[f32], target: Option<usize>, scale: f32) -> Partial = partial
    }
    simd_dispatch! {
        /// The same of bf16 logits.
        pub(crate) fn of_bf16(z: &[bf16], target: Option<usize>, scale: f32) -> Partial = partial
    }
    simd_dispatch! {
        /// [`Partial::new`] that leaves e_j, relative to the tile's own maximum, in `kept`, of the same length.
        pub(crate) fn keeping(z: &[f32], target: Option<usize>, scale: f32, kept: &mut [f32]) -> Partial
            = partial_keeping
    }
    simd_dispatch! {
        /// The same of bf16 logits.
        pub(crate) fn keeping_bf16(z: &[bf16], target: Option<usize>, scale: f32, kept: &mut [f32]) -> Partial
            = partial_keeping
    }
}

#[inline(always)]
fn partial<M: MulAdd>(z: &[impl Element], target: Option<usize>, scale: f32) -> Partial {
    without::<M>(z, target, scale, None)
}

#[inline(always)]
fn partial_keeping<M: MulAdd>(z: &[impl Element], target: Option<usize>, scale: f32, kept: &mut [f32]) -> Partial {
    without::<M>(z, target, scale, Some(kept))
}

#[inline(always)]
fn without<M: MulAdd>(z: &[impl Element], target: Option<usize>, scale: f32, kept: Option<&mut [f32]>) -> Partial {
    let Some(y) = target else { return sums::<M>(z, scale, kept) };
    // A logit of -inf adds nothing.
    let mut others = [f32::NEG_INFINITY; TILE];
    others.iter_mut().zip(z).for_each(|(other, z)| *other = z.widened());
    others[y] = f32::NEG_INFINITY;
    Partial { target: z[y].widened(), ..sums::<M>(&others[..z.len()], scale, kept) }
}

#[inline(always)]
fn sums<M: MulAdd>(z: &[impl Element], scale: f32, kept: Option<&mut [f32]>) -> Partial {
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
        let mut kept = [0.0; LANES];
        for l in 0..LANES {
            let (d, e) = exp::<M>((chunk[l] - from) * scale);
            kept[l] = e;
            sum[l] += e;
            dot[l] = M::mul_add(e, d, dot[l]);
        }
        kept
    };
    let (mut kept, kept_rest) = kept.map(<[f32]>::as_chunks_mut::<LANES>).unzip();
    for (i, chunk) in chunks.iter().enumerate() {
        // The search for the next tile's maximum has nothing else to do, and would wait for memory.
        prefetch(chunk.as_ptr().wrapping_add(TILE));
        let e = add(chunk.map(Element::widened));
        if let Some(kept) = &mut kept {
            kept[i] = e;
        }
    }
    if !rest.is_empty() {
        let mut last = [f32::NEG_INFINITY; LANES];
        last.iter_mut().zip(rest).for_each(|(last, z)| *last = z.widened());
        let e = add(last);
        if let Some(kept) = kept_rest {
            kept.copy_from_slice(&e[..rest.len()]);
        }
    }
    Partial { max, sum: fold(sum, |a, b| a + b), dot: fold(dot, |a, b| a + b), target: 0.0 }
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
        // An infinite target is infinity over infinity, and not a probability of 1.
        let target = if self.target == f32::INFINITY { f64::NAN } else { self.target.into() };
        let margin = f64::from(scale) * (f64::from(self.max) - target) + self.sum.ln();
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
pub(crate) struct RowGrad {
    max: f32,
    /// dL/dz_j = e_j (constant + linear d_j).
    constant: f32,
    linear: f32,
    /// dL/dz_y.
    target: f32,
}

impl Row {
    /// `dlogp`, `dentropy`: dL/dlogp and dL/dentropy of the row.
    pub(crate) fn row_grad(&self, scales: &Scales, dlogp: f64, dentropy: f64) -> RowGrad {
        let (g, e, s) = (dlogp * scales.logp, dentropy, f64::from(scales.logit));
        let log_weight = if self.weight > 0.0 { self.weight.ln() } else { 0.0 };
        // 0 * inf must not appear: a probability of 0 has no part in the entropy.
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

impl RowGrad {
    /// The row_grad of a tile of the row, for e_j relative to the tile's maximum.
    pub(crate) fn for_tile(&self, tile: &Partial, scale: f32) -> Self {
        // A tile of -inf only has no e_j but 0, and no maximum to be relative to.
        let below = f64::from(scale) * (f64::from(tile.max) - f64::from(self.max));
        let factor = if tile.max == f32::NEG_INFINITY { 0.0 } else { below.exp() as f32 };
        Self { constant: self.constant * factor, linear: self.linear * factor, ..*self }
    }
}

/// What a row is multiplied by.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Scales {
    /// Logits before the softmax.
    pub(crate) logit: f32,
    /// Log-probabilities after it.
    pub(crate) logp: f64,
}

impl Scales {
    /// Of a token whose temperature is `temperature`, or that of `loss`.
    pub(crate) fn new(loss: &LossConfig, temperature: Option<f32>) -> Self {
        let TemperatureFactors { logits, logp } = loss.temperature_factors(temperature);
        let left = if Transform::new(loss).is_some() { 1.0 } else { loss.logit_scale };
        Self { logit: (left * logits) as f32, logp }
    }
}

simd_dispatch! {
    /// Overwrites the logits of a tile with dL/dlogits. `kept`: what [`Partial::keeping`] left; `row_grad`: that of the tile
    /// ([`RowGrad::for_tile`]); `target`: index of the target if it is among them.
    pub(crate) fn gradient(z: &mut [f32], kept: &[f32], target: Option<usize>, row_grad: &RowGrad, scale: f32) = in_place
}

simd_dispatch! {
    /// The same of bf16 logits, rounded to the nearest.
    pub(crate) fn gradient_bf16(z: &mut [bf16], kept: &[f32], target: Option<usize>, row_grad: &RowGrad, scale: f32) = in_place
}

simd_dispatch! {
    /// Adds dL/dlogits of a tile to `out`.
    pub(crate) fn add_gradient(
        z: &[f32], kept: &[f32], target: Option<usize>, row_grad: &RowGrad, scale: f32, out: &mut [f32]
    ) = added
}

simd_dispatch! {
    /// The same of bf16 logits.
    pub(crate) fn add_gradient_bf16(
        z: &[bf16], kept: &[f32], target: Option<usize>, row_grad: &RowGrad, scale: f32, out: &mut [f32]
    ) = added
}

simd_dispatch! {
    /// Writes dL/dlogits of `z` to `out`, of the same length; rounded to the nearest bf16 value if `round`.
    pub(crate) fn gradient_to(z: &[f32], target: Option<usize>, row_grad: &RowGrad, scale: f32, out: &mut [f32], round: bool)
        = elsewhere
}

/// dL/dz of a logit that is not the target.
#[inline(always)]
fn derivative<M: MulAdd>(z: f32, row_grad: &RowGrad, scale: f32) -> f32 {
    let (d, e) = exp::<M>((z - row_grad.max) * scale);
    e * M::mul_add(row_grad.linear, d, row_grad.constant)
}

/// The same given e_j.
#[inline(always)]
fn derivative_of<M: MulAdd>(z: f32, e: f32, row_grad: &RowGrad, scale: f32) -> f32 {
    e * M::mul_add(row_grad.linear, held((z - row_grad.max) * scale), row_grad.constant)
}

#[inline(always)]
fn in_place<M: MulAdd>(z: &mut [impl Element], kept: &[f32], target: Option<usize>, row_grad: &RowGrad, scale: f32) {
    let pairs = z.iter_mut().zip(kept);
    if row_grad.linear == 0.0 {
        pairs.for_each(|(z, e)| *z = Element::nearest(e * row_grad.constant));
    } else {
        pairs.for_each(|(z, e)| *z = Element::nearest(derivative_of::<M>(z.widened(), *e, row_grad, scale)));
    }
    if let Some(y) = target {
        z[y] = Element::nearest(row_grad.target);
    }
}

#[inline(always)]
fn added<M: MulAdd>(
    z: &[impl Element],
    kept: &[f32],
    target: Option<usize>,
    row_grad: &RowGrad,
    scale: f32,
    out: &mut [f32],
) {
    let target = target.map(|y| (y, out[y] + row_grad.target));
    let entries = out.iter_mut().zip(kept);
    if row_grad.linear == 0.0 {
        entries.for_each(|(out, e)| *out += e * row_grad.constant);
    } else {
        entries.zip(z).for_each(|((out, e), z)| *out += derivative_of::<M>(z.widened(), *e, row_grad, scale));
    }
    if let Some((y, sum)) = target {
        out[y] = sum;
    }
}

#[inline(always)]
fn elsewhere<M: MulAdd>(
    z: &[f32],
    target: Option<usize>,
    row_grad: &RowGrad,
    scale: f32,
    out: &mut [f32],
    round: bool,
) {
    let pairs = out.iter_mut().zip(z);
    if round {
        pairs.for_each(|(out, z)| *out = rounded(derivative::<M>(*z, row_grad, scale)));
    } else {
        pairs.for_each(|(out, z)| *out = derivative::<M>(*z, row_grad, scale));
    }
    // It may lie far above the others, where exp is not made for.
    if let Some(y) = target {
        out[y] = if round { rounded(row_grad.target) } else { row_grad.target };
    }
}

#[cfg(test)]
mod tests;
