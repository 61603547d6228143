//! What describes a language model: its configuration, its parameters by name, and its tokenizer.
//!
//! The names are those of a Hugging Face model folder ([`ModelConfig`] reads like its `config.json`). Nothing is run here,
//! and no tensor library is known: policies take these types and do the computing.
//!
//! ```
//! use models::{CharTokenizer, ModelConfig, Tokenizer};
//!
//! # fn main() -> models::Result<()> {
//! let tokenizer = CharTokenizer;
//! let config = ModelConfig { vocab_size: tokenizer.vocab_size(), ..ModelConfig::default() };
//! config.validate()?;
//! assert_eq!(tokenizer.decode(&tokenizer.encode("1+2=3")?)?, "1+2=3");
//! # Ok(())
//! # }
//! ```
// Denied and not forbidden: one function, `weights::shard::map`, maps files into memory.
#![deny(unsafe_code)]

mod chat_template;
mod config;
mod error;
mod folder;
mod hub;
mod lora;
mod memory;
mod parameters;
mod rope;
mod tensor;
mod tokenizer;
mod weights;

pub use chat_template::{ChatTemplate, map_on_template_threads};
pub use config::{ModelConfig, RopeScaling};
pub use error::{Error, Result};
pub use folder::{ExportOptions, Family, FolderWriter, GenerationDefaults, ModelCard, ModelFolder, from_python_json};
pub use hub::{Hub, locate, locate_config, locate_tokenizer, locate_weights};
pub use lora::{AdaptedMatrix, Adapter, AdapterOptions, AdapterWriter, LoraConfig, TargetModules};
pub use memory::{MemoryTable, Trained, TrainingMemory, UPDATES, available_memory, resident_memory};
pub use parameters::Parameter;
pub use tensor::NamedTensor;
pub use tokenizer::{CharTokenizer, HfTokenizer, Tokenizer};
pub use weights::{Dtype, WeightTensor, Weights};
