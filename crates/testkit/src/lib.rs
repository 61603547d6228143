//! Shared code of tests of the GRPO loss: cases, losses by name, and comparisons of results.
//!
//! A [`Case`] is a policy and a batch sampled from it, defined by a [`Shape`] and a seed. [`loss`] has configurations for every way in which
//! tokens depend on each other. [`run`] makes one call of a plan, and [`Differences`] compares the results with the f64 oracle.
//! [`logged`] returns the log of a call.

#![deny(unsafe_code)]

pub mod allocations;
mod arranged;
mod case;
pub mod cpu;
mod differences;
pub mod family;
mod given_logits;
mod log;
pub mod margin;
pub mod optimizer_steps;
mod output;
pub mod python;
mod tensor;
pub mod tier;
mod user_cache;
pub mod xla_cpu;

pub use case::{Case, Shape, normal};
pub use differences::{Differences, EXACT, ROUNDED, assert_flows, difference};
pub use family::{config, loss};
pub use given_logits::{logits_request, run_logits};
pub use log::logged;
pub use output::{Output, accumulate, run};
pub use tensor::{Tensor, transposed};
