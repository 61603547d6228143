#![doc = include_str!("../README.md")]
//! A [`Policy`] holds the weights of a language model, the weights of the reference policy of the KL, and the state of the optimizer. It
//! samples completions, scores tokens, accumulates gradients and updates its weights on its own device. Hidden states, logits and gradients
//! never leave it. Implementations run on the CPU or on a PJRT device; the training loop is the same for both.
#![forbid(unsafe_code)]

mod categorical;
mod completion_sampler;
#[cfg(feature = "contract")]
#[allow(missing_docs)] // names of tests say what they test
pub mod contract;
mod error;
mod initial;
mod optimizer;
mod policy;
mod rollout;
mod routed_experts;
mod router_statistics;
mod sampling;
mod sequence;
mod state;
mod update;

pub use completion_sampler::CompletionSampler;
pub use error::{DeviceFailure, Error, Result};
pub use initial::InitialWeights;
pub use optimizer::{
    AdjustLr, CLIP_EPSILON, CodeBook, MOMENT_CODES, MOMENT_SCALES, Matrices, MatrixRule, MomentBlocks, OptimizerBounds,
    OptimizerName, OptimizerSettings, OptimizerStep, Rule, Slot, UpdateRule, adapter_optimizers, check_moments,
    check_optimizer, is_moment_codes, moment_codes, moment_tensors, trains_adapters,
};
pub use policy::{Policy, Weights, accumulate_and_apply};
pub use rollout::{
    Completion, Finished, Pending, PolicyEngine, RolloutEngine, RolloutRequest, StopCondition, Turn, WeightVersion,
};
pub use routed_experts::RoutedExperts;
pub use router_statistics::{RouterStatistics, check_router_aux_loss};
pub use sampling::{LogitsProcessors, Sampling};
pub use sequence::{Sequence, SequenceBatch, token_batch};
pub use state::{
    AdapterTensors, MOMENTS, PolicyState, StateGroup, TensorSink, TensorSource, check_tensors, export_all,
};
pub use update::{StepLoss, UpdateReport, imitation, loss_of_model};
