//! tanh, which a softcap applies to every logit.
//!
//! With m = e^(-2|x|) - 1, computed without cancellation, |tanh x| = -m / (2 + m); (1 - e) / (1 + e) would cancel near
//! 0. It takes 11 multiply-adds and a division, without library calls or branches. Error: at most 3 units in the last
//! place (tested over the range); never beyond 1.

use super::exp::{above_one, held, reduced};
use crate::arch::MulAdd;

/// Computes tanh x within 3 units in the last place. NaN stays NaN.
#[inline(always)]
pub(super) fn tanh<M: MulAdd>(x: f32) -> f32 {
    let (r, power) = reduced::<M>(held(-2.0 * x.abs()));
    // e^r - 1 = r + r^2 (...), and m = 2^n (e^r - 1) + (2^n - 1), where 2^n - 1 is exact until it rounds to -1.
    let m = M::mul_add(power, M::mul_add(above_one::<M>(r) * r, r, r), power - 1.0);
    (-m / (2.0 + m)).copysign(x)
}
