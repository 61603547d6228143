//! Instruction sets that kernels are made for, and which of them this processor has.
//!
//! A kernel is written once as an `#[inline(always)]` function and compiled for every instruction set by
//! [`instantiate`]; only products have code of their own for each.
#![allow(unsafe_code)]

use crate::plan::unsupported;
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
    pub fn detect() -> Self {
        let found = Self::ALL.into_iter().rev().find(|isa| isa.is_available());
        found.unwrap_or(Self::Portable)
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
            Self::Amx => avx2 && avx512 && bf16 && crate::gemm::amx::is_available(),
        }
    }

    /// # Errors
    /// [`Error::Unsupported`] when this processor lacks it.
    pub(crate) fn checked(self) -> Result<Level> {
        if self.is_available() {
            return Ok(Level(self));
        }
        Err(unsupported(
            format!("instruction set `{}` on this machine", self.name()),
            format!("it offers up to `{}`", Self::detect().name()),
        ))
    }
}

/// An instruction set that this processor was seen to have: what makes calling its kernels sound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Level(Isa);

impl Level {
    pub(crate) fn isa(self) -> Isa {
        self.0
    }

    /// All that this processor has.
    #[cfg(test)]
    pub(crate) fn available() -> impl Iterator<Item = Self> {
        Isa::ALL.into_iter().filter_map(|isa| isa.checked().ok())
    }
}

/// How a*b + c is made: fused where there is an instruction for it.
pub(crate) trait MulAdd {
    fn mul_add(a: f32, b: f32, c: f32) -> f32;
}

/// One rounding, in one instruction.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) struct Fused;
/// Two roundings; fused arithmetic would be a library call.
pub(crate) struct Separate;

impl MulAdd for Fused {
    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

impl MulAdd for Separate {
    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
}

/// `instantiate! { pub(crate) fn name(arguments) -> Result = body }` makes `name(level, arguments)`, which runs
/// `body::<M: MulAdd>(arguments)`, an `#[inline(always)]` function, compiled for `level`.
macro_rules! instantiate {
    ($(#[$meta:meta])* $visible:vis fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? = $body:ident) => {
        $(#[$meta])*
        #[inline]
        #[allow(unsafe_code)]
        $visible fn $name(level: $crate::isa::Level, $($argument: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn avx512($($argument: $type),*) $(-> $result)? {
                    $body::<$crate::isa::Fused>($($argument),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($argument: $type),*) $(-> $result)? {
                    $body::<$crate::isa::Fused>($($argument),*)
                }
                if level.isa() >= $crate::isa::Isa::Avx512 {
                    // SAFETY: a level exists only for what the processor has.
                    return unsafe { avx512($($argument),*) };
                }
                if level.isa() >= $crate::isa::Isa::Avx2 {
                    // SAFETY: as above.
                    return unsafe { avx2($($argument),*) };
                }
            }
            let _ = level;
            $body::<$crate::isa::Separate>($($argument),*)
        }
    };
}

pub(crate) use instantiate;

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
    }
}
