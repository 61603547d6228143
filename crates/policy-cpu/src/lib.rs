#![doc = include_str!("../README.md")]
//! [`CpuPolicy`] implements [`grpo_policy::Policy`]; any [`grpo_core::Backend`] can compute the loss.
//!
//! ```
//! use grpo_policy::{Policy, RolloutRequest, Sampling};
//! use grpo_policy_cpu::{CpuPolicy, PolicyLoss};
//!
//! # fn main() -> grpo_policy::Result<()> {
//! let loss = PolicyLoss {
//!     config: grpo_core::LossConfig::default().into(),
//!     backend: std::sync::Arc::new(grpo_backend_cpu::CpuBackend::new()),
//!     implementation: grpo_core::Implementation::Fused,
//!     max_tokens: 64,
//! };
//! let mut policy = CpuPolicy::new(&grpo_models::ModelConfig::default(), 0, loss)?;
//! let (prompts, sampling) = ([vec![1, 5, 9]], Sampling::Greedy);
//! let request = RolloutRequest::new(&prompts, 4, sampling).with_stop_ids(&[2]);
//! assert_eq!(policy.generate(&request)?.len(), 1);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod cpu_policy;
pub mod decoder;
mod gradients;
mod logits;
mod loss;
mod memory;
mod micro_batch;
mod optimizer;
mod ref_policy;
mod rollout;
mod sequences;

pub use cpu_policy::CpuPolicy;
pub use decoder::Decoder;
pub use gradients::GradientSum;
pub use loss::PolicyLoss;
pub use memory::StepMemory;
