//! Mosaic TPU kernels.
