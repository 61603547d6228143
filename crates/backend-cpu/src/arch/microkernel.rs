//! The microkernel of a matrix product: a panel of the lhs times a panel of the rhs, in vector registers.
//!
//! Avoids reading an output element more than once per piece of K: `[12, 32]` of the output are summed in registers, 24 of
//! AVX-512's 32. A step takes two registers of the rhs and one broadcast word of the lhs for every two multiply-adds, so that
//! loads hide behind arithmetic (14 loads and a fetch, 24 multiply-adds). AVX2 has 16 registers of half the size: it makes the piece in four
//! parts `[6, 16]` of 12 sums each. Plain Rust takes parts `[4, 8]`, what 16 registers of four hold.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use super::{Isa, panel::LHS_PANEL};
use super::{IsaToken, generic};

/// What a kernel fetches into the caches while it multiplies: the word at `from`, in the next step that `step` words further on, and
/// so on. A fetch of any address is harmless.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ahead {
    pub(crate) from: *const u32,
    pub(crate) step: usize,
}

/// `c[12, 32] (+)= a b` for panels `a: [words, 12]`, `b: [words, 32]`; rows of c are `stride` apart. `pairs`: words are bf16
/// pairs. Of c's rows at least the first `rows` are made; a panel that is not full need not cost as much as one that is.
///
/// # Safety
/// The panels hold that many words, c those elements, and nothing else reaches those of c meanwhile.
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
        // SAFETY: a token exists only for what the processor has; the rest is the caller's promise.
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
    // SAFETY: the caller's promise.
    unsafe { generic::multiply(words, a, b, c, stride, add) }
}
