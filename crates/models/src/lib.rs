#![doc = include_str!("../README.md")]
//! ```
//! use grpo_models::{CharTokenizer, ModelConfig, Tokenizer};
//!
//! # fn main() -> grpo_models::Result<()> {
//! let tokenizer = CharTokenizer;
//! let config = ModelConfig { vocab_size: tokenizer.vocab_size(), ..ModelConfig::default() };
//! config.validate()?;
//! assert_eq!(tokenizer.decode(&tokenizer.encode("1+2=3")?)?, "1+2=3");
//! # Ok(())
//! # }
//! ```
// Denied instead of forbidden: only `weights::shard`, which maps files into memory, is allowed to use it.
#![deny(unsafe_code)]

mod chat_template;
mod config;
mod error;
mod experts;
mod flops;
mod folder;
mod hub;
mod layer;
mod linear_attention;
mod lora;
mod memory;
mod names;
mod optimizer;
mod parameters;
mod process_memory;
mod quantization;
mod rope;
mod tensor;
mod tokenizer;
mod turns;
mod weights;

pub use chat_template::{ChatTemplate, map_on_template_threads};
pub use config::{ModelConfig, QueryScaling, RopeScaling, RopeType};
pub use error::{Error, Result};
pub use experts::{ClampedSwiglu, Experts, SharedExpert, SigmoidRouter};
pub use flops::TokenCounts;
pub use folder::{
    ExportOptions, Family, FolderWriter, GenerationDefaults, ModelCard, ModelFolder, Wrapper, from_python_json,
};
pub use hub::{Hub, HubAccess, TokenSource, locate, locate_weights};
pub use layer::{Activation, AttentionHeads, LayerRope, LayerSpec, Mixer, NormPlacement};
pub use linear_attention::LinearAttention;
pub use lora::{AdaptedExperts, AdaptedMatrix, Adapter, AdapterOptions, AdapterWriter, LoraConfig, TargetModules};
pub use memory::{MemoryTable, Trained, TrainedMemory, TrainingMemory, UPDATES};
pub use names::text_tensor;
pub use optimizer::{MOMENT_BLOCK, OptimizerName};
pub use parameters::{Axis, Initial, LayerMatrix, Matrix, PARAMETERS, Parameter, ParameterSpec, Role};
pub use process_memory::{MemoryLimit, MemoryLimits, available_memory, resident_memory};
pub use quantization::{Quantization, QuantizedMatrix, QuantizedMemory};
pub use rope::Rotary;
pub use tensor::NamedTensor;
pub use tokenizer::{CharTokenizer, HfTokenizer, Tokenizer};
pub use turns::{TRAINING_TEMPLATES, TurnTokens, with_names};
pub use weights::{Dtype, WeightTensor, Weights};
