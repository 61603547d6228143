#![doc = include_str!("../README.md")]
//! [`parity`] takes files of the format `grpo-batch/1` with inputs and, optionally, another system's results; [`gradcheck`] takes problems of
//! [`grpo_bench`] and compares gradients with finite differences of the loss; [`model`] takes a decoder and the results of `transformers` for
//! the same tokens.
//!
//! ```
//! use grpo_check::parity::{Check, check};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/trl_dapo_default.safetensors");
//! let file = grpo_core::BatchFile::parse(&std::fs::read(path)?)?;
//! let report = check(&grpo_backend_cpu::CpuBackend::new(), "trl_dapo_default", &file, &Check::default())?;
//! assert!(report.passed(), "{:#?}", report.rows);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod error;
pub mod gradcheck;
pub mod loss_file;
pub mod model;
pub mod parity;

pub use error::{Error, Result};
