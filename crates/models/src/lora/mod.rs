//! Adapters of low rank (LoRA), with PEFT's names and in PEFT's layout.

mod config;
mod peft;

pub use config::{AdaptedMatrix, LoraConfig, TargetModules};
pub use peft::{Adapter, AdapterOptions, AdapterWriter};
