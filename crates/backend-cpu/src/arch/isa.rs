//! Instruction sets of the kernels, and their detection.
//!
//! A kernel is written once and compiled for every instruction set by [`super::simd_dispatch`]; only matrix products
//! have separate code for each.

use super::amx;
use crate::error::unsupported;
use grpo_core::error::Result;
use strum::{EnumCount, EnumString, IntoStaticStr, VariantArray};

/// Instruction sets, from the baseline to the fastest. Each one includes all before it.
///
/// The last bits of results depend on the instruction set, but on nothing else except for the input.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, EnumCount, EnumString, IntoStaticStr, VariantArray,
)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust, compiled for the target's baseline.
    Portable,
    /// AVX2 with fused multiply-add.
    Avx2,
    /// AVX-512 (F, BW, DQ, VL).
    Avx512,
    /// AVX-512 with products of bf16 pairs.
    Avx512Bf16,
    /// AMX: products of bf16 tiles.
    Amx,
}

impl Isa {
    /// All instruction sets, in order.
    pub const ALL: [Self; Self::COUNT] = *Self::VARIANTS.first_chunk().unwrap();

    /// Returns `portable`, `avx2`, `avx512`, `avx512_bf16` or `amx`.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Returns the instruction set called `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        name.parse().ok()
    }

    /// Returns the fastest instruction set of this processor; AMX only if the system permits it to this process.
    ///
    /// Compared with f32, products of bf16 pairs are twice as fast on a Zen 4, but half as fast on Intel Xeons with
    /// AMX, which a hypervisor may hide. So their speed is measured, once per process.
    pub fn detect() -> Self {
        match Self::most() {
            Self::Avx512Bf16 if !pairs_pay() => Self::Avx512,
            most => most,
        }
    }

    /// Returns the last instruction set in order that this processor has.
    fn most() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.is_available()).unwrap_or(Self::Portable)
    }

    /// Returns `true` if this processor has it and the system permits it.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        let (avx2, avx512, bf16) = (
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl"),
            is_x86_feature_detected!("avx512bf16"),
        );
        #[cfg(not(target_arch = "x86_64"))]
        let (avx2, avx512, bf16) = (false, false, false);
        match self {
            Self::Portable => true,
            Self::Avx2 => avx2,
            Self::Avx512 => avx2 && avx512,
            Self::Avx512Bf16 => avx2 && avx512 && bf16,
            Self::Amx => avx2 && avx512 && bf16 && amx::is_available(),
        }
    }

    /// Returns a token for this instruction set.
    ///
    /// # Errors
    /// [`grpo_core::Error::Unsupported`] if this processor lacks it.
    pub(crate) fn checked(self) -> Result<IsaToken> {
        if self.is_available() {
            return Ok(IsaToken(self));
        }
        Err(unsupported(
            format!("instruction set `{}` on this machine", self.name()),
            format!("it offers up to `{}`", Self::most().name()),
        ))
    }
}

/// Returns `true` if products of bf16 pairs are faster than products of f32 on this processor.
#[cfg(target_arch = "x86_64")]
fn pairs_pay() -> bool {
    use std::sync::OnceLock;
    static PAY: OnceLock<bool> = OnceLock::new();
    *PAY.get_or_init(super::x86_64::avx512::pairs_pay)
}

#[cfg(not(target_arch = "x86_64"))]
fn pairs_pay() -> bool {
    false
}

/// Proof that this processor has an instruction set, which makes calls of its kernels sound. Only [`Isa::checked`] and
/// [`IsaToken::detect`] create tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct IsaToken(Isa);

impl IsaToken {
    /// Returns a token for the fastest instruction set of this processor.
    pub(crate) fn detect() -> Self {
        Self(Isa::detect())
    }

    /// Returns the instruction set of the token.
    pub(crate) fn get(self) -> Isa {
        self.0
    }

    /// Returns tokens for all instruction sets of this processor.
    #[cfg(test)]
    pub(crate) fn available() -> impl Iterator<Item = Self> {
        Isa::ALL.into_iter().filter_map(|isa| isa.checked().ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn isa_names_parse_and_portable_is_always_available() {
        for isa in Isa::ALL {
            assert_eq!(Isa::from_name(isa.name()), Some(isa));
            assert_eq!(isa.checked().is_ok(), isa.is_available());
        }
        assert_eq!(Isa::from_name("sse9"), None);
        assert!(Isa::Portable.is_available());
        assert!(Isa::detect().is_available());
        // bf16 pairs are available on request, but not chosen if they are slower than f32.
        assert!(Isa::detect() == Isa::most() || (Isa::most(), Isa::detect()) == (Isa::Avx512Bf16, Isa::Avx512));
        assert_eq!(Isa::detect(), Isa::detect());
    }
}
