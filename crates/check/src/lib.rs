//! Checks of the loss: implementations against batch files and the f64 oracle, and gradients against differences.
//!
//! Use it to find out whether a backend, or a loss that was made elsewhere, computes the right numbers. [`parity`] takes files
//! of the format `grpo-batch/1` with inputs and, where another system made them, its results; [`gradcheck`] takes problems of
//! [`grpo_bench`] and compares gradients with differences of the loss; [`model`] takes a decoder and what `transformers` made of the same
//! tokens. `grpo parity` and `grpo gradcheck` print what they
//! report.
//!
//! ```
//! use grpo_check::parity::{Check, check};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/trl_dapo_default.safetensors");
//! let file = grpo_core::BatchFile::parse(&std::fs::read(path)?)?;
//! let report = check(&backend_cpu::CpuBackend::new(), "trl_dapo_default", &file, &Check::default())?;
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
