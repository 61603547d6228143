//! StableHLO programs and Mosaic TPU kernels as typed graphs that print themselves.
#![forbid(unsafe_code)]

pub mod mosaic;
