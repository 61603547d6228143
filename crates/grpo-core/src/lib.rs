//! The GRPO loss: what it is, what it is taken over, and the seam to what computes it.
#![forbid(unsafe_code)]

pub mod advantages;
pub mod backend;
pub mod batch;
pub mod columns;
pub mod config;
pub mod controllers;
pub mod error;
pub mod evaluate;
pub mod factors;
#[cfg(feature = "format")]
pub mod format;
pub mod gradients;
pub mod grpo_loss;
pub mod metrics;
mod mismatch;
pub mod objective;
pub mod parity;
pub mod plan;
mod plan_request;
pub mod policy;
pub mod real;
pub mod rewards;
mod sampler;
mod selection;
pub mod strict;
pub mod tensor;
pub mod vectors;
pub mod weights;

/// The crate whose `bf16` tensors have: the version that fits, for callers that have none of their own.
pub use half;

pub use advantages::{AdvantageConfig, AdvantageEstimator};
pub use backend::{
    Backend, HeadLayout, Implementation, LoopOrder, LossOutput, LossPlan, MemoryReport, PlanRequest, PolicySpec,
    Scores, TemperatureFactors, Tiling,
};
pub use batch::{Advantages, TokenBatch};
pub use config::{
    ImportanceSamplingLevel, KlEstimator, KlImportance, LossAggMode, LossConfig, LossType, Objective, RolloutIs,
    SamplerMode, Semantics, TemperatureMode,
};
pub use error::{Error, Result};
#[cfg(feature = "format")]
pub use format::BatchFile;
pub use gradients::{GradientSpec, Grads, GradsMut};
pub use grpo_loss::{GrpoLoss, GrpoLossBuilder};
pub use metrics::{Metric, Metrics};
pub use policy::{PolicyInput, PolicyOutput};
pub use tensor::{DeviceTensor, Dtype, Tensor, TensorMut, TensorRef};
