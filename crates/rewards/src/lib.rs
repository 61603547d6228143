//! Rewards: what a completion is worth.
//!
//! A [`RewardFn`] judges one completion; [`Rewards`] is a weighted sum of them, built in ([`RewardConfig`]) or your own.
//!
//! ```
//! use rewards::{RewardFn, RewardInput, Rewards};
//!
//! struct Brief;
//! impl RewardFn for Brief {
//!     fn name(&self) -> &str {
//!         "brief"
//!     }
//!     fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
//!         Some(-(input.completion_len as f32))
//!     }
//! }
//! let rewards = Rewards::from_terms(vec![(Box::new(Brief), 0.1)])?;
//! # Ok::<(), rewards::Error>(())
//! ```
#![forbid(unsafe_code)]

mod built_in;
mod config;
mod error;
mod reward_fn;
mod weighted;

pub use built_in::{Correct, Partial, SoftOverlongPunishment, Terminated};
pub use config::RewardConfig;
pub use error::{Error, Result};
pub use reward_fn::{RewardFailure, RewardFn, RewardInput};
pub use weighted::{Reward, Rewards};
