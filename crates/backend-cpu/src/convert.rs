//! Conversions between bf16 and f32.
//!
//! A conversion consists of a few integer operations, which vectorise for every instruction set, so that kernels
//! convert at loads and stores, without function calls or separate passes. Results are bit-identical to `half`.

use half::bf16;

/// A dtype of kernel inputs and outputs; kernels compute in f32.
pub(crate) trait Element: Copy + Send + Sync {
    fn widened(self) -> f32;
    /// Rounds to the nearest value, ties to even; NaN stays NaN.
    fn nearest(x: f32) -> Self;
}

impl Element for f32 {
    #[inline(always)]
    fn widened(self) -> f32 {
        self
    }
    #[inline(always)]
    fn nearest(x: f32) -> Self {
        x
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn widened(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn nearest(x: f32) -> Self {
        Self::from_bits((rounded(x).to_bits() >> 16) as u16)
    }
}

/// Rounds to the nearest bf16 value, as f32.
#[inline(always)]
pub(crate) fn rounded(x: f32) -> f32 {
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    // Rounding could turn a NaN into infinity, so a NaN keeps its upper bits and gets the quiet bit.
    let bits = if x.is_nan() { bits | 0x0040_0000 } else { nearest };
    f32::from_bits(bits & 0xffff_0000)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::{IsaToken, MulAdd, simd_dispatch};

    simd_dispatch! { fn widen(from: &[bf16], to: &mut [f32]) = convert }
    simd_dispatch! { fn narrow(from: &[f32], to: &mut [bf16]) = convert }

    #[inline(always)]
    fn convert<M: MulAdd>(from: &[impl Element], to: &mut [impl Element]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = Element::nearest(from.widened());
        }
    }

    #[test]
    fn bf16_conversions_match_the_half_crate_bit_for_bit() {
        let all: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        // Every 997th f32, and the numbers next to every bf16 and next to halfway between two.
        let near = |x: &bf16| {
            let bits = u32::from(x.to_bits()) << 16;
            [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| f32::from_bits(bits | low))
        };
        let floats: Vec<f32> =
            (0..=u32::MAX).step_by(997).map(f32::from_bits).chain(all.iter().flat_map(near)).collect();
        for isa in IsaToken::available() {
            let (mut wide, mut narrowed) = (vec![0.0; all.len()], vec![bf16::ZERO; floats.len()]);
            widen(isa, &all, &mut wide);
            narrow(isa, &floats, &mut narrowed);
            for (wide, narrow) in wide.iter().zip(&all) {
                let expected = narrow.to_f32();
                assert!(wide.to_bits() == expected.to_bits() || wide.is_nan() && expected.is_nan(), "{narrow:?}");
            }
            for (narrowed, float) in narrowed.iter().zip(&floats) {
                assert_eq!(narrowed.to_bits(), bf16::from_f32(*float).to_bits(), "{float:e} {:x}", float.to_bits());
                assert_eq!(rounded(*float).to_bits() >> 16, u32::from(narrowed.to_bits()), "{float:e}");
            }
            for length in 0..70 {
                let mut out = vec![bf16::ONE; 70];
                narrow(isa, &floats[..length], &mut out);
                assert_eq!(out[..length], narrowed[..length]);
                assert!(out[length..].iter().all(|x| *x == bf16::ONE));
            }
        }
    }
}
