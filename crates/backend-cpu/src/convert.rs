//! bf16 to f32 and back, a slice at a time.
//!
//! Avoids a conversion per element: each direction is a handful of integer operations that vectorise at every level,
//! and gives the bits that `half` gives.

use crate::isa::{MulAdd, instantiate};
use half::bf16;

instantiate! {
    /// Widens exactly. As many as the shorter slice holds.
    pub(crate) fn widen(from: &[bf16], to: &mut [f32]) = widen_body
}

instantiate! {
    /// Rounds to the nearest, ties to even; NaN stays NaN. As many as the shorter slice holds.
    pub(crate) fn narrow(from: &[f32], to: &mut [bf16]) = narrow_body
}

#[inline(always)]
fn widen_body<M: MulAdd>(from: &[bf16], to: &mut [f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = widened(*from);
    }
}

#[inline(always)]
fn narrow_body<M: MulAdd>(from: &[f32], to: &mut [bf16]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = bf16::from_bits((rounded(*from).to_bits() >> 16) as u16);
    }
}

#[inline(always)]
pub(crate) fn widened(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// The nearest bf16 value, as f32.
#[inline(always)]
pub(crate) fn rounded(x: f32) -> f32 {
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    // A NaN could round to infinity: it keeps its upper bits, and one that makes it quiet.
    let bits = if x.is_nan() { bits | 0x0040_0000 } else { nearest };
    f32::from_bits(bits & 0xffff_0000)
}
