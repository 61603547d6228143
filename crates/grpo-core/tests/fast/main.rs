//! Tests of configuration, evaluation of batches, and generated documentation.

mod advantages;
#[cfg(feature = "format")]
mod batch_file;
mod documents;
mod evaluate;
mod loss_config;
mod mismatch;
mod value_loss;
