#![doc = include_str!("../README.md")]
//! [`Run`] drives a [`grpo_trainer::Trainer`]. Nothing is printed; an [`Observer`] receives events. All state of the run is in its folder
//! (counters and weights in checkpoints, the rest in metrics.jsonl), so a resumed run ends with the same result as an uninterrupted one.
#![forbid(unsafe_code)]

mod best;
mod card;
pub mod changes;
pub mod checkpoint;
pub mod curves;
mod digest;
pub mod dir;
mod error;
mod export;
mod fingerprint;
mod follower;
pub mod jsonl;
mod logs;
mod members;
pub mod observer;
mod processes;
mod row_index;
mod rows;
mod run;
mod shared;
mod sinks;
pub mod summary;

pub use best::Best;
pub use error::{Error, Result};
pub use fingerprint::start_folder;
pub use follower::Follower;
pub use members::is_follower;
pub use observer::{Event, Observer};
pub use run::{Ending, Run, failure};
