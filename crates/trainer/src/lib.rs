#![doc = include_str!("../README.md")]
//! The traits are [`policy::Policy`], [`models::Tokenizer`], [`data::Dataset`], [`rewards::RewardFn`] and [`policy::RolloutEngine`].
//! [`Parts`] gathers their implementations, and [`Trainer::with_parts`] takes them.
#![forbid(unsafe_code)]

mod ahead;
pub mod coefficients;
mod drift;
pub mod error;
pub mod eval;
mod lockstep;
mod micro_batch;
mod overview;
mod parts;
mod pass_rule;
pub mod step;
pub mod trainer;
mod updates;
mod warmup;

/// The crates of the traits of [`Parts`], so that a program with its own parts depends on this package alone.
pub use {
    grpo_agents as agents, grpo_core, grpo_data as data, grpo_models as models, grpo_policy as policy,
    grpo_rewards as rewards,
};

pub use error::{Error, Result};
pub use grpo_run_config::{ModelSource, TrainConfig};
pub use overview::Overview;
pub use parts::Parts;
pub use trainer::{Counters, Phase, Rows, TrainState, Trainer, rows_to_try};
pub use warmup::WarmupReport;
