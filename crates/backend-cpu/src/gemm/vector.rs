//! Kernels in vector registers.
//!
//! Avoids reading an output element more than once per piece of K: `[12, 32]` of the output are summed in registers, 24 of
//! AVX-512's 32. A step takes two registers of the rhs and one broadcast word of the lhs for every two multiply-adds, so that
//! loads hide behind arithmetic (14 loads, 24 multiply-adds). AVX2 has 16 registers of half the size: it makes the piece in four
//! parts `[6, 16]` of 12 sums each. Plain Rust takes parts `[4, 8]`, what 16 registers of four hold.

use super::RHS_PANEL;
use crate::isa::Level;

/// Rows of a lhs panel.
pub(super) const ROWS: usize = 12;

/// `c[12, 32] (+)= a b` for panels `a: [words, 12]`, `b: [words, 32]`; rows of c are `stride` apart. `pairs`: words are bf16
/// pairs. Of c's rows at least the first `rows` are made; a panel that is not full need not cost as much as one that is.
///
/// # Safety
/// The panels hold that many words, c those elements, and nothing else reaches those of c meanwhile.
#[allow(clippy::too_many_arguments)]
#[inline]
pub(super) unsafe fn multiply(
    level: Level,
    pairs: bool,
    rows: usize,
    words: usize,
    a: *const u32,
    b: *const u32,
    c: *mut f32,
    stride: usize,
    add: bool,
) {
    #[cfg(target_arch = "x86_64")]
    {
        use crate::isa::Isa;
        // SAFETY: a level exists only for what the processor has; the rest is the caller's promise.
        unsafe {
            match level.isa() {
                Isa::Avx512Bf16 | Isa::Amx if pairs => match rows {
                    0..=4 => return x86::avx512_bf16::<4>(words, a, b, c, stride, add),
                    5..=8 => return x86::avx512_bf16::<8>(words, a, b, c, stride, add),
                    _ => return x86::avx512_bf16::<ROWS>(words, a, b, c, stride, add),
                },
                Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => match rows {
                    0..=4 => return x86::avx512::<4>(words, a, b, c, stride, add),
                    5..=8 => return x86::avx512::<8>(words, a, b, c, stride, add),
                    _ => return x86::avx512::<ROWS>(words, a, b, c, stride, add),
                },
                Isa::Avx2 => return x86::avx2(words, a, b, c, stride, add),
                Isa::Portable => {}
            }
        }
    }
    let _ = (level, pairs, rows);
    // SAFETY: the caller's promise.
    unsafe { portable(words, a, b, c, stride, add) }
}

/// # Safety
/// As [`multiply`], of f32 words.
unsafe fn portable(words: usize, a: *const u32, b: *const u32, c: *mut f32, stride: usize, add: bool) {
    const HEIGHT: usize = 4;
    const WIDTH: usize = 8;
    // SAFETY: the panels hold `words` words per row and column, says the caller.
    let (a, b) =
        unsafe { (std::slice::from_raw_parts(a, words * ROWS), std::slice::from_raw_parts(b, words * RHS_PANEL)) };
    for i in (0..ROWS).step_by(HEIGHT) {
        for j in (0..RHS_PANEL).step_by(WIDTH) {
            let mut sums = [[0.0_f32; WIDTH]; HEIGHT];
            for (a, b) in a.chunks_exact(ROWS).zip(b.chunks_exact(RHS_PANEL)) {
                let b: [f32; WIDTH] = std::array::from_fn(|x| f32::from_bits(b[j + x]));
                for (sums, a) in sums.iter_mut().zip(&a[i..i + HEIGHT]) {
                    let a = f32::from_bits(*a);
                    sums.iter_mut().zip(&b).for_each(|(sum, b)| *sum += a * b);
                }
            }
            for (y, sums) in sums.iter().enumerate() {
                // SAFETY: c holds [12, 32] elements, says the caller.
                let row = unsafe { std::slice::from_raw_parts_mut(c.add((i + y) * stride + j), WIDTH) };
                row.iter_mut().zip(sums).for_each(|(c, sum)| *c = if add { *c + sum } else { *sum });
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::ROWS;
    use std::arch::x86_64::*;

    /// The AVX-512 kernels, which differ in how words are multiplied. They make the first `MADE` rows.
    macro_rules! avx512_kernel {
        ($name:ident, $features:literal, |$sum:ident, $a:ident, $b:ident| $step:expr) => {
            /// # Safety
            /// As [`super::multiply`].
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $name<const MADE: usize>(
                words: usize,
                mut a: *const u32,
                mut b: *const u32,
                c: *mut f32,
                stride: usize,
                add: bool,
            ) {
                // SAFETY: the caller vouches for [words, 12], [words, 32] and the rows of c; a prefetch needs no such thing.
                unsafe {
                    // Where c comes from memory, it comes while the sums are made.
                    for i in 0..MADE {
                        _mm_prefetch::<_MM_HINT_T0>(c.add(i * stride).cast());
                        _mm_prefetch::<_MM_HINT_T0>(c.add(i * stride + 16).cast());
                    }
                    let mut sums = [[_mm512_setzero_ps(); 2]; MADE];
                    for _ in 0..words {
                        let columns = [_mm512_loadu_si512(b.cast()), _mm512_loadu_si512(b.add(16).cast())];
                        for (i, sums) in sums.iter_mut().enumerate() {
                            let $a = _mm512_set1_epi32(a.add(i).cast::<i32>().read());
                            for ($sum, $b) in sums.iter_mut().zip(columns) {
                                *$sum = $step;
                            }
                        }
                        (a, b) = (a.add(ROWS), b.add(32));
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
        };
    }

    avx512_kernel!(avx512, "avx512f", |sum, a, b| _mm512_fmadd_ps(
        _mm512_castsi512_ps(a),
        _mm512_castsi512_ps(b),
        *sum
    ));
    avx512_kernel!(avx512_bf16, "avx512f,avx512bf16", |sum, a, b| _mm512_dpbf16_ps(
        *sum,
        std::mem::transmute::<__m512i, __m512bh>(a),
        std::mem::transmute::<__m512i, __m512bh>(b)
    ));

    /// # Safety
    /// As [`super::multiply`], of f32 words.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn avx2(words: usize, a: *const u32, b: *const u32, c: *mut f32, stride: usize, add: bool) {
        const HEIGHT: usize = 6;
        for i in (0..ROWS).step_by(HEIGHT) {
            for j in (0..32).step_by(16) {
                // SAFETY: the caller vouches for [words, 12], [words, 32] and the rows of c.
                unsafe {
                    let (mut a, mut b) = (a.add(i).cast::<f32>(), b.add(j).cast::<f32>());
                    let mut sums = [[_mm256_setzero_ps(); 2]; HEIGHT];
                    for _ in 0..words {
                        let columns = [_mm256_loadu_ps(b), _mm256_loadu_ps(b.add(8))];
                        for (i, sums) in sums.iter_mut().enumerate() {
                            let a = _mm256_broadcast_ss(&*a.add(i));
                            sums.iter_mut().zip(columns).for_each(|(sum, b)| *sum = _mm256_fmadd_ps(a, b, *sum));
                        }
                        (a, b) = (a.add(ROWS), b.add(32));
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
}
