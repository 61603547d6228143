//! Rows of files: what is read, in which order, and what is refused.

mod bad_input;
mod files;
#[cfg(feature = "parquet")]
mod parquet;
mod prompts;
mod support;
