//! Programs on XLA's CPU.

mod baseline;
mod comparison;
