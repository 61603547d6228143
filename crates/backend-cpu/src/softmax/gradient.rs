//! The gradient of a row's logits, tile by tile.

use super::exp::{LOWEST, exp, held};
use super::partial::Partial;
use crate::arch::{MulAdd, simd_dispatch};
use crate::convert::{Element, rounded};

/// The coefficients of dL/dz of a row, as a function of d_j and e_j.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RowGrad {
    pub(super) max: f32,
    /// dL/dz_j = e_j (constant + linear d_j).
    pub(super) constant: f32,
    pub(super) linear: f32,
    /// dL/dz_y, the derivative with respect to the target's logit.
    pub(super) target: f32,
}

impl RowGrad {
    /// Returns the coefficients for a tile of the row, with e_j relative to the tile's maximum.
    pub(crate) fn for_tile(&self, tile: &Partial, scale: f32) -> Self {
        // If all logits are -inf, every e_j is 0 and there is no maximum. A tile far below the row's maximum is 0, like its logits.
        let below = f64::from(scale) * (f64::from(tile.max) - f64::from(self.max));
        let nothing = tile.max == f32::NEG_INFINITY || below < f64::from(LOWEST);
        let factor = if nothing { 0.0 } else { below.exp() as f32 };
        Self { constant: self.constant * factor, linear: self.linear * factor, ..*self }
    }
}

simd_dispatch! {
    /// Overwrites the logits of a tile with dL/dlogits, rounded to their dtype. `kept` has the values of
    /// [`Partial::keeping`], `row_grad` belongs to the tile ([`RowGrad::for_tile`]), `target` is the target's index in
    /// the tile.
    pub(crate) fn gradient[E: Element](
        z: &mut [E], kept: &[f32], target: Option<usize>, row_grad: &RowGrad, scale: f32
    ) = in_place
}

simd_dispatch! {
    /// Adds dL/dlogits of a tile to `out`; for the arguments, see [`gradient`].
    pub(crate) fn add_gradient[E: Element](
        z: &[E], kept: &[f32], target: Option<usize>, row_grad: &RowGrad, scale: f32, out: &mut [f32]
    ) = added
}

simd_dispatch! {
    /// Writes dL/dlogits of `z` to `out`, of the same length; rounded to the nearest bf16 value if `round`.
    pub(crate) fn gradient_to(z: &[f32], target: Option<usize>, row_grad: &RowGrad, scale: f32, out: &mut [f32], round: bool)
        = elsewhere
}

/// Computes dL/dz of a logit that is not the target.
#[inline(always)]
fn derivative<M: MulAdd>(z: f32, row_grad: &RowGrad, scale: f32) -> f32 {
    let (d, e) = exp::<M>((z - row_grad.max) * scale);
    e * M::mul_add(row_grad.linear, d, row_grad.constant)
}

/// Computes dL/dz of a logit that is not the target, from e_j.
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
    // The target may be far above the others, outside of the range of exp.
    if let Some(y) = target {
        out[y] = if round { rounded(row_grad.target) } else { row_grad.target };
    }
}
