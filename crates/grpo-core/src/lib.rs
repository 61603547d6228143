#![doc = include_str!("../README.md")]
//! | to | see |
//! |---|---|
//! | choose a loss and its options | [`LossConfig`], under TRL's names |
//! | compute it | [`GrpoLoss`], [`Grads`], [`PolicyInput`]; a backend: `grpo_backend_cpu::CpuBackend`, `backend_tpu::PjrtBackend` |
//! | describe sampled completions | [`TokenBatch`], [`Advantages`] |
//! | compute advantages from rewards | [`AdvantageConfig`], [`advantages`], [`rewards`], [`controllers`] |
//! | log | [`Metrics`], [`LossOutput`] |
//! | compare with another trainer | `BatchFile` (feature `format`), [`parity`] |
//! | compute a loss of your own | [`GrpoLoss::step_with`], [`CustomLoss`], [`LossConfig::token_losses`] |
//! | write a backend or a wrapper | [`Backend`], [`LossPlan`], [`PlanRequest`], [`PlanCache`], [`backend_api::plan::Head`] |
//! | test a backend | `contract_tests!` (feature `contract`) |
#![forbid(unsafe_code)]

pub mod advantages;
pub mod aggregate;
mod backend;
pub mod backend_api;
pub mod batch;
mod bytes;
pub mod config;
#[cfg(feature = "contract")]
pub mod contract;
pub mod controllers;
mod custom_loss;
pub mod error;
#[cfg(feature = "format")]
pub mod format;
mod gradients;
mod grpo_loss;
mod logit_transforms;
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
mod similarity;
mod tensor;
mod token_losses;

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
pub use custom_loss::CustomLoss;
pub use error::{Error, Result};
#[cfg(feature = "format")]
pub use format::BatchFile;
pub use gradients::{GradientSpec, Grads, GradsMut};
pub use grpo_loss::{GrpoLoss, GrpoLossBuilder};
pub use logit_transforms::LogitTransform;
pub use memory_report::MemoryReport;
pub use metrics::{Metric, Metrics};
pub use plan_cache::PlanCache;
pub use policy::{HeadLayout, PolicyInput, PolicyOutput, PolicySpec};
pub use sampler::record_sampler_difference;
pub use tensor::{DeviceTensor, Dtype, Tensor, TensorMut, TensorRef};
pub use token_losses::TokenLosses;
