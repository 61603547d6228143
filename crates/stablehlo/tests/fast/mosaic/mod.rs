//! Mosaic kernels: their text, their types and their numbers.

mod errors;
mod kernels;
mod numbers;
mod text;
