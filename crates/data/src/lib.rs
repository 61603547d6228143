//! Problems to train a policy on: what is asked, what the right answers are, and in which order problems come.
//!
//! A [`Task`] is a family of problems with a verifier; [`TaskMixture`] draws from several of them without end and keeps a
//! held-out split. A training loop takes any [`Dataset`], whose whole state is a cursor.
//!
//! ```
//! use data::{DataConfig, Dataset, TaskMixture};
//!
//! # fn main() -> data::Result<()> {
//! let mut problems = TaskMixture::new(&DataConfig::default(), 0)?;
//! let item = problems.next_batch(1)?.remove(0);
//! assert_eq!(item.prompt.to_string().len(), "37+48=".len());
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod config;
mod dataset;
mod error;
mod mixture;
mod prompt;
pub mod task;

pub use config::{
    AdditionConfig, ComparisonConfig, CountdownConfig, DataConfig, ReverseConfig, SortingConfig, TasksConfig,
};
pub use dataset::{Dataset, Item};
pub use error::{Error, Result};
pub use mixture::{TaskMixture, WeightedTasks};
pub use prompt::Prompt;
pub use task::{Problem, Task};
