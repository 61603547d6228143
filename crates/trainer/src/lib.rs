//! The training loop: warm-up, GRPO steps and evaluation.
//!
//! The loop works with traits: a [`policy::Policy`] that holds the weights, a [`models::Tokenizer`], a [`data::Dataset`], reward
//! functions ([`rewards::RewardFn`]) and a [`policy::RolloutEngine`]. [`Parts`] gathers them; the defaults are those that the
//! configuration names. [`Trainer`] is a run, one step at a time; `grpo_run::Run` is a run in its folder.
//!
//! ```no_run
//! use trainer::{Phase, TrainConfig, Trainer};
//!
//! # fn main() -> trainer::Result<()> {
//! let mut run = Trainer::new(TrainConfig::built_in())?;
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

mod adapter;
pub mod coefficients;
pub mod device;
pub mod error;
pub mod eval;
mod factory;
mod mesh;
mod micro_batch;
mod prepared;
mod pretrained;
mod prompts;
mod rollout;
pub mod step;
mod stops;
pub mod trainer;
mod updates;
mod warmup;

pub use error::{Error, Result};
pub use factory::{Parts, export_policy};
pub use mesh::axis_rules;
pub use prepared::{Overview, Prepared};
pub use pretrained::open_model;
pub use prompts::{check_rows, count_tokens, encode_prompt, open_data, open_tokenizer, opens_think};
pub use rewards::kill_programs as kill_reward_programs;
pub use run_config::{ModelSource, TrainConfig};
pub use trainer::{Counters, Phase, TrainState, Trainer};
pub use warmup::WarmupReport;
