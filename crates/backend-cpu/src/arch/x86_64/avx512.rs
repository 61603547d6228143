//! AVX-512, with and without products of bf16 pairs: 32 registers of 16 f32.
#![allow(unsafe_code)]

use crate::arch::microkernel::Ahead;
use crate::arch::panel::LHS_PANEL;
use crate::arch::strip::Strip;
use crate::arch::x86_64::panel::{LINE, Panel};
use std::arch::x86_64::*;
use std::hint::black_box;
use std::time::Instant;

/// Accumulators of [`spin_fma`] and [`spin_bf16`]: 24 of the 32 registers, enough to hide the latency of a
/// multiply-add.
const ACCUMULATORS: usize = 24;
/// Floating-point operations of an iteration of [`spin_fma`].
pub(crate) const SPIN_FMA_FLOPS: usize = ACCUMULATORS * 16 * 2;
/// Floating-point operations of an iteration of [`spin_bf16`].
pub(crate) const SPIN_BF16_FLOPS: usize = ACCUMULATORS * 16 * 2 * 2;

/// The bytes between a panel row that a kernel of few rows loads and the one that it prefetches. With half and with twice
/// the distance, steps of one row were 6 to 10 % slower (docs/notes/host-trainer.md).
const DISTANCE: usize = 8192;

/// Defines a kernel of panels and one of few rows with the given multiplication of words. Kernels compute the first `MADE` rows.
macro_rules! avx512_kernels {
    ($panels:ident, $few:ident, $features:literal, |$sum:ident, $a:ident, $b:ident| $step:expr) => {
        /// # Safety
        /// As [`crate::arch::microkernel::multiply`]; `words` is a multiple of `WORDS`.
        #[target_feature(enable = $features)]
        #[allow(clippy::too_many_arguments)]
        pub(crate) unsafe fn $panels<const MADE: usize, const WORDS: usize, B: Panel<WORDS>>(
            words: usize,
            mut a: *const u32,
            mut b: B,
            mut copy: Option<*mut u32>,
            mut ahead: Ahead,
            c: *mut f32,
            stride: usize,
            add: bool,
        ) {
            // SAFETY: the caller guarantees [words, 12], [words, 32], the copy and the rows of c; prefetches may have any address.
            unsafe {
                b.prefetch_rest();
                // Prefetch c, to hide memory latency behind the products.
                for i in 0..MADE {
                    _mm_prefetch::<_MM_HINT_T0>(c.add(i * stride).cast());
                    _mm_prefetch::<_MM_HINT_T0>(c.add(i * stride + 16).cast());
                }
                let mut sums = [[_mm512_setzero_ps(); 2]; MADE];
                for _ in 0..words / WORDS {
                    for _ in 0..B::BYTES / LINE {
                        _mm_prefetch::<_MM_HINT_T0>(ahead.from.cast());
                        ahead.from = ahead.from.wrapping_add(ahead.step);
                    }
                    let panel = b.next();
                    if let Some(copy) = &mut copy {
                        for (j, words) in panel.as_flattened().iter().enumerate() {
                            _mm512_storeu_si512(copy.add(16 * j).cast(), *words);
                        }
                        *copy = copy.add(32 * WORDS);
                    }
                    for columns in panel {
                        for (i, sums) in sums.iter_mut().enumerate() {
                            let $a = _mm512_set1_epi32(a.add(i).cast::<i32>().read());
                            for ($sum, $b) in sums.iter_mut().zip(columns) {
                                *$sum = $step;
                            }
                        }
                        a = a.add(LHS_PANEL);
                    }
                }
                for (i, sums) in sums.into_iter().enumerate() {
                    for (j, mut sum) in sums.into_iter().enumerate() {
                        let c = c.add(i * stride + 16 * j);
                        if add {
                            sum = _mm512_add_ps(_mm512_loadu_ps(c), sum);
                        }
                        _mm512_storeu_ps(c, sum);
                    }
                }
            }
        }

        /// # Safety
        /// As [`crate::arch::microkernel::multiply_few`]; `words` and `piece` are multiples of `WORDS`.
        #[target_feature(enable = $features)]
        #[allow(clippy::too_many_arguments)]
        pub(crate) unsafe fn $few<const MADE: usize, const WORDS: usize, B: Panel<WORDS>>(
            mut words: usize,
            piece: usize,
            mut a: *const u32,
            mut b: B,
            c: *mut f32,
            columns: usize,
            stride: usize,
            mut add: bool,
        ) {
            let masks = [0, 16].map(|first| ((1_u32 << columns.saturating_sub(first).min(16)) - 1) as __mmask16);
            // SAFETY: the caller guarantees [words, MADE], [words, 32] and `columns` elements of the rows of c; prefetches may have any
            // address.
            unsafe {
                b.prefetch_rest();
                let mut totals = [[_mm512_setzero_ps(); 2]; MADE];
                if add {
                    for (i, totals) in totals.iter_mut().enumerate() {
                        for (j, total) in totals.iter_mut().enumerate() {
                            *total = _mm512_maskz_loadu_ps(masks[j], c.wrapping_add(i * stride + 16 * j));
                        }
                    }
                }
                while words > 0 {
                    let count = piece.min(words);
                    words -= count;
                    let mut sums = [[_mm512_setzero_ps(); 2]; MADE];
                    for _ in 0..count / WORDS {
                        let next = b.address().wrapping_add(DISTANCE);
                        for line in (0..B::BYTES).step_by(LINE) {
                            _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(line).cast());
                        }
                        for columns in b.next() {
                            for (i, sums) in sums.iter_mut().enumerate() {
                                let $a = _mm512_set1_epi32(a.add(i).cast::<i32>().read());
                                for ($sum, $b) in sums.iter_mut().zip(columns) {
                                    *$sum = $step;
                                }
                            }
                            a = a.add(MADE);
                        }
                    }
                    for (totals, sums) in totals.iter_mut().zip(sums) {
                        for (total, sum) in totals.iter_mut().zip(sums) {
                            *total = if add { _mm512_add_ps(*total, sum) } else { sum };
                        }
                    }
                    add = true;
                }
                for (i, totals) in totals.into_iter().enumerate() {
                    for (j, total) in totals.into_iter().enumerate() {
                        _mm512_mask_storeu_ps(c.wrapping_add(i * stride + 16 * j), masks[j], total);
                    }
                }
            }
        }
    };
}

/// Writes the words of a panel to `to`, and prefetches the panel at a constant distance.
///
/// # Safety
/// As [`crate::arch::microkernel::widen`]; `words` is a multiple of `WORDS`.
#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) unsafe fn widen<const WORDS: usize, B: Panel<WORDS>>(words: usize, mut b: B, mut to: *mut u32) {
    // SAFETY: the caller guarantees [words, 32] of both; prefetches may have any address.
    unsafe {
        b.prefetch_rest();
        for _ in 0..words / WORDS {
            let next = b.address().wrapping_add(DISTANCE);
            for line in (0..B::BYTES).step_by(LINE) {
                _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(line).cast());
            }
            for (j, words) in b.next().as_flattened().iter().enumerate() {
                _mm512_storeu_si512(to.add(16 * j).cast(), *words);
            }
            to = to.add(32 * WORDS);
        }
    }
}

avx512_kernels!(multiply_f32, multiply_few_f32, "avx512f,avx512bw", |sum, a, b| _mm512_fmadd_ps(
    _mm512_castsi512_ps(a),
    _mm512_castsi512_ps(b),
    *sum
));
avx512_kernels!(multiply_bf16, multiply_few_bf16, "avx512f,avx512bw,avx512bf16", |sum, a, b| _mm512_dpbf16_ps(
    *sum,
    std::mem::transmute::<__m512i, __m512bh>(a),
    std::mem::transmute::<__m512i, __m512bh>(b)
));

/// Computes `c[MADE, 16 VECTORS] (+)= a b` for `a: [MADE, k]` and a strip b, in the columns of `mask`.
///
/// # Safety
/// - a has `k` elements in each row, and b in each column of the mask.
/// - c holds the columns of the mask in each row, and nothing else accesses them at the same time.
#[target_feature(enable = "avx512f")]
#[allow(clippy::too_many_arguments)]
pub(crate) unsafe fn multiply_strip<const MADE: usize, const VECTORS: usize>(
    k: usize,
    a: *const f32,
    a_stride: usize,
    strip: Strip<'_>,
    c: *mut f32,
    c_stride: usize,
    mask: u32,
    add: bool,
) {
    let Strip { values, step, second, ahead } = strip;
    let mut b = values.as_ptr();
    let masks: [__mmask16; VECTORS] = std::array::from_fn(|vector| (mask >> (16 * vector)) as __mmask16);
    // SAFETY: the caller guarantees the rows of a, and the columns of b and c in `mask`. Masked loads and stores access no other column.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); VECTORS]; MADE];
        let place = |i: usize, vector: usize| c.wrapping_add(i * c_stride + 16 * vector);
        if add {
            for (i, sums) in sums.iter_mut().enumerate() {
                for (vector, sum) in sums.iter_mut().enumerate() {
                    *sum = _mm512_maskz_loadu_ps(masks[vector], place(i, vector));
                }
            }
        }
        for t in 0..k {
            let columns: [__m512; VECTORS] = std::array::from_fn(|vector| {
                let column = b.wrapping_add(vector * second);
                _mm_prefetch::<_MM_HINT_T0>(column.wrapping_add(ahead).cast());
                _mm512_maskz_loadu_ps(masks[vector], column)
            });
            for (i, sums) in sums.iter_mut().enumerate() {
                let a = _mm512_set1_ps(a.add(i * a_stride + t).read());
                for (sum, column) in sums.iter_mut().zip(columns) {
                    *sum = _mm512_fmadd_ps(a, column, *sum);
                }
            }
            b = b.wrapping_add(step);
        }
        for (i, sums) in sums.into_iter().enumerate() {
            for (vector, sum) in sums.into_iter().enumerate() {
                _mm512_mask_storeu_ps(place(i, vector), masks[vector], sum);
            }
        }
    }
}

/// Transposes a block of words in registers.
#[target_feature(enable = "avx512f")]
#[inline]
pub(crate) fn transpose_16x16(block: &mut [[u32; 16]; 16]) {
    // SAFETY: a row is 64 bytes of the block.
    let r: [__m512i; 16] = std::array::from_fn(|i| unsafe { _mm512_loadu_si512(block[i].as_ptr().cast()) });
    // Collect two, then four words of one column within lanes of 128 bits; then permute lanes.
    let pairs: [__m512i; 16] = std::array::from_fn(|i| match i % 2 {
        0 => _mm512_unpacklo_epi32(r[i], r[i + 1]),
        _ => _mm512_unpackhi_epi32(r[i - 1], r[i]),
    });
    let fours: [__m512i; 16] = std::array::from_fn(|i| {
        let (group, column) = (i / 4 * 4, i % 4);
        let (a, b) = (pairs[group + column / 2], pairs[group + 2 + column / 2]);
        if column % 2 == 0 { _mm512_unpacklo_epi64(a, b) } else { _mm512_unpackhi_epi64(a, b) }
    });
    for column in 0..4 {
        let [a, b, c, d] = [fours[column], fours[column + 4], fours[column + 8], fours[column + 12]];
        let (ab_even, ab_odd) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b));
        let (cd_even, cd_odd) = (_mm512_shuffle_i32x4::<0x88>(c, d), _mm512_shuffle_i32x4::<0xdd>(c, d));
        let lanes = [
            _mm512_shuffle_i32x4::<0x88>(ab_even, cd_even),
            _mm512_shuffle_i32x4::<0x88>(ab_odd, cd_odd),
            _mm512_shuffle_i32x4::<0xdd>(ab_even, cd_even),
            _mm512_shuffle_i32x4::<0xdd>(ab_odd, cd_odd),
        ];
        for (lane, words) in lanes.into_iter().enumerate() {
            // SAFETY: as above.
            unsafe { _mm512_storeu_si512(block[4 * lane + column].as_mut_ptr().cast(), words) };
        }
    }
}

/// Repeats f32 multiply-adds in registers, to measure the arithmetic peak. Returns one of the sums.
#[target_feature(enable = "avx512f")]
pub(crate) fn spin_fma(iterations: usize) -> f32 {
    let (a, b) = black_box((_mm512_set1_ps(1.5), _mm512_set1_ps(0.5)));
    let mut sums = [_mm512_setzero_ps(); ACCUMULATORS];
    for _ in 0..iterations {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(a, b, *sum);
        }
    }
    _mm512_cvtss_f32(black_box(sums)[ACCUMULATORS - 1])
}

/// Repeats products of bf16 pairs in registers. Returns one of the sums.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(crate) fn spin_bf16(iterations: usize) -> f32 {
    let (a, b) = black_box((_mm512_set1_ps(1.5), _mm512_set1_ps(0.5)));
    let (a, b) = (_mm512_cvtne2ps_pbh(a, a), _mm512_cvtne2ps_pbh(b, b));
    let mut sums = [_mm512_setzero_ps(); ACCUMULATORS];
    for _ in 0..iterations {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, a, b);
        }
    }
    _mm512_cvtss_f32(black_box(sums)[ACCUMULATORS - 1])
}

/// Returns `true` if this processor multiplies bf16 pairs faster than f32. An instruction computes twice as many
/// products of pairs: on a Zen 4 in the same time, on a Sapphire Rapids in four times the time. The bound is in
/// between. The fastest of several measurements counts, so that other processes do not change the result.
pub(crate) fn pairs_pay() -> bool {
    if !(is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16")) {
        return false;
    }
    const ITERATIONS: usize = 1000;
    let seconds = |spin: &dyn Fn() -> f32| {
        let began = Instant::now();
        black_box(spin());
        began.elapsed().as_secs_f64()
    };
    let (mut single, mut pairs) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..16 {
        // SAFETY: both instruction sets were detected above.
        single = single.min(seconds(&|| unsafe { spin_fma(ITERATIONS) }));
        // SAFETY: as above.
        pairs = pairs.min(seconds(&|| unsafe { spin_bf16(ITERATIONS) }));
    }
    pairs < 2.0 * single
}
