//! The transform of logits before the temperature, where no factor of the softmax can do it.
//!
//! w = cap tanh(logit_scale z / cap), and the softmax takes w / T. Avoids a tensor of its own: tiles are transformed where they
//! lie or where they are made, in a core's cache. Without a cap, a positive logit_scale is part of [`super::Scales`].

use super::gradient::{RowGrad, gradient_to};
use super::tanh::tanh;
use crate::arch::{IsaToken, MulAdd, simd_dispatch};
use crate::convert::{Element, rounded};
use grpo_core::LossConfig;
use half::bf16;

/// How a logit becomes what the temperature divides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Transform {
    /// The factor logit_scale, where there is no cap.
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
    /// `None` where logits stay as they are, or are only multiplied by something positive.
    pub(crate) fn new(loss: &LossConfig) -> Option<Self> {
        let scale = loss.logit_scale;
        let cap = loss.final_logit_softcapping.map(|cap| Cap {
            cap: cap as f32,
            inner: (scale / cap) as f32,
            outer: (scale / (cap * cap)) as f32,
        });
        // The largest logit has to be the largest after it.
        (cap.is_some() || scale < 0.0).then_some(Self { scale: scale as f32, cap })
    }

    /// logit_scale and the cap, for comparisons in f64.
    #[cfg(test)]
    pub(super) fn in_f64(&self) -> (f64, Option<f64>) {
        (self.scale.into(), self.cap.map(|cap| cap.cap.into()))
    }

    /// Transforms a tile where it lies.
    pub(crate) fn apply(&self, isa: IsaToken, z: &mut [f32]) {
        transform(isa, z, self);
    }

    /// dL/dz of a tile whose transformed logits are `w`, with the row_grad of the row: as [`gradient_to`].
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
    /// The transformed logits `z`, into `out` of the same length.
    pub(crate) fn transform_to(z: &[f32], by: &Transform, out: &mut [f32]) = elsewhere
}

simd_dispatch! {
    /// [`transform_to`] of bf16 logits.
    pub(crate) fn transform_bf16_to(z: &[bf16], by: &Transform, out: &mut [f32]) = elsewhere
}

simd_dispatch! {
    /// Makes dL/dz of dL/dw; rounded to the nearest bf16 value if `round`.
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
        // Differences, not 1 - (w / cap)^2: exactly 0 at the cap. Next to it as good as w is: dL/dz is off by 4e-7 of dL/dw.
        Some(cap) => pairs.for_each(|(g, w)| *g *= cap.outer * ((cap.cap - w) * (cap.cap + w))),
        None => pairs.for_each(|(g, _)| *g *= by.scale),
    }
    if round {
        gradient.iter_mut().for_each(|g| *g = rounded(*g));
    }
}
