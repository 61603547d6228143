//! Code for specific instruction sets, and the choice between them at run time.
//!
//! * [`isa`]: the instruction sets, and [`IsaToken`], the proof that this processor has one.
//! * [`dispatch`]: [`simd_dispatch`], which compiles one generic function for every instruction set.
//! * [`microkernel`]: the product of two packed panels, the innermost loop of [`crate::gemm`]; [`panel`]: their sizes.
//! * [`strip`]: the product of a few rows with columns that are not packed.
//! * [`generic`], [`x86_64`]: code for plain Rust, and for AVX2, AVX-512 and AMX.
//! * `tiles`, in tests: AMX in plain Rust, so that the rest of its path is tested on any machine.
//! * [`caches`]: the sizes of the L1 and L2 caches.

pub(crate) mod caches;
pub(crate) mod dispatch;
pub(crate) mod generic;
pub(crate) mod isa;
pub(crate) mod microkernel;
pub(crate) mod panel;
pub(crate) mod strip;
#[cfg(test)]
pub(crate) mod tiles;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86_64;

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
pub(crate) mod no_amx;
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
pub(crate) use no_amx as amx;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) use x86_64::amx;

pub(crate) use dispatch::{MulAdd, simd_dispatch};
pub(crate) use generic::prefetch;
pub use isa::Isa;
pub(crate) use isa::IsaToken;
