//! What needs no compiler: kernels of TPUs, interpreted.

mod mosaic;
