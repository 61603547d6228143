//! The microkernel of a matrix product: a panel of the lhs times a panel of the rhs, in vector registers.
//!
//! Each output element is read once per piece of K: a block `[12, 32]` of the output is summed in 24 of AVX-512's 32
//! registers. A step loads two registers of the rhs and broadcasts one word of the lhs for every two multiply-adds, so
//! that loads are hidden behind arithmetic (14 loads and a prefetch, 24 multiply-adds). AVX2 has 16 registers of half
//! the size and computes four blocks `[6, 16]` of 12 sums each. Plain Rust uses blocks `[4, 8]`, which 16 registers of
//! four hold.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use super::{Isa, panel::LHS_PANEL};
use super::{IsaToken, generic};

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
