//! LoRA adapters, with PEFT's names and file layout.

mod config;
mod peft;

pub use config::{AdaptedExperts, AdaptedMatrix, LoraConfig, TargetModules};
pub use peft::{Adapter, AdapterOptions, AdapterWriter};
