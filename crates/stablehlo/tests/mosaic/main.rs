//! Mosaic kernels: their text, their types, their numbers, and what the TPU compiler says of them.

mod compile;
mod errors;
mod kernels;
mod numbers;
mod text;
