//! The GRPO loss on any PJRT device: TPU, GPU, XLA's CPU.
//!
//! Use it for models on such devices, or to inspect how a compiler handles the loss for devices that are not present
//! ([`aot`]). [`PjrtBackend`] plans and runs the loss behind [`grpo_core::Backend`], with tensors on the host or on the
//! devices; [`program`] writes it as StableHLO; [`plugins`] finds the plugin for a device, which `grpo plugin install`
//! downloads.
//!
//! ```no_run
//! use backend_tpu::PjrtBackend;
//! use backend_tpu::plugins::Kind;
//! use grpo_core::*;
//!
//! # fn main() -> Result<()> {
//! let (n, v) = (4, 32); // tokens, vocabulary
//! let batch = TokenBatch::packed(vec![3, 7, 1, 0], vec![0, 2, 4])? // targets of two sequences
//!     .with_advantages(Advantages::PerSequence(vec![1.0, -0.5]))?;
//! let mut plan = PjrtBackend::open(Kind::Cpu, None)?.plan(&PlanRequest {
//!     loss: LossConfig::default().into(),
//!     implementation: Implementation::Logits,
//!     tiling: Tiling::default(),
//!     max_tokens: n,
//!     policy: PolicySpec::Logits { vocab: v, dtype: Dtype::F32 },
//!     gradients: GradientSpec::default(),
//! })?;
//! let (logits, mut dlogits) = (vec![0.0_f32; n * v], vec![0.0; n * v]); // [N, V]
//! let grads = GradsMut { logits: Some((&mut dlogits).into()), ..GradsMut::default() };
//! let out = plan.value_and_grad(PolicyInput::Logits((&logits).into()), &batch, grads)?;
//! println!("loss {}", out.loss);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

pub mod aot;
mod backend;
pub mod compile_options;
mod devices;
mod error;
pub mod mosaic;
mod operands;
mod plan;
pub mod plugins;
pub mod program;
mod shard;
mod tables;
mod tensor;
mod tiling;

pub use backend::PjrtBackend;
pub use plan::{DeviceOutput, PjrtPlan};
pub use tables::TokenTables;
pub use tensor::PjrtTensor;
