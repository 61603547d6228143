#![doc = include_str!("../README.md")]
//! A [`RewardFn`] scores completions; [`Rewards`] is a weighted sum of built-in functions ([`RewardConfig`]), a [`Program`], an HTTP
//! endpoint, or your own functions. A completion that a function fails to score has no reward; the run continues, and [`Failures`] counts
//! failures.
#![forbid(unsafe_code)]

mod answer;
mod built_in;
mod config;
mod error;
mod external;
mod failures;
pub mod math;
mod patterns;
mod plain;
pub mod programs;
mod reward_fn;
mod thoughts;
mod weighted;

pub use answer::{AnswerFrom, AnswerRule};
pub use built_in::{
    Choice, Correct, Environment, Exact, Json, JsonConfig, Length, LengthConfig, LengthMode, MathEquivalence,
    Normalized, Numeric, Partial, Regex, RegexConfig, SoftOverlongPunishment, TagCount, Terminated, ThinkFormat,
    normalize_text, numbers_equal,
};
pub use config::RewardConfig;
pub use error::{Error, Result};
#[cfg(feature = "http")]
pub use external::Http;
pub use external::{HttpConfig, Program, ProgramConfig, kill_programs};
pub use failures::Failures;
pub use reward_fn::{Conversation, RewardFailure, RewardFn, RewardInput, Score};
pub use thoughts::ThoughtMarks;
pub use weighted::{Reward, Rewards};
