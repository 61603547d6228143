//! The microkernel of a matrix product: a panel of the lhs times a panel of the rhs, in vector registers.
//!
//! Each output element is read once per piece of K: a block `[12, 32]` of the output is summed in 24 of AVX-512's 32
//! registers. A step loads two registers of the rhs and broadcasts one word of the lhs for every two multiply-adds, so
//! that loads are hidden behind arithmetic (14 loads and two prefetches, 24 multiply-adds). AVX2 has 16 registers of half
//! the size and computes four blocks `[6, 16]` of 12 sums each. Plain Rust uses blocks `[4, 8]`, which 16 registers of
//! four hold.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use super::panel::LHS_PANEL;
use super::{Isa, IsaToken, generic};

/// The prefetches of a kernel: the cache line at `from`, then the one `step` bytes after it, and so on, [`RhsPanel::prefetches`] of them. A
/// prefetch of any address is harmless.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) struct Ahead {
    pub(crate) from: *const u8,
    pub(crate) step: usize,
}

/// A panel `[words, 32]` of a packed rhs.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) enum RhsPanel {
    /// Words of f32.
    F32(*const u32),
    /// Words of bf16 pairs.
    Pairs(*const u32),
    /// The upper halves of words of f32, whose lower halves are zero.
    Halves(*const u16),
    /// Words of bf16 pairs as coded groups.
    CodedPairs(CodedPanel),
    /// The upper halves of words of f32 as coded groups.
    CodedHalves(CodedPanel),
}

/// A panel of coded groups, which `gemm/coded.rs` describes.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) struct CodedPanel {
    /// The groups, of [`super::panel::GROUP_U16`] each.
    pub(crate) groups: *const u16,
    /// The exponents of the 16 codes, in place, twice.
    pub(crate) table: *const u16,
    /// The number of the first group.
    pub(crate) group: u32,
    /// The numbers of the escaped groups from the first one on; after the last, `u32::MAX`.
    pub(crate) escapes: *const u32,
    /// The values of these groups, [`super::panel::GROUP`] each.
    pub(crate) values: *const u16,
}

impl RhsPanel {
    /// Returns the words per step of a kernel: `words` must be a multiple of them.
    pub(crate) fn step(self) -> usize {
        match self {
            Self::F32(_) | Self::Pairs(_) | Self::Halves(_) => 1,
            Self::CodedPairs(_) => 2,
            Self::CodedHalves(_) => 4,
        }
    }

    /// Returns the number of cache lines that [`multiply`] prefetches while it reads `words` words: as many as the words take.
    pub(crate) fn prefetches(self, words: usize) -> usize {
        match self {
            Self::F32(_) | Self::Pairs(_) => 2 * words,
            Self::Halves(_) => words,
            Self::CodedPairs(_) => 3 * words / 2,
            Self::CodedHalves(_) => 3 * words / 4,
        }
    }
}

/// Returns `true` if panels other than words of f32 have kernels of this instruction set, and [`multiply_few`] has kernels.
pub(crate) fn multiplies_narrow(isa: IsaToken) -> bool {
    isa.get() >= Isa::Avx512
}

/// Computes `c[12, 32] (+)= a b` for panels `a: [words, 12]` and `b: [words, 32]`; rows of c are `stride` apart. At least the first `rows` rows of
/// c are computed, so that a partial panel can be cheaper. The words of b are also written to `copy`, which is `None` for words of f32.
///
/// # Safety
/// - The panels and the copy hold that many words, a multiple of [`RhsPanel::step`].
/// - Panels other than words of f32: [`multiplies_narrow`] returned `true`, and for pairs the instruction set has products of bf16 pairs.
/// - c holds these elements, and nothing else accesses them or the copy at the same time.
#[allow(clippy::too_many_arguments)]
#[inline]
pub(crate) unsafe fn multiply(
    isa: IsaToken,
    rows: usize,
    words: usize,
    a: *const u32,
    b: RhsPanel,
    copy: Option<*mut u32>,
    ahead: Ahead,
    c: *mut f32,
    stride: usize,
    add: bool,
) {
    #[cfg(target_arch = "x86_64")]
    {
        use super::x86_64::avx512::{multiply_bf16, multiply_f32};
        use super::x86_64::panel::{Coded, Halves, Words};
        macro_rules! dispatch_rows {
            ($kernel:ident, $step:literal, $b:expr) => {
                match rows {
                    0..=4 => $kernel::<4, $step, _>(words, a, $b, copy, ahead, c, stride, add),
                    5..=8 => $kernel::<8, $step, _>(words, a, $b, copy, ahead, c, stride, add),
                    _ => $kernel::<LHS_PANEL, $step, _>(words, a, $b, copy, ahead, c, stride, add),
                }
            };
        }
        // SAFETY: a token exists only for instruction sets of this processor; the caller guarantees the rest.
        unsafe {
            match b {
                RhsPanel::F32(b) if isa.get() >= Isa::Avx512 => return dispatch_rows!(multiply_f32, 1, Words(b)),
                RhsPanel::F32(b) if isa.get() == Isa::Avx2 => {
                    return super::x86_64::avx2::multiply(words, a, b, c, stride, add);
                }
                RhsPanel::F32(_) => {}
                RhsPanel::Pairs(b) => return dispatch_rows!(multiply_bf16, 1, Words(b)),
                RhsPanel::Halves(b) => return dispatch_rows!(multiply_f32, 1, Halves(b)),
                RhsPanel::CodedPairs(b) => return dispatch_rows!(multiply_bf16, 2, Coded(b)),
                RhsPanel::CodedHalves(b) => return dispatch_rows!(multiply_f32, 4, Coded(b)),
            }
        }
    }
    let _ = (isa, rows, copy, ahead);
    match b {
        // SAFETY: guaranteed by the caller.
        RhsPanel::F32(b) => unsafe { generic::multiply(words, a, b, c, stride, add) },
        _ => unreachable!("`multiplies_narrow` is false"),
    }
}

/// Writes the words of a panel `[words, 32]` of bf16 pairs to `to`.
///
/// # Safety
/// - [`multiplies_narrow`] returned `true`.
/// - The panel and `to` hold that many words, a multiple of [`RhsPanel::step`], and nothing else accesses `to` at the same time.
#[inline]
pub(crate) unsafe fn widen(words: usize, b: RhsPanel, to: *mut u32) {
    #[cfg(target_arch = "x86_64")]
    {
        use super::x86_64::avx512::widen;
        use super::x86_64::panel::{Coded, Words};
        // SAFETY: guaranteed by the caller.
        unsafe {
            match b {
                RhsPanel::Pairs(b) => widen(words, Words(b), to),
                RhsPanel::CodedPairs(b) => widen::<2, _>(words, Coded(b), to),
                _ => unreachable!("words of f32"),
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (words, b, to);
        unreachable!("`multiplies_narrow` is false");
    }
}

/// The most rows of [`multiply_few`].
pub(crate) const FEW_ROWS: usize = 4;

/// Computes `c[rows, columns] (+)= a b` for at most [`FEW_ROWS`] rows `a: [words, rows]` and a panel `b: [words, 32]`; rows of c are `stride`
/// apart. Multiply-adds form one chain per `piece` words, and chains are added in order, as by a call of [`multiply`] per piece: the bits are
/// equal. The panel is read from memory once, in order, and prefetched at a constant distance.
///
/// # Safety
/// - [`multiplies_narrow`] returned `true`, and for pairs the instruction set has products of bf16 pairs.
/// - a and b hold that many words; `words` and `piece` are multiples of [`RhsPanel::step`].
/// - c holds these elements, and nothing else accesses them at the same time.
#[allow(clippy::too_many_arguments)]
#[inline]
pub(crate) unsafe fn multiply_few(
    rows: usize,
    words: usize,
    piece: usize,
    a: *const u32,
    b: RhsPanel,
    c: *mut f32,
    columns: usize,
    stride: usize,
    add: bool,
) {
    #[cfg(target_arch = "x86_64")]
    {
        use super::x86_64::avx512::{multiply_few_bf16, multiply_few_f32};
        use super::x86_64::panel::{Coded, Halves, Words};
        macro_rules! dispatch_rows {
            ($kernel:ident, $step:literal, $b:expr) => {
                match rows {
                    1 => $kernel::<1, $step, _>(words, piece, a, $b, c, columns, stride, add),
                    2 => $kernel::<2, $step, _>(words, piece, a, $b, c, columns, stride, add),
                    3 => $kernel::<3, $step, _>(words, piece, a, $b, c, columns, stride, add),
                    _ => $kernel::<FEW_ROWS, $step, _>(words, piece, a, $b, c, columns, stride, add),
                }
            };
        }
        // SAFETY: guaranteed by the caller.
        unsafe {
            match b {
                RhsPanel::F32(b) => dispatch_rows!(multiply_few_f32, 1, Words(b)),
                RhsPanel::Pairs(b) => dispatch_rows!(multiply_few_bf16, 1, Words(b)),
                RhsPanel::Halves(b) => dispatch_rows!(multiply_few_f32, 1, Halves(b)),
                RhsPanel::CodedPairs(b) => dispatch_rows!(multiply_few_bf16, 2, Coded(b)),
                RhsPanel::CodedHalves(b) => dispatch_rows!(multiply_few_f32, 4, Coded(b)),
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (rows, words, piece, a, b, c, columns, stride, add);
        unreachable!("`multiplies_narrow` is false");
    }
}
