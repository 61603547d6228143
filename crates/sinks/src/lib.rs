#![doc = include_str!("../README.md")]
//! Both sinks take rows of scalars. A row belongs to a series (`train`, `eval`, ...) and to a step of the series; a metric is displayed
//! as `series/name`. A sink opened for a resumed run continues its metrics: earlier files are never written to
//! again, and steps that they contain are skipped, because the resumed run repeats them.
//!
//! [`Sinks`] opens the sinks that the sections `logging` and `wandb` of a configuration enable; each sink can also be opened alone:
//!
//! ```
//! use grpo_sinks::{Sink, TensorBoard};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let folder = tempfile::tempdir()?;
//! let mut sink = TensorBoard::open(folder.path(), "a run with the learning rate 1e-4")?;
//! sink.log("train", 1, &[("reward", 0.25), ("loss", -0.125)])?;
//! sink.finish(0)?;
//! # Ok(())
//! # }
//! ```
//!
//! | sink | writes | open it with |
//! |---|---|---|
//! | [`TensorBoard`] | `events.out.tfevents.*` | `tensorboard --logdir FOLDER` |
//! | [`Wandb`] | `wandb/offline-run-*/run-*.wandb` | `wandb sync FOLDER` uploads it; [`wandb::upload`] runs that program |
#![forbid(unsafe_code)]

mod config;
mod error;
mod files;
mod messages;
mod sinks;
mod steps;
pub mod tensorboard;
pub mod wandb;

pub use config::{LoggingConfig, WandbConfig};
pub use error::{Error, Result};
pub use sinks::{About, Sinks};
pub use tensorboard::TensorBoard;
pub use wandb::Wandb;

/// A destination of rows of metrics.
pub trait Sink {
    /// Adds the row of `series` at `step`: names and values, which need not be finite. A step that the series already has
    /// is skipped.
    ///
    /// # Errors
    /// [`Error::Io`].
    fn log(&mut self, series: &str, step: u64, values: &[(&str, f64)]) -> Result<()>;

    /// Flushes logged rows to disk.
    ///
    /// # Errors
    /// [`Error::Io`].
    fn flush(&mut self) -> Result<()>;

    /// Closes the files of the run. `exit_code` is 0 unless the run failed.
    ///
    /// # Errors
    /// [`Error::Io`].
    fn finish(&mut self, exit_code: i32) -> Result<()>;
}
