//! The microkernel of a matrix product: a panel of the lhs times a panel of the rhs, in vector registers.
//!
//! Each output element is read once per piece of K: a block `[12, 32]` of the output is summed in 24 of AVX-512's 32
//! registers. A step loads two registers of the rhs and broadcasts one word of the lhs for every two multiply-adds, so
//! that loads are hidden behind arithmetic (14 loads and a prefetch, 24 multiply-adds). AVX2 has 16 registers of half
//! the size and computes four blocks `[6, 16]` of 12 sums each. Plain Rust uses blocks `[4, 8]`, which 16 registers of
//! four hold.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use super::panel::LHS_PANEL;
use super::{Isa, IsaToken, generic};

/// The prefetches of a kernel: the word at `from`, and in each further step the word `step` words after the previous
/// one. A prefetch of any address is harmless.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ahead {
    pub(crate) from: *const u32,
    pub(crate) step: usize,
}

/// Computes `c[12, 32] (+)= a b` for panels `a: [words, 12]`, `b: [words, 32]`; rows of c are `stride` apart. If
/// `pairs`, words are bf16 pairs. At least the first `rows` rows of c are computed, so that a partial panel can be
/// cheaper.
///
/// # Safety
/// - The panels hold that many words.
/// - c holds these elements, and nothing else accesses them at the same time.
#[allow(clippy::too_many_arguments)]
#[inline]
pub(crate) unsafe fn multiply(
    isa: IsaToken,
    pairs: bool,
    rows: usize,
    words: usize,
    a: *const u32,
    b: *const u32,
    ahead: Ahead,
    c: *mut f32,
    stride: usize,
    add: bool,
) {
    #[cfg(target_arch = "x86_64")]
    {
        use super::x86_64::{avx2, avx512};
        // SAFETY: a token exists only for instruction sets of this processor; the caller guarantees the rest.
        unsafe {
            match isa.get() {
                Isa::Avx512Bf16 | Isa::Amx if pairs => match rows {
                    0..=4 => return avx512::multiply_bf16::<4>(words, a, b, ahead, c, stride, add),
                    5..=8 => return avx512::multiply_bf16::<8>(words, a, b, ahead, c, stride, add),
                    _ => return avx512::multiply_bf16::<LHS_PANEL>(words, a, b, ahead, c, stride, add),
                },
                Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => match rows {
                    0..=4 => return avx512::multiply_f32::<4>(words, a, b, ahead, c, stride, add),
                    5..=8 => return avx512::multiply_f32::<8>(words, a, b, ahead, c, stride, add),
                    _ => return avx512::multiply_f32::<LHS_PANEL>(words, a, b, ahead, c, stride, add),
                },
                Isa::Avx2 => return avx2::multiply(words, a, b, c, stride, add),
                Isa::Portable => {}
            }
        }
    }
    let _ = (isa, pairs, rows, ahead);
    // SAFETY: guaranteed by the caller.
    unsafe { generic::multiply(words, a, b, c, stride, add) }
}

/// Computes [`multiply`] with f32 words and a panel `b: [words, 32]` of their upper halves, which are widened in registers.
///
/// # Safety
/// As [`multiply`]; and [`multiplies_few`] returned `true`.
#[allow(clippy::too_many_arguments)]
#[inline]
pub(crate) unsafe fn multiply_halves(
    rows: usize,
    words: usize,
    a: *const u32,
    b: *const u16,
    ahead: Ahead,
    c: *mut f32,
    stride: usize,
    add: bool,
) {
    #[cfg(target_arch = "x86_64")]
    {
        use super::x86_64::avx512;
        // SAFETY: guaranteed by the caller.
        unsafe {
            match rows {
                0..=4 => avx512::multiply_halves::<4>(words, a, b, ahead, c, stride, add),
                5..=8 => avx512::multiply_halves::<8>(words, a, b, ahead, c, stride, add),
                _ => avx512::multiply_halves::<LHS_PANEL>(words, a, b, ahead, c, stride, add),
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (rows, words, a, b, ahead, c, stride, add);
        unreachable!("`multiplies_few` is false");
    }
}

/// The most rows of [`multiply_few`].
pub(crate) const FEW_ROWS: usize = 4;

/// A panel `[words, 32]` of a packed rhs in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FewPanel {
    /// Words of f32.
    F32(*const u32),
    /// The upper halves of words of f32, whose lower halves are zero.
    Halves(*const u16),
    /// Words of bf16 pairs.
    Pairs(*const u32),
}

/// Returns `true` if [`multiply_few`] and [`multiply_halves`] have kernels of this instruction set.
pub(crate) fn multiplies_few(isa: IsaToken) -> bool {
    isa.get() >= Isa::Avx512
}

/// Computes `c[rows, columns] (+)= a b` for at most [`FEW_ROWS`] rows `a: [words, rows]` and a panel `b: [words, 32]`; rows of c are `stride`
/// apart. Multiply-adds form one chain per `piece` words, and chains are added in order, as by a call of [`multiply`] per piece: the bits are
/// equal. The panel is read from memory once, in order, and prefetched at a constant distance.
///
/// # Safety
/// - [`multiplies_few`] returned `true`, and for pairs the instruction set has products of bf16 pairs.
/// - a and b hold that many words.
/// - c holds these elements, and nothing else accesses them at the same time.
#[allow(clippy::too_many_arguments)]
#[inline]
pub(crate) unsafe fn multiply_few(
    rows: usize,
    words: usize,
    piece: usize,
    a: *const u32,
    b: FewPanel,
    c: *mut f32,
    columns: usize,
    stride: usize,
    add: bool,
) {
    #[cfg(target_arch = "x86_64")]
    {
        use super::x86_64::avx512::{multiply_few_bf16, multiply_few_f32, multiply_few_halves};
        macro_rules! of_rows {
            ($kernel:ident, $b:ident) => {
                match rows {
                    1 => $kernel::<1>(words, piece, a, $b, c, columns, stride, add),
                    2 => $kernel::<2>(words, piece, a, $b, c, columns, stride, add),
                    3 => $kernel::<3>(words, piece, a, $b, c, columns, stride, add),
                    _ => $kernel::<FEW_ROWS>(words, piece, a, $b, c, columns, stride, add),
                }
            };
        }
        // SAFETY: guaranteed by the caller.
        unsafe {
            match b {
                FewPanel::F32(b) => of_rows!(multiply_few_f32, b),
                FewPanel::Halves(b) => of_rows!(multiply_few_halves, b),
                FewPanel::Pairs(b) => of_rows!(multiply_few_bf16, b),
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (rows, words, piece, a, b, c, columns, stride, add);
        unreachable!("`multiplies_few` is false");
    }
}
