//! Rows of files: contents, order and errors.

mod bad_input;
mod files;
#[cfg(feature = "parquet")]
mod parquet;
mod prompts;
mod repository;
mod support;

grpo_testkit::tiers!();
