//! The GRPO loss: its configuration, its inputs, and the interface of the backends that compute it.
//!
//! [`GrpoLoss`] is the entry point for a trainer. It takes the policy's output (hidden states and LM head, or logits) and a
//! [`TokenBatch`], and returns the loss with TRL's metrics and gradients:
//!
//! ```
//! use backend_cpu::CpuBackend; // the package grpo-backend-cpu
//! use grpo_core::{AdvantageConfig, Grads, GrpoLoss, LossConfig, TokenBatch};
//!
//! let (n, h, v) = (4, 8, 32); // tokens, hidden size, vocabulary
//! let (hidden, lm_head) = (vec![0.1_f32; n * h], vec![0.02_f32; v * h]); // [N, H] and [V, H], from your model
//! let config = LossConfig::dapo().epsilon_high(0.28);
//! let loss = GrpoLoss::builder(config).head(h, v).max_tokens(n).build(&CpuBackend::new())?;
//!
//! // Two completions of one prompt, concatenated, with their rewards.
//! let batch = TokenBatch::packed(vec![3, 7, 1, 0], vec![0, 2, 4])?;
//! let old = loss.score(&hidden, &lm_head, &batch)?.logp;
//! let advantages = AdvantageConfig::default().advantages(&[1.0, 0.0], 2)?;
//! let batch = batch.with_advantages(advantages)?.with_old_logp(old)?;
//!
//! let (mut dhidden, mut dlm_head) = (vec![0.0; n * h], vec![0.0; v * h]); // gradients are added to these
//! let out = loss.step(&hidden, &lm_head, &batch, Grads::new(&mut dhidden, &mut dlm_head))?;
//! out.check_finite(&batch)?;
//! println!("loss {} entropy {:?}", out.loss, out.metrics.value("entropy"));
//! # assert!(dlm_head.iter().any(|g| *g != 0.0));
//! # Ok::<(), grpo_core::Error>(())
//! ```
//!
//! | to | see |
//! |---|---|
//! | choose a loss and its options | [`LossConfig`], under TRL's names |
//! | compute it | [`GrpoLoss`], [`Grads`], [`PolicyInput`]; a backend: `backend_cpu::CpuBackend`, `backend_tpu::PjrtBackend` |
//! | describe sampled completions | [`TokenBatch`], [`Advantages`] |
//! | compute advantages from rewards | [`AdvantageConfig`], [`advantages`], [`rewards`], [`controllers`] |
//! | log | [`Metrics`], [`LossOutput`] |
//! | compare with another trainer | `BatchFile` (feature `format`), [`parity`] |
//! | write a backend or a wrapper | [`Backend`], [`LossPlan`], [`PlanRequest`], [`PlanCache`], [`backend_api::plan::Head`] |
//!
//! Feature `format`, on by default: batch files in the safetensors format.
#![forbid(unsafe_code)]

pub mod advantages;
pub mod aggregate;
mod backend;
pub mod backend_api;
pub mod batch;
mod bytes;
pub mod config;
pub mod controllers;
pub mod error;
#[cfg(feature = "format")]
pub mod format;
mod gradients;
mod grpo_loss;
mod memory_report;
mod metrics;
mod mismatch;
pub mod objective;
pub mod parity;
mod plan_cache;
mod plan_request;
mod policy;
mod prepare;
pub mod rewards;
mod sampler;
mod selection;
mod tensor;

/// The version of `half` whose `bf16` tensors use.
pub use half;

pub use advantages::{AdvantageConfig, AdvantageEstimator};
pub use backend::{
    Backend, Implementation, LoopOrder, LossOutput, LossPlan, PlanRequest, Scores, TemperatureFactors, Tiling,
};
pub use batch::{Advantages, TokenBatch};
pub use bytes::readable_bytes;
pub use config::{
    ImportanceSamplingLevel, KlEstimator, KlImportance, LossAggMode, LossConfig, LossType, RolloutIs, SamplerMode,
    Semantics, TemperatureMode,
};
pub use error::{Error, Result};
#[cfg(feature = "format")]
pub use format::BatchFile;
pub use gradients::{GradientSpec, Grads, GradsMut};
pub use grpo_loss::{GrpoLoss, GrpoLossBuilder};
pub use memory_report::MemoryReport;
pub use metrics::{Metric, Metrics};
pub use plan_cache::PlanCache;
pub use policy::{HeadLayout, PolicyInput, PolicyOutput, PolicySpec};
pub use tensor::{DeviceTensor, Dtype, Tensor, TensorMut, TensorRef};
