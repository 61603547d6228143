//! Programs and kernels through the TPU compiler.

mod mosaic;
mod programs;
