//! The section `policy`: the device that holds the weights, and how it computes.

use crate::mesh::{LogicalAxisRules, MeshChoice};
use grpo_models::Quantization;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use std::path::PathBuf;
use std::time::Duration;

/// The device of the weights, and of sampling, scoring, gradients and the optimizer.
///
/// ```
/// use grpo_run_config::{PolicyConfig, PolicyDevice, TrainConfig};
///
/// // `grpo train --set policy.device=pjrt:cuda`
/// let policy = PolicyConfig { device: PolicyDevice::PjrtCuda, ..Default::default() };
/// TrainConfig { policy, ..TrainConfig::built_in() }.validate()?;
/// # Ok::<(), grpo_run_config::Error>(())
/// ```
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PolicyConfig {
    /// The device that holds the weights and computes everything that depends on them.
    pub device: PolicyDevice,
    /// The PJRT plugin of the device; by default that of `GRPO_PJRT_PLUGIN`, or the one that `grpo plugin install` installed.
    pub plugin: Option<PathBuf>,
    /// The mesh of devices over which the model is sharded: `auto`, or the number of devices along each axis; null is one device.
    pub mesh: Option<MeshChoice>,
    /// The number of devices, by default as many as the mesh has. XLA's CPU plugin makes as many virtual devices; `auto` and -1 need this
    /// key there.
    pub devices: Option<usize>,
    /// The axes of the mesh that shard each logical axis of the model; axes that are left out have MaxText-like defaults.
    pub logical_axis_rules: LogicalAxisRules,
    /// The dtype of matmul operands. Weights, moments and gradients have f32 precision with both dtypes, except frozen weights below adapters,
    /// which stay bf16 if their files are bf16. With bfloat16 on a PJRT device this also applies to a reference policy until it is mixed with
    /// the policy. On the host, large weights of bfloat16 take 12 or 16 bits in sampling, and products are faster if the processor multiplies bf16
    /// (AVX512-BF16, AMX); attention, adapters and routers of experts are f32 there.
    pub dtype: PolicyDtype,
    /// The format of the frozen matrices of layers beneath LoRA adapters, as bitsandbytes quantises a model (`load_in_8bit`, `load_in_4bit`): `int8` is
    /// an integer per weight with an f32 scale per output, `nf4` is 4 bits per weight with an f32 scale per 64 weights. Products dequantise them to
    /// `dtype`. It needs the section `lora` and a pretrained model. Adapters are never merged into quantised weights: `export.merge_adapters`
    /// merges them into the weights of the model's folder.
    pub quantization: Option<Quantization>,
    /// The implementation of attention in training and scoring on a PJRT device.
    pub attention: PolicyAttention,
    /// The implementation of the products of a mixture of experts on a PJRT device.
    pub expert_products: ExpertProducts,
    /// The activations that the backward pass recomputes on a PJRT device, with Megatron's and verl's name (torch: activation checkpointing).
    pub recompute_granularity: RecomputeGranularity,
    /// The number n of layers per saved input, with Megatron's and verl's name. n divides the number of layers L and applies to
    /// `recompute_granularity: full`. With 1, the inputs of all L layers are saved. With more, at most L / n + n inputs are in memory, and the
    /// layers run forward once more.
    #[default(1)]
    pub recompute_num_layers: usize,
    /// The time-out in minutes of a wait for a PJRT device, after which it counts as hanging. It must exceed the device's longest program,
    /// such as an optimizer step. Compiling is not included.
    #[default(60)]
    pub wait_limit_minutes: u64,
    /// The folder of the cache of compiled programs; by default `programs` beside the installed plugins.
    pub compile_cache: Option<PathBuf>,
    /// `true` if a step that fails on a PJRT device after one of its updates can be rolled back, which needs a second copy of weights and
    /// moments during an update. It only matters for steps with several updates, or with work after their update (`grpo.num_iterations`,
    /// `grpo.steps_per_generation`, `grpo.sync_ref_model`, `grpo.use_adaptive_entropy`); other steps need no copy.
    #[default(true)]
    pub can_roll_back: bool,
    /// `true` if the routers of a mixture of experts are not trained.
    pub freeze_router: bool,
    /// The factor of the load balancing loss of the routers of a mixture of experts, which is added to the loss of every update, with TRL's
    /// name and transformers' definition. 0 is no such loss; the value in config.json is not used.
    pub router_aux_loss_coef: f64,
    /// `true` if scoring and training send every token to the experts that sampled it (R3, rollout routing replay). Needs
    /// `rollout.engine: policy`.
    pub replay_routing: bool,
}

/// A device that holds weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PolicyDevice {
    /// This CPU, without a plugin.
    #[default]
    #[serde(rename = "host")]
    Host,
    /// This CPU with the XLA compiler, through its PJRT plugin.
    #[serde(rename = "pjrt:cpu")]
    PjrtCpu,
    /// An NVIDIA GPU, through its PJRT plugin.
    #[serde(rename = "pjrt:cuda")]
    PjrtCuda,
    /// A TPU, through its PJRT plugin.
    #[serde(rename = "pjrt:tpu")]
    PjrtTpu,
}

/// A dtype of matmul operands or of exported weights, with torch's names or their short forms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PolicyDtype {
    /// f32 precision.
    #[default]
    #[serde(alias = "fp32", alias = "f32")]
    Float32,
    /// The upper 16 bits of f32; sums are f32.
    #[serde(alias = "bf16")]
    Bfloat16,
}

impl From<PolicyDtype> for grpo_models::Dtype {
    fn from(dtype: PolicyDtype) -> Self {
        match dtype {
            PolicyDtype::Float32 => Self::F32,
            PolicyDtype::Bfloat16 => Self::Bf16,
        }
    }
}

impl From<PolicyDtype> for grpo_core::Dtype {
    fn from(dtype: PolicyDtype) -> Self {
        match dtype {
            PolicyDtype::Float32 => Self::F32,
            PolicyDtype::Bfloat16 => Self::Bf16,
        }
    }
}

/// An implementation of attention within a row. Results are equal up to rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PolicyAttention {
    /// Blockwise if rows are longer than 512 tokens, else materialised.
    #[default]
    Auto,
    /// The scores of all pairs of tokens are materialised: memory grows with the square of the length.
    Materialised,
    /// In blocks of 512 tokens: memory grows linearly with the length, and the backward pass recomputes scores.
    Blockwise,
}

/// An implementation of the products of experts. Results are equal up to rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExpertProducts {
    /// Every expert computes every token.
    #[default]
    Dense,
    /// Only the experts of a token compute it, in blocks of tokens with the same expert.
    Grouped,
}

/// The activations of a layer that the backward pass recomputes. Results are equal up to rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecomputeGranularity {
    /// All: least memory, about a third more work.
    #[default]
    Full,
    /// All except blockwise attention, whose output is saved: as much memory as a layer's input. With materialised attention, whose backward
    /// pass reads all scores, this equals `full`.
    ExceptAttention,
    /// All except matmuls, whose results are saved. Megatron's `selective` differs: it only recomputes attention.
    Selective,
    /// Nothing: all residuals are saved.
    None,
}

impl PolicyConfig {
    /// Returns the time-out of a wait for the device.
    pub fn wait_limit(&self) -> Duration {
        Duration::from_secs(self.wait_limit_minutes.saturating_mul(60))
    }
}
