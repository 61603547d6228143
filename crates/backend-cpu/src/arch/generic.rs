//! Plain Rust for every target, instead of code for a specific instruction set.
#![allow(unsafe_code)]

use super::panel::{LHS_PANEL, RHS_PANEL};
use std::hint::black_box;

/// Accumulators of [`spin`]; the registers of any target hold them.
const ACCUMULATORS: usize = 32;
/// Floating-point operations of an iteration of [`spin`].
pub(crate) const SPIN_FLOPS: usize = ACCUMULATORS * 2;

/// Prefetches the cache line at `address`, which may be invalid.
#[inline(always)]
pub(crate) fn prefetch<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch neither reads nor faults, for any address. Every x86-64 processor has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Transposes a block of words.
#[inline(always)]
pub(crate) fn transpose_16x16(block: &mut [[u32; 16]; 16]) {
    let rows = *block;
    for (j, to) in block.iter_mut().enumerate() {
        *to = std::array::from_fn(|i| rows[i][j]);
    }
}

/// Multiplies panels of f32 words, in small blocks of the output.
///
/// # Safety
/// As [`super::microkernel::multiply`] with f32 words.
pub(crate) unsafe fn multiply(words: usize, a: *const u32, b: *const u32, c: *mut f32, stride: usize, add: bool) {
    const HEIGHT: usize = 4;
    const WIDTH: usize = 8;
    // SAFETY: the caller guarantees panels of `words` words per row and column.
    let (a, b) =
        unsafe { (std::slice::from_raw_parts(a, words * LHS_PANEL), std::slice::from_raw_parts(b, words * RHS_PANEL)) };
    for i in (0..LHS_PANEL).step_by(HEIGHT) {
        for j in (0..RHS_PANEL).step_by(WIDTH) {
            let mut sums = [[0.0_f32; WIDTH]; HEIGHT];
            for (a, b) in a.chunks_exact(LHS_PANEL).zip(b.chunks_exact(RHS_PANEL)) {
                let b: [f32; WIDTH] = std::array::from_fn(|x| f32::from_bits(b[j + x]));
                for (sums, a) in sums.iter_mut().zip(&a[i..i + HEIGHT]) {
                    let a = f32::from_bits(*a);
                    sums.iter_mut().zip(&b).for_each(|(sum, b)| *sum += a * b);
                }
            }
            for (y, sums) in sums.iter().enumerate() {
                // SAFETY: the caller guarantees [12, 32] elements in c.
                let row = unsafe { std::slice::from_raw_parts_mut(c.add((i + y) * stride + j), WIDTH) };
                row.iter_mut().zip(sums).for_each(|(c, sum)| *c = if add { *c + sum } else { *sum });
            }
        }
    }
}

/// Repeats multiply-adds, to measure the arithmetic peak. Returns one of the sums.
pub(crate) fn spin(iterations: usize) -> f32 {
    let (a, b) = black_box((0.5_f32, 1.5_f32));
    let mut sums = [0.0_f32; ACCUMULATORS];
    for _ in 0..iterations {
        for sum in &mut sums {
            // Not `mul_add`, which is a library call if the baseline has no such instruction.
            *sum = *sum * a + b;
        }
    }
    black_box(sums)[ACCUMULATORS - 1]
}
