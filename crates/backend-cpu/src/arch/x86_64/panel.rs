//! The forms of a packed panel, and the words that AVX-512 kernels read from them.
#![allow(unsafe_code)]

use crate::arch::microkernel::CodedPanel;
use crate::arch::panel::{GROUP, GROUP_U16, SIGN_AND_MANTISSA};
use std::arch::x86_64::*;

/// The bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// A panel in memory.
pub(crate) trait Stream {
    /// The bytes of a step: whole cache lines.
    const BYTES: usize;

    /// Returns the address of the next step.
    fn address(&self) -> *const u8;

    /// Prefetches data of the panel that is stored apart from its steps, if there is any.
    #[inline(always)]
    fn prefetch_rest(&self) {}
}

/// A panel `[words, 32]`, which kernels read `WORDS` words at a time.
pub(crate) trait Panel<const WORDS: usize>: Stream {
    /// Returns the words of a step, in two registers each.
    ///
    /// # Safety
    /// - The panel has another step.
    /// - The processor has AVX-512 F and BW. The caller is compiled for them, so that the instructions are inlined.
    unsafe fn next(&mut self) -> [[__m512i; 2]; WORDS];
}

/// Words of 32 bits, as kernels multiply them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Words(pub(crate) *const u32);

impl Stream for Words {
    const BYTES: usize = 2 * LINE;

    #[inline(always)]
    fn address(&self) -> *const u8 {
        self.0.cast()
    }
}

impl Panel<1> for Words {
    #[inline(always)]
    unsafe fn next(&mut self) -> [[__m512i; 2]; 1] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let words = [0, 16].map(|first| _mm512_loadu_si512(self.0.add(first).cast()));
            self.0 = self.0.add(32);
            [words]
        }
    }
}

/// The upper halves of words of f32, whose lower halves are zero.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Halves(pub(crate) *const u16);

impl Stream for Halves {
    const BYTES: usize = LINE;

    #[inline(always)]
    fn address(&self) -> *const u8 {
        self.0.cast()
    }
}

impl Panel<1> for Halves {
    #[inline(always)]
    unsafe fn next(&mut self) -> [[__m512i; 2]; 1] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let words = [0, 16].map(|first| {
                _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(self.0.add(first).cast())))
            });
            self.0 = self.0.add(32);
            [words]
        }
    }
}

/// Groups of coded bf16 values; `gemm/coded.rs` has their layout.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Coded(pub(crate) CodedPanel);

impl Stream for Coded {
    const BYTES: usize = GROUP_U16 * size_of::<u16>();

    #[inline(always)]
    fn address(&self) -> *const u8 {
        self.0.groups.cast()
    }

    /// Prefetches the values of the next escaped group. A kernel that waited for the memory took 14 % more time for 16 rows, with 2 % of the
    /// groups escaped (docs/notes/host-trainer.md).
    #[inline(always)]
    fn prefetch_rest(&self) {
        for line in (0..GROUP * size_of::<u16>()).step_by(LINE) {
            // SAFETY: every x86-64 has SSE; prefetches may have any address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.0.values.wrapping_byte_add(line).cast()) };
        }
    }
}

impl Coded {
    /// Returns the [`GROUP`] values of a group in four registers.
    ///
    /// # Safety
    /// The panel has another group; the processor as for [`Panel::next`].
    #[inline(always)]
    unsafe fn group(&mut self) -> [__m512i; 4] {
        // SAFETY: guaranteed by the caller; escapes end with a group beyond all others.
        unsafe {
            let panel = &mut self.0;
            let values = if panel.group == *panel.escapes {
                let values = [0, 32, 64, 96].map(|first| _mm512_loadu_si512(panel.values.add(first).cast()));
                (panel.escapes, panel.values) = (panel.escapes.add(1), panel.values.add(GROUP));
                self.prefetch_rest();
                values
            } else {
                let load = |first: usize| _mm512_loadu_si512(panel.groups.add(first).cast());
                let (codes, bytes) = (load(0), [load(32), load(64)]);
                // The table repeats its 16 entries, because an index has 5 bits.
                let table = _mm512_loadu_si512(panel.table.cast());
                let exponents = [
                    codes,
                    _mm512_srli_epi16::<4>(codes),
                    _mm512_srli_epi16::<8>(codes),
                    _mm512_srli_epi16::<12>(codes),
                ]
                .map(|codes| _mm512_permutexvar_epi16(codes, table));
                // Bytes 1, 0, 3, 2, 5, 4 and so on of every 16 bytes.
                let swap = _mm512_set4_epi32(0x0e0f_0c0d, 0x0a0b_0809, 0x0607_0405, 0x0203_0001);
                let swapped = bytes.map(|bytes| _mm512_shuffle_epi8(bytes, swap));
                let kept = _mm512_set1_epi16(SIGN_AND_MANTISSA as i16);
                // (a & b) | c
                let value = |bytes, exponent| _mm512_ternarylogic_epi32::<0xea>(bytes, kept, exponent);
                let [a, b, c, d] = exponents;
                [value(bytes[0], a), value(swapped[0], b), value(bytes[1], c), value(swapped[1], d)]
            };
            let panel = &mut self.0;
            (panel.groups, panel.group) = (panel.groups.add(GROUP_U16), panel.group + 1);
            values
        }
    }
}

/// Two words of bf16 pairs per group.
impl Panel<2> for Coded {
    #[inline(always)]
    unsafe fn next(&mut self) -> [[__m512i; 2]; 2] {
        // SAFETY: guaranteed by the caller.
        let [a, b, c, d] = unsafe { self.group() };
        [[a, b], [c, d]]
    }
}

/// Four words of f32 per group. The lower halves of 32 bits are columns 0 to 15, and the upper halves columns 16 to 31.
impl Panel<4> for Coded {
    #[inline(always)]
    unsafe fn next(&mut self) -> [[__m512i; 2]; 4] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            self.group().map(|values| {
                let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
                [_mm512_slli_epi32::<16>(values), _mm512_and_si512(values, upper)]
            })
        }
    }
}
