#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod adapter;
mod datasets;
pub mod device;
mod engine;
mod error;
mod factory;
mod prepared;
mod pretrained;
mod prompts;

pub use datasets::expand_paths;
pub use error::{Error, Result};
pub use factory::export_policy;
pub use prepared::{Prepared, parts, parts_with_tokenizer, trainer};
pub use pretrained::open_model;
pub use prompts::{check_rows, count_tokens, open_data, open_tokenizer};
