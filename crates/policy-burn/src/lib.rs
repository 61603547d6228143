//! A policy on the host: a small decoder in burn, sampling over a KV cache, AdamW, and the GRPO loss.
//!
//! [`BurnPolicy`] implements [`policy::Policy`], so that a training loop samples from it, scores with it and updates it without
//! knowing burn. Tensors live on burn's CPU backend Flex, in f32; the loss is computed by any [`grpo_core::Backend`].
//!
//! ```
//! use policy::{Policy, RolloutRequest, Sampling};
//! use policy_burn::{BurnPolicy, PolicyLoss};
//!
//! # fn main() -> policy::Result<()> {
//! let loss = PolicyLoss {
//!     config: grpo_core::LossConfig::default(),
//!     backend: std::sync::Arc::new(backend_cpu::CpuBackend::new()),
//!     implementation: grpo_core::Implementation::Fused,
//!     max_tokens: 64,
//! };
//! let mut policy = BurnPolicy::new(&models::ModelConfig::default(), 0, loss)?;
//! let (prompts, sampling) = ([vec![1, 5, 9]], Sampling::Greedy);
//! let request = RolloutRequest { prompts: &prompts, num_generations: 1, max_completion_length: 4, stop_ids: &[2], stop: None, sampling };
//! assert_eq!(policy.generate(&request)?.len(), 1);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod adamw;
mod burn_policy;
pub mod decoder;
mod gradients;
mod logits;
mod loss;
mod memory;
mod micro_batch;
mod ref_policy;
mod rollout;
mod sequences;

pub use adamw::AdamW;
pub use burn_policy::BurnPolicy;
pub use decoder::Decoder;
pub use gradients::GradientSum;
pub use loss::PolicyLoss;
pub use memory::StepMemory;
pub use sequences::completion_hidden;
