#![doc = include_str!("../README.md")]
//! A [`Task`] is a family of problems with a verifier; [`TaskMixture`] draws from several tasks without end and keeps a held-out split.
//! [`FileDataset`] reads rows from JSON lines, JSON and, with the feature `parquet`, Parquet; [`DataConfig::expand_paths`] finds files, also those
//! of a folder or a name on a [`DatasetHub`]. A training loop takes any [`Dataset`], whose whole
//! state is a cursor; [`open`] opens the one that a configuration names.
#![forbid(unsafe_code)]

mod config;
mod dataset;
mod error;
mod files;
mod mixture;
mod open;
mod prompt;
mod repository;
pub mod task;

pub use config::{
    AdditionConfig, ApplyChatTemplate, ComparisonConfig, CountdownConfig, DataConfig, DataFile, FewShot, FileFormat,
    History, ReverseConfig, SortingConfig, TasksConfig, at_home,
};
pub use dataset::{Dataset, Item};
pub use error::{Error, Result};
pub use files::{ANSWER_COLUMNS, Column, Columns, DataReport, FileDataset, FileReport, RowIndex};
pub use mixture::{TaskMixture, WeightedTasks};
pub use open::open;
pub use prompt::{Prompt, PromptEncoder};
pub use repository::{DatasetHub, HubError, data_files};
pub use task::{Problem, Task};
