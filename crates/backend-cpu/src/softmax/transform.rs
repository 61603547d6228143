//! The transform of logits before the temperature, if a factor in the softmax cannot express it.
//!
//! w = cap tanh(logit_scale z / cap), and the softmax takes w / T. Tiles are transformed in place or where they are
//! computed, in a core's cache, without another tensor. Without a cap, a positive logit_scale is part of
//! [`super::Scales`].

use super::gradient::{RowGrad, gradient_to};
use super::tanh::tanh;
use crate::arch::{IsaToken, MulAdd, simd_dispatch};
use crate::convert::{Element, rounded};
use grpo_core::LossConfig;

/// The transform of a logit before the temperature.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Transform {
    /// The factor logit_scale, without a cap.
    scale: f32,
    cap: Option<Cap>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Cap {
    cap: f32,
    /// logit_scale / cap: the factor of the argument.
    inner: f32,
    /// logit_scale / cap^2: dw/dz = outer (cap - w) (cap + w).
    outer: f32,
}

impl Transform {
    /// Returns `None` if logits are unchanged, or only multiplied by a positive number.
    pub(crate) fn new(loss: &LossConfig) -> Option<Self> {
        let scale = loss.logit_scale;
        let cap = loss.final_logit_softcapping.map(|cap| Cap {
            cap: cap as f32,
            inner: (scale / cap) as f32,
            outer: (scale / (cap * cap)) as f32,
        });
        // Factors in the softmax must keep the maximum.
        (cap.is_some() || scale < 0.0).then_some(Self { scale: scale as f32, cap })
    }

    /// Returns logit_scale and the cap, for comparisons in f64.
    #[cfg(test)]
    pub(super) fn in_f64(&self) -> (f64, Option<f64>) {
        (self.scale.into(), self.cap.map(|cap| cap.cap.into()))
    }

    /// Transforms a tile in place.
    pub(crate) fn apply(&self, isa: IsaToken, z: &mut [f32]) {
        transform(isa, z, self);
    }

    /// Computes dL/dz of a tile with transformed logits `w` and the row's coefficients, as [`gradient_to`].
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn gradient_to(
        &self,
        isa: IsaToken,
        w: &[f32],
        target: Option<usize>,
        row_grad: &RowGrad,
        scale: f32,
        out: &mut [f32],
        round: bool,
    ) {
        gradient_to(isa, w, target, row_grad, scale, out, false);
        pull_back(isa, w, self, out, round);
    }
}

simd_dispatch! { fn transform(z: &mut [f32], by: &Transform) = in_place }

simd_dispatch! {
    /// Writes the transformed logits `z` to `out`, of the same length.
    pub(crate) fn transform_to[E: Element](z: &[E], by: &Transform, out: &mut [f32]) = elsewhere
}

simd_dispatch! {
    /// Computes dL/dz from dL/dw; rounded to the nearest bf16 value if `round`.
    fn pull_back(w: &[f32], by: &Transform, gradient: &mut [f32], round: bool) = through
}

#[inline(always)]
fn capped<M: MulAdd>(z: f32, cap: &Cap) -> f32 {
    cap.cap * tanh::<M>(z * cap.inner)
}

#[inline(always)]
fn in_place<M: MulAdd>(z: &mut [f32], by: &Transform) {
    match &by.cap {
        Some(cap) => z.iter_mut().for_each(|z| *z = capped::<M>(*z, cap)),
        None => z.iter_mut().for_each(|z| *z *= by.scale),
    }
}

#[inline(always)]
fn elsewhere<M: MulAdd>(z: &[impl Element], by: &Transform, out: &mut [f32]) {
    let pairs = out.iter_mut().zip(z);
    match &by.cap {
        Some(cap) => pairs.for_each(|(out, z)| *out = capped::<M>(z.widened(), cap)),
        None => pairs.for_each(|(out, z)| *out = by.scale * z.widened()),
    }
}

#[inline(always)]
fn through<M: MulAdd>(w: &[f32], by: &Transform, gradient: &mut [f32], round: bool) {
    let pairs = gradient.iter_mut().zip(w);
    match &by.cap {
        // The factored form of 1 - (w / cap)^2 is exactly 0 at the cap. Near it, the error of dL/dz is 4e-7 of dL/dw. Where a sampling mask
        // has made w -inf, dL/dw is 0.
        Some(cap) => pairs.for_each(|(g, w)| {
            let slope = cap.outer * ((cap.cap - w) * (cap.cap + w));
            *g = if *g == 0.0 { 0.0 } else { *g * slope };
        }),
        None => pairs.for_each(|(g, _)| *g *= by.scale),
    }
    if round {
        gradient.iter_mut().for_each(|g| *g = rounded(*g));
    }
}
