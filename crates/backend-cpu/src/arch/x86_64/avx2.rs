//! AVX2 with fused multiply-add: 16 registers of 8 f32.
#![allow(unsafe_code)]

use crate::arch::panel::LHS_PANEL;
use std::arch::x86_64::*;
use std::hint::black_box;

/// Accumulators of [`spin_fma`]: 12 of the 16 registers, enough to hide the latency of a multiply-add.
const ACCUMULATORS: usize = 12;
/// Floating-point operations of an iteration of [`spin_fma`].
pub(crate) const SPIN_FLOPS: usize = ACCUMULATORS * 8 * 2;

/// Multiplies panels of f32 words, in four blocks of the output.
///
/// # Safety
/// As [`crate::arch::microkernel::multiply`] with f32 words.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn multiply(words: usize, a: *const u32, b: *const u32, c: *mut f32, stride: usize, add: bool) {
    const HEIGHT: usize = 6;
    for i in (0..LHS_PANEL).step_by(HEIGHT) {
        for j in (0..32).step_by(16) {
            // SAFETY: the caller guarantees [words, 12], [words, 32] and the rows of c.
            unsafe {
                let (mut a, mut b) = (a.add(i).cast::<f32>(), b.add(j).cast::<f32>());
                let mut sums = [[_mm256_setzero_ps(); 2]; HEIGHT];
                for _ in 0..words {
                    let columns = [_mm256_loadu_ps(b), _mm256_loadu_ps(b.add(8))];
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let a = _mm256_broadcast_ss(&*a.add(i));
                        sums.iter_mut().zip(columns).for_each(|(sum, b)| *sum = _mm256_fmadd_ps(a, b, *sum));
                    }
                    (a, b) = (a.add(LHS_PANEL), b.add(32));
                }
                for (y, sums) in sums.into_iter().enumerate() {
                    for (x, mut sum) in sums.into_iter().enumerate() {
                        let c = c.add((i + y) * stride + j + 8 * x);
                        if add {
                            sum = _mm256_add_ps(_mm256_loadu_ps(c), sum);
                        }
                        _mm256_storeu_ps(c, sum);
                    }
                }
            }
        }
    }
}

/// Repeats multiply-adds in registers, to measure the arithmetic peak. Returns one of the sums.
#[target_feature(enable = "avx2,fma")]
pub(crate) fn spin_fma(iterations: usize) -> f32 {
    let (a, b) = black_box((_mm256_set1_ps(1.5), _mm256_set1_ps(0.5)));
    let mut sums = [_mm256_setzero_ps(); ACCUMULATORS];
    for _ in 0..iterations {
        for sum in &mut sums {
            *sum = _mm256_fmadd_ps(a, b, *sum);
        }
    }
    _mm256_cvtss_f32(black_box(sums)[ACCUMULATORS - 1])
}
