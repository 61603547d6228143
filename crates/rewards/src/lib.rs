//! Rewards: what a completion is worth.
//!
//! A [`RewardFn`] judges completions; [`Rewards`] is a weighted sum of them: built in ([`RewardConfig`]), a [`Program`] or an [`Http`]
//! endpoint, or your own. One that fails for a completion costs it its reward and nothing else; [`Failures`] counts them.
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
//!         Some(-(input.completion_len() as f32))
//!     }
//! }
//! let rewards = Rewards::from_terms(vec![(Box::new(Brief), 0.1)])?;
//! # Ok::<(), rewards::Error>(())
//! ```
#![forbid(unsafe_code)]

mod answer;
mod built_in;
mod config;
mod error;
mod external;
mod failures;
pub mod math;
mod reward_fn;
mod weighted;

pub use answer::{AnswerFrom, AnswerRule};
pub use built_in::{
    Choice, Correct, Exact, Json, JsonConfig, Length, LengthConfig, LengthMode, MathEquivalence, Normalized, Numeric,
    Partial, Regex, RegexConfig, SoftOverlongPunishment, TagCount, Terminated, ThinkFormat, normalize_text,
    numbers_equal,
};
pub use config::RewardConfig;
pub use error::{Error, Result};
pub use external::{Http, HttpConfig, Program, ProgramConfig, kill_programs};
pub use failures::Failures;
pub use reward_fn::{RewardFailure, RewardFn, RewardInput, Score};
pub use weighted::{Reward, Rewards};
