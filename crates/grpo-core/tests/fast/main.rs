//! The loss itself: what a configuration means, how a batch is evaluated, what the documents say of both.

mod advantages;
#[cfg(feature = "format")]
mod batch_file;
mod documents;
mod evaluate;
mod loss_config;
mod mismatch;
mod value_loss;
