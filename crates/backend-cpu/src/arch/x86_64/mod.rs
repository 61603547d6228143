//! Code for the instruction sets of x86-64.

#[cfg(target_os = "linux")]
pub(crate) mod amx;
pub(crate) mod avx2;
pub(crate) mod avx512;
pub(crate) mod panel;
