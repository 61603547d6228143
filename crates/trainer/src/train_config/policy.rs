//! The section `policy`: the device that holds the weights, and what it computes in.

use super::{TrainConfig, check};
use crate::error::Result;
use backend_tpu::plugins::Kind;
use grpo_core::Implementation;
use models::ModelConfig;
use pjrt::Client;
use policy_device::decoder::{ATTENTION, Attention, Compute};
use serde::{Deserialize, Serialize};
use stablehlo::Save;
use std::path::PathBuf;
use std::time::Duration;

/// Where the weights are, and with them sampling, scores, gradients and the optimizer.
///
/// ```
/// use trainer::TrainConfig;
/// use trainer::train_config::{PolicyConfig, PolicyDevice};
///
/// // `grpo train --set policy.device=pjrt:cuda`
/// let policy = PolicyConfig { device: PolicyDevice::PjrtCuda, ..Default::default() };
/// TrainConfig { policy, ..TrainConfig::built_in() }.validate()?;
/// # Ok::<(), trainer::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PolicyConfig {
    /// The device that holds the weights and computes everything that depends on them.
    pub device: PolicyDevice,
    /// The PJRT plugin of the device; without it, what `GRPO_PJRT_PLUGIN` names or `grpo plugin install` installed.
    pub plugin: Option<PathBuf>,
    /// The number type in which a device of PJRT takes the operands of products. Weights, moments and gradients have the digits of f32 in
    /// both, but for weights beneath adapters, which stay bf16 if that is what their files have. With bfloat16, a reference policy does, too,
    /// until it is mixed with the policy.
    pub dtype: PolicyDtype,
    /// How the tokens of a row attend to each other in training and scoring on a device of PJRT.
    pub attention: PolicyAttention,
    /// What derivatives compute again on a device of PJRT, with Megatron's and verl's name (torch calls it activation checkpointing).
    pub recompute_granularity: RecomputeGranularity,
    /// The number of layers n of which only what goes into the first is kept, with Megatron's and verl's name. n divides the number of
    /// layers L, and is for `recompute_granularity: full`. With 1 the inputs of all L layers are kept. With more, L / n + n inputs are there at
    /// most, and the layers run forward once more.
    pub recompute_num_layers: usize,
    /// How many minutes a wait for a device of PJRT takes at most, before it is an error that the device hangs: more than its longest program
    /// takes, such as a step of the optimizer. Compiling is not counted.
    pub wait_limit_minutes: u64,
    /// The folder of compiled programs, for this and later processes; without it, `programs` beside the installed plugins.
    pub compile_cache: Option<PathBuf>,
    /// Whether a step that fails on a device of PJRT after one of its updates can be taken back, which takes weights and moments twice
    /// during an update. It counts where a step has several updates, or does more after its update (`grpo.num_iterations`,
    /// `grpo.steps_per_generation`, `grpo.sync_ref_model`, `grpo.use_adaptive_entropy`): otherwise nothing is kept.
    pub can_roll_back: bool,
}

impl Default for PolicyConfig {
    fn default() -> Self {
        Self {
            device: PolicyDevice::default(),
            plugin: None,
            dtype: PolicyDtype::default(),
            attention: PolicyAttention::default(),
            recompute_granularity: RecomputeGranularity::default(),
            recompute_num_layers: 1,
            wait_limit_minutes: Client::DEFAULT_WAIT_LIMIT.as_secs() / 60,
            compile_cache: None,
            can_roll_back: true,
        }
    }
}

/// A device that holds weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PolicyDevice {
    /// This CPU, without a plugin.
    #[default]
    #[serde(rename = "host")]
    Host,
    /// This CPU with the compiler XLA, by its PJRT plugin.
    #[serde(rename = "pjrt:cpu")]
    PjrtCpu,
    /// A GPU of NVIDIA, by its PJRT plugin.
    #[serde(rename = "pjrt:cuda")]
    PjrtCuda,
    /// A TPU, by its PJRT plugin.
    #[serde(rename = "pjrt:tpu")]
    PjrtTpu,
}

/// A number type of operands, with torch's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PolicyDtype {
    /// All digits of f32.
    #[default]
    Float32,
    /// The upper 16 bits of a single-precision number; sums are f32.
    Bfloat16,
}

/// How attention among the tokens of a row is computed. The numbers are the same up to rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PolicyAttention {
    /// In blocks where rows are longer than [`Attention::BLOCK`] tokens, materialised where they are not.
    #[default]
    Auto,
    /// The scores of all pairs of tokens are there at once: memory grows with the square of the length.
    Materialised,
    /// In blocks of [`Attention::BLOCK`] tokens: memory grows with the length, and the derivative computes scores again.
    Blockwise,
}

/// What of a layer's forward pass its derivative computes again. The numbers are the same up to rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecomputeGranularity {
    /// All of it: least memory, about a third more work.
    #[default]
    Full,
    /// All but attention in blocks, of which is kept what it has made of the tokens: as much as goes into a layer. Where attention is
    /// materialised, its derivative reads all scores, and this is `full`.
    ExceptAttention,
    /// All but its products, whose results are kept. Megatron's `selective` is another choice: it computes attention alone again.
    Selective,
    /// Nothing: what the derivative reads is kept.
    None,
}

impl PolicyDevice {
    /// The kind of PJRT device; `None` for this CPU without a plugin.
    pub fn kind(self) -> Option<Kind> {
        match self {
            Self::Host => None,
            Self::PjrtCpu => Some(Kind::Cpu),
            Self::PjrtCuda => Some(Kind::Cuda),
            Self::PjrtTpu => Some(Kind::Tpu),
        }
    }
}

impl PolicyConfig {
    /// How long a wait for the device takes at most.
    pub fn wait_limit(&self) -> Duration {
        Duration::from_secs(self.wait_limit_minutes.saturating_mul(60))
    }

    /// What products take and how they are computed.
    pub fn compute(&self) -> Compute {
        match self.dtype {
            PolicyDtype::Float32 => Compute::F32,
            PolicyDtype::Bfloat16 => Compute::Bf16,
        }
    }

    /// How tokens attend to each other.
    pub fn attention(&self) -> Attention {
        match self.attention {
            PolicyAttention::Auto => Attention::Auto,
            PolicyAttention::Materialised => Attention::Materialised,
            PolicyAttention::Blockwise => Attention::Blockwise { block: Attention::BLOCK },
        }
    }

    /// What the derivative of a model of this shape keeps of its layers.
    ///
    /// # Errors
    /// [`crate::Error::Config`] where `recompute_num_layers` does not divide the number of layers.
    pub fn save(&self, shape: &ModelConfig) -> Result<Save> {
        let (turns, layers) = (self.recompute_num_layers, shape.num_hidden_layers);
        Ok(match self.recompute_granularity {
            RecomputeGranularity::Full if turns == 1 => Save::Carry,
            RecomputeGranularity::Full => {
                let expected = format!("a number that the model's {layers} layers are a multiple of");
                check(layers.is_multiple_of(turns), "policy.recompute_num_layers", &expected, turns)?;
                Save::Every(turns)
            }
            RecomputeGranularity::ExceptAttention => Save::Named(vec![ATTENTION.into()]),
            RecomputeGranularity::Selective => Save::Products,
            RecomputeGranularity::None => Save::Everything,
        })
    }
}

impl TrainConfig {
    /// Whether the device that holds the weights does what the rest of the configuration asks for.
    pub(super) fn validate_policy(&self) -> Result<()> {
        let PolicyConfig { device, plugin, dtype, attention, compile_cache, can_roll_back, .. } = &self.policy;
        let PolicyConfig { recompute_granularity, recompute_num_layers, wait_limit_minutes, .. } = &self.policy;
        if device.kind().is_none() {
            let of_device = "left out: it is for a policy.device of PJRT";
            check(plugin.is_none(), "policy.plugin", of_device, format!("{plugin:?}"))?;
            check(compile_cache.is_none(), "policy.compile_cache", of_device, format!("{compile_cache:?}"))?;
            check(*can_roll_back, "policy.can_roll_back", "true, or a policy.device of PJRT", can_roll_back)?;
            let is_auto = *attention == PolicyAttention::Auto;
            check(is_auto, "policy.attention", "auto, or a policy.device of PJRT", format!("{attention:?}"))?;
            let keeps = "full, or a policy.device of PJRT";
            let is_full = *recompute_granularity == RecomputeGranularity::Full;
            let found = serde_json::to_string(recompute_granularity).unwrap_or_default();
            check(is_full, "policy.recompute_granularity", keeps, found)?;
            let one = "1, or a policy.device of PJRT";
            check(*recompute_num_layers == 1, "policy.recompute_num_layers", one, recompute_num_layers)?;
            let (default, found) = (PolicyConfig::default().wait_limit_minutes, *wait_limit_minutes);
            let expected = format!("{default}, or a policy.device of PJRT");
            check(found == default, "policy.wait_limit_minutes", &expected, found)?;
            let host = "float32, or a policy.device of PJRT: policy.device host computes in f32";
            return check(*dtype == PolicyDtype::Float32, "policy.dtype", host, "bfloat16");
        }
        check(*wait_limit_minutes > 0, "policy.wait_limit_minutes", "1 or more", wait_limit_minutes)?;
        let groups = match recompute_granularity {
            RecomputeGranularity::Full => (*recompute_num_layers > 0, "1 or more"),
            _ => (*recompute_num_layers == 1, "1, or policy.recompute_granularity: full"),
        };
        check(groups.0, "policy.recompute_num_layers", groups.1, recompute_num_layers)?;
        let on_device = "left out: a policy.device of PJRT computes the loss itself";
        check(self.grpo.backend == "cpu", "grpo.backend", on_device, &self.grpo.backend)?;
        check(self.grpo.plugin.is_none(), "grpo.plugin", on_device, format!("{:?}", self.grpo.plugin))?;
        let implementation = self.grpo.implementation;
        check(implementation == Implementation::Fused, "grpo.implementation", on_device, implementation.name())
    }
}
