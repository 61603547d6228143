//! Compiles one function for every instruction set.
//!
//! Avoids a copy of row statistics, gradients and conversions per instruction set: each is written once, as an
//! `#[inline(always)]` function that is generic over [`MulAdd`], and [`simd_dispatch`] compiles it for all of them.
#![allow(unsafe_code)]

/// How a*b + c is made: fused where there is an instruction for it.
pub(crate) trait MulAdd {
    fn mul_add(a: f32, b: f32, c: f32) -> f32;
}

/// One rounding, in one instruction.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) struct FusedMulAdd;
/// Two roundings; fused arithmetic would be a library call.
pub(crate) struct SeparateMulAdd;

impl MulAdd for FusedMulAdd {
    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

impl MulAdd for SeparateMulAdd {
    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
}

/// `simd_dispatch! { pub(crate) fn name(arguments) -> Result = body }` makes `name(isa, arguments)`, which runs
/// `body::<M: MulAdd>(arguments)`, an `#[inline(always)]` function, compiled for the instruction set `isa`.
macro_rules! simd_dispatch {
    ($(#[$meta:meta])* $visible:vis fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? = $body:ident) => {
        $(#[$meta])*
        #[inline]
        #[allow(unsafe_code)]
        $visible fn $name(isa: $crate::arch::isa::IsaToken, $($argument: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn avx512($($argument: $type),*) $(-> $result)? {
                    $body::<$crate::arch::dispatch::FusedMulAdd>($($argument),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($argument: $type),*) $(-> $result)? {
                    $body::<$crate::arch::dispatch::FusedMulAdd>($($argument),*)
                }
                if isa.get() >= $crate::arch::isa::Isa::Avx512 {
                    // SAFETY: a token exists only for what the processor has.
                    return unsafe { avx512($($argument),*) };
                }
                if isa.get() >= $crate::arch::isa::Isa::Avx2 {
                    // SAFETY: as above.
                    return unsafe { avx2($($argument),*) };
                }
            }
            let _ = isa;
            $body::<$crate::arch::dispatch::SeparateMulAdd>($($argument),*)
        }
    };
}

pub(crate) use simd_dispatch;
