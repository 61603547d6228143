//! Instruction sets that kernels are made for, and which of them this processor has.
//!
//! A kernel is written once and compiled for every instruction set by [`super::simd_dispatch`]; only matrix products have
//! code of their own for each.

use super::amx;
use crate::error::unsupported;
use grpo_core::error::Result;
use strum::{EnumCount, EnumString, IntoStaticStr, VariantArray};

/// Instruction sets, from the one that every processor has to the fastest. Each includes those before it.
///
/// Results depend on the instruction set in their last bits, and on nothing else but the input.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, EnumCount, EnumString, IntoStaticStr, VariantArray,
)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum Isa {
    /// What the compiler makes of plain Rust for the target's baseline.
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
    /// All of them, in order.
    pub const ALL: [Self; Self::COUNT] = *Self::VARIANTS.first_chunk().unwrap();

    /// `portable`, `avx2`, `avx512`, `avx512_bf16`, `amx`.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// The instruction set called `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        name.parse().ok()
    }

    /// The fastest that this processor has, and for AMX that the system lets this process use.
    ///
    /// Products of bf16 pairs are twice as fast as those of f32 on a Zen 4, and half as fast on an Intel Xeon that has AMX, which a
    /// hypervisor may hide. So whether AVX-512 with them is faster than without is measured, once in a process.
    pub fn detect() -> Self {
        match Self::most() {
            Self::Avx512Bf16 if !pairs_pay() => Self::Avx512,
            most => most,
        }
    }

    /// The one that this processor has which includes all others that it has.
    fn most() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.is_available()).unwrap_or(Self::Portable)
    }

    /// Whether this processor has it and the system allows it.
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

    /// A token for this instruction set.
    ///
    /// # Errors
    /// [`grpo_core::Error::Unsupported`] when this processor lacks it.
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

/// Whether products of bf16 pairs are faster than those of f32 on this processor.
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

/// Proof that this processor has an instruction set, which makes calling its kernels sound. [`Isa::checked`] is the only way
/// to get one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct IsaToken(Isa);

impl IsaToken {
    /// A token for the fastest instruction set that this processor has.
    pub(crate) fn detect() -> Self {
        Self(Isa::detect())
    }

    /// The instruction set that this token proves.
    pub(crate) fn get(self) -> Isa {
        self.0
    }

    /// Tokens for every instruction set that this processor has.
    #[cfg(test)]
    pub(crate) fn available() -> impl Iterator<Item = Self> {
        Isa::ALL.into_iter().filter_map(|isa| isa.checked().ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_and_the_portable_set_is_everywhere() {
        for isa in Isa::ALL {
            assert_eq!(Isa::from_name(isa.name()), Some(isa));
            assert_eq!(isa.checked().is_ok(), isa.is_available());
        }
        assert_eq!(Isa::from_name("sse9"), None);
        assert!(Isa::Portable.is_available());
        assert!(Isa::detect().is_available());
        // What is slower than f32 is there when asked for, and not chosen.
        assert!(Isa::detect() == Isa::most() || (Isa::most(), Isa::detect()) == (Isa::Avx512Bf16, Isa::Avx512));
        assert_eq!(Isa::detect(), Isa::detect());
    }
}
