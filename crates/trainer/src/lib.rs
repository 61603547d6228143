#![doc = include_str!("../README.md")]
//! The traits are [`policy::Policy`], [`models::Tokenizer`], [`data::Dataset`], [`rewards::RewardFn`] and [`policy::RolloutEngine`].
//! [`Parts`] gathers their implementations, and [`Trainer::with_parts`] takes them.
#![forbid(unsafe_code)]

mod adapter;
mod ahead;
pub mod coefficients;
mod datasets;
pub mod device;
mod drift;
mod engine;
pub mod error;
pub mod eval;
mod factory;
mod lockstep;
mod micro_batch;
mod prepared;
mod pretrained;
mod prompts;
pub mod step;
pub mod trainer;
mod updates;
mod warmup;

/// The crates of the traits of [`Parts`], so that a program with its own parts depends on this package alone.
pub use {
    grpo_agents as agents, grpo_core, grpo_data as data, grpo_models as models, grpo_policy as policy,
    grpo_rewards as rewards,
};

pub use datasets::expand_paths;
pub use error::{Error, Result};
pub use factory::{Parts, export_policy};
pub use grpo_run_config::{ModelSource, TrainConfig};
pub use prepared::{Overview, Prepared};
pub use pretrained::open_model;
pub use prompts::{check_rows, count_tokens, open_data, open_tokenizer};
pub use rewards::kill_programs as kill_reward_programs;
pub use trainer::{Counters, Phase, TrainState, Trainer, rows_to_try};
pub use warmup::WarmupReport;
