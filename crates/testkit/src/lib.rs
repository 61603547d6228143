//! What tests of the GRPO loss share: cases that exercise what they claim, losses by name, and comparisons that say how far
//! off a result was.
//!
//! A [`Case`] is a policy and a batch sampled from it, of a [`Shape`] and a seed. [`loss`] has settings for every way in which
//! tokens have to do with each other. [`run`] makes one call of a plan, and [`Differences`] holds what came out to the f64 oracle.

#![forbid(unsafe_code)]

mod arranged;
mod case;
pub mod cpu;
mod differences;
pub mod family;
mod output;
pub mod python;
mod tensor;
pub mod xla_cpu;

pub use case::{Case, Shape, normal};
pub use differences::{Differences, EXACT, ROUNDED, assert_flows, difference};
pub use family::{config, loss};
pub use output::{Output, accumulate, run};
pub use tensor::{Tensor, transposed};
