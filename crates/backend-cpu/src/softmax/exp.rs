//! e^x of non-positive arguments, for the softmax.
//!
//! About 10 multiply-adds and similar operations per element, without library calls, comparisons or branches, so that
//! it vectorises for every instruction set. Error: at most 2 units in the last place (tested over the range).

use crate::arch::MulAdd;

/// e^x is 0 from 2^-81 down: even a million such terms are below the f32 rounding error of a sum with 1. Smaller terms
/// times coefficients and weights would be subnormal, where multiply-adds are so slow on Intel processors that a step
/// of a confident policy, which has many of them, took seventy times as long.
const ZERO: i32 = 81;

/// The lowest argument of exp: e^x is 0 there, and products with it are finite.
pub(super) const LOWEST: f32 = -56.0;

/// Returns max(x, LOWEST); in this form, NaN is kept, and it is one instruction.
#[inline(always)]
pub(super) fn held(x: f32) -> f32 {
    if LOWEST > x { LOWEST } else { x }
}

/// Returns (max(x, LOWEST), e^x) for x <= 0, within 2 units in the last place; e^x is 0 below -80.5 ln 2. NaN stays
/// NaN.
#[inline(always)]
pub(crate) fn exp<M: MulAdd>(x: f32) -> (f32, f32) {
    let x = held(x);
    let (r, power) = reduced::<M>(x);
    let p = M::mul_add(M::mul_add(above_one::<M>(r), r, 1.0), r, 1.0);
    (x, p * power)
}

/// Returns (r, 2^n) with x = r + n ln 2 and |r| <= ln 2 / 2, for x from LOWEST to 0. 2^-81 becomes 0.
#[inline(always)]
pub(super) fn reduced<M: MulAdd>(x: f32) -> (f32, f32) {
    const LN2_HIGH: f32 = 0.693_359_4; // 10 bits: n * LN2_HIGH is exact
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding 1.5 * 2^23 rounds to an integer in the low bits; with another 81, they are the exponent of 2^(n - 46).
    const SHIFT: f32 = 12_582_912.0 + ZERO as f32;
    const REST: f32 = (1_u64 << (127 - ZERO)) as f32;
    let shifted = M::mul_add(x, std::f32::consts::LOG2_E, SHIFT);
    let n = shifted - SHIFT;
    let r = M::mul_add(n, -LN2_LOW, M::mul_add(n, -LN2_HIGH, x));
    // This is 0 for n = -81, without a comparison.
    (r, f32::from_bits(shifted.to_bits() << 23) * REST)
}

/// Returns (e^r - 1 - r) / r^2: the minimax polynomial on [-ln 2 / 2, ln 2 / 2] for a series that starts with 1 + r,
/// with an error of 3e-9 relative to e^r.
#[inline(always)]
pub(super) fn above_one<M: MulAdd>(r: f32) -> f32 {
    let mut p = 1.381_454e-3;
    for c in [8.368_745e-3, 4.166_839e-2, 1.666_652_1e-1, 0.499_999_94] {
        p = M::mul_add(p, r, c);
    }
    p
}
