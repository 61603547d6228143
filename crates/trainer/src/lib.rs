//! The learning engine: a small decoder, verifiable tasks, rollouts and GRPO steps.
//!
//! [`Trainer`] is a whole run, one step at a time:
//!
//! ```no_run
//! use trainer::{Phase, TrainConfig, Trainer};
//!
//! # fn main() -> trainer::Result<()> {
//! let mut run = Trainer::new(TrainConfig::default())?;
//! while run.phase() == Phase::Warmup {
//!     run.warmup_step()?;
//! }
//! let before = run.evaluate()?.pass_at_1;
//! while run.phase() == Phase::Grpo {
//!     run.grpo_step()?;
//! }
//! println!("pass@1 {before} -> {}", run.evaluate()?.pass_at_1);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

pub mod backends;
pub mod coefficients;
pub mod dataset;
pub mod error;
pub mod eval;
pub mod loss;
mod micro_batch;
pub mod model;
pub mod optim;
mod reference;
pub mod reward;
pub mod rng;
pub mod rollout;
pub mod run;
pub mod sequences;
pub mod step;
pub mod task;
pub mod tokenizer;
pub mod train_config;
pub mod trainer;
pub mod warmup;

pub use error::{Error, Result};
pub use train_config::TrainConfig;
pub use trainer::{Counters, Phase, TrainState, Trainer};
