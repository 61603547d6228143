//! Tests without a compiler: interpreted TPU kernels.

mod mosaic;
