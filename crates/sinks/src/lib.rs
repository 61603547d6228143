//! Metrics of a run for TensorBoard and Weights & Biases, in the files that their own programs read.
//!
//! Use it to show the metrics of a training run where others are shown, without Python in the process. Both sinks take rows of
//! scalars. A row belongs to a series (`train`, `eval`, ...) and to a step of it; a metric is shown
//! as `series/name`. Opening a sink where an interrupted run has left its part continues it: that part is never written to
//! again, and steps that it holds are left out of what follows, because the run that goes on repeats them.
//!
//! [`Sinks`] opens those that the sections `logging` and `wandb` of a configuration ask for; each can be opened alone, too:
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
    /// Adds the row of `series` at `step`: names and values, which need not be finite. A step that the series has already
    /// is left out.
    ///
    /// # Errors
    /// [`Error::Io`].
    fn log(&mut self, series: &str, step: u64, values: &[(&str, f64)]) -> Result<()>;

    /// Makes durable what was logged.
    ///
    /// # Errors
    /// [`Error::Io`].
    fn flush(&mut self) -> Result<()>;

    /// Ends the files of the run. `exit_code` is 0 unless the run failed.
    ///
    /// # Errors
    /// [`Error::Io`].
    fn finish(&mut self, exit_code: i32) -> Result<()>;
}
