#![doc = include_str!("../README.md")]
//! [`decoder`] builds the operations of a decoder, [`DeviceWeights`] holds its parameters on a device, and [`DeviceRollout`] samples
//! completions there, with a KV cache that never leaves the device.
//!
//! ```no_run
//! use grpo_backend_tpu::plugins::Kind;
//! use grpo_policy::{RolloutRequest, Sampling};
//! use grpo_policy_pjrt::decoder::Compute;
//! use grpo_policy_pjrt::{DeviceRollout, DeviceWeights, RolloutOptions, Runtime};
//!
//! # fn main() -> grpo_policy_pjrt::Result<()> {
//! let folder = grpo_models::ModelFolder::open("Qwen2.5-0.5B-Instruct".as_ref())?;
//! let runtime = Runtime::open(Kind::Cpu, None)?;
//! let weights = DeviceWeights::from_weights(&runtime, folder.config(), &folder.weights()?, grpo_stablehlo::Dtype::Bf16)?;
//! let mut rollout = DeviceRollout::new(&runtime, folder.config(), Compute::Bf16, RolloutOptions::default())?;
//! let (prompts, stop_ids) = (vec![vec![9707, 11]], [151_645]);
//! let sampling = Sampling::Greedy;
//! let request =
//!     RolloutRequest::new(&prompts, 32, sampling).with_stop_ids(&stop_ids);
//! let completions = rollout.generate(&weights, &request)?;
//! assert_eq!(completions.len(), 1);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod bytes;
pub mod decoder;
mod error;
mod leaves;
mod memory;
mod modules;
mod pjrt_policy;
mod processes;
mod program;
mod rollout;
mod runtime;
mod sharding;
mod storage;
mod train;
mod weights;

pub use error::{Error, Result};
pub use grpo_backend_tpu::devices::{Argument, DeviceTensor};
pub use memory::TrainingSizes;
pub use pjrt_policy::{PjrtPolicy, PjrtPolicyOptions};
pub use program::Program;
pub use rollout::{DeviceRollout, RequestOptions, RolloutOptions, RolloutPrograms, RolloutSizes};
pub use runtime::Runtime;
pub use train::{TrainPrograms, TrainShape, saved_bytes, saved_on_device};
pub use weights::{DeviceWeights, common_refinement};
