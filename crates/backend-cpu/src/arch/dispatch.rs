//! Compiles one function for every instruction set.
//!
//! Row statistics, gradients and conversions are written once, as `#[inline(always)]` functions that are generic over
//! [`MulAdd`]; [`simd_dispatch`] compiles them for every instruction set.
#![allow(unsafe_code)]

/// Computes a*b + c, fused if there is an instruction for it.
pub(crate) trait MulAdd {
    fn mul_add(a: f32, b: f32, c: f32) -> f32;
}

/// One instruction with one rounding.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) struct FusedMulAdd;
/// Two roundings; without an instruction, fused arithmetic would be a library call.
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

/// `simd_dispatch! { pub(crate) fn name[E: Bound](arguments) -> Result = body }` defines `name(isa, arguments)`, generic
/// over `E` if that is there. It runs `body::<M: MulAdd>(arguments)`, an `#[inline(always)]` function, compiled for the
/// instruction set `isa`.
macro_rules! simd_dispatch {
    ($(#[$meta:meta])* $visible:vis fn $name:ident $([$generic:ident: $bound:path])? (
        $($argument:ident: $type:ty),* $(,)?
    ) $(-> $result:ty)? = $body:ident) => {
        $(#[$meta])*
        #[inline]
        #[allow(unsafe_code)]
        $visible fn $name$(<$generic: $bound>)?(isa: $crate::arch::isa::IsaToken, $($argument: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn avx512$(<$generic: $bound>)?($($argument: $type),*) $(-> $result)? {
                    $body::<$crate::arch::dispatch::FusedMulAdd>($($argument),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2$(<$generic: $bound>)?($($argument: $type),*) $(-> $result)? {
                    $body::<$crate::arch::dispatch::FusedMulAdd>($($argument),*)
                }
                if isa.get() >= $crate::arch::isa::Isa::Avx512 {
                    // SAFETY: a token exists only for instruction sets of this processor.
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
