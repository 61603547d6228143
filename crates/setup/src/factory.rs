//! The policies and devices that a configuration names.

use crate::device;
use crate::error::{Error, Result};
use crate::pretrained::{Purpose, keeps_files, training_memory};
use grpo_backend_cpu::CpuBackend;
use grpo_backend_tpu::plugins::Kind;
use grpo_core::Dtype;
use grpo_distributed::Store;
use grpo_models::{MemoryTable, ModelConfig, ModelFolder};
use grpo_planner::{Devices, MeshRules, longest_prompt, policy_options, training_sizes};
use grpo_policy::Policy;
use grpo_policy_cpu::{CpuPolicy, PolicyLoss};
use grpo_policy_pjrt::decoder::{Axis, AxisRules};
use grpo_policy_pjrt::{PjrtPolicy, PjrtPolicyOptions, Runtime, TrainingSizes};
use grpo_run_config::{PolicyConfig, PolicyDevice, TrainConfig};
use std::borrow::Cow;
use std::sync::Arc;

/// The device of a policy.
pub(crate) enum PolicyTarget {
    /// This CPU, with the loss of its policy.
    Host(Box<PolicyLoss>),
    /// Devices of a PJRT plugin, and the axis rules of sampling if there are several devices.
    Device(Box<Runtime>, Option<AxisRules>),
}

impl PolicyTarget {
    /// Opens the devices that a configuration names, without loading anything onto them. The mesh is checked before a plugin is loaded if the
    /// configuration says how many devices it has. With several processes, the mesh of TPUs and GPUs has the devices of all of them. `prompt`
    /// is the number of tokens of the longest prompt, for `policy.mesh: auto`.
    ///
    /// # Errors
    /// An error if devices are missing, or for a mesh that does not divide the dimensions of `shape`.
    pub(crate) fn open(
        config: &TrainConfig,
        shape: &ModelConfig,
        prompt: usize,
        store: Option<&Arc<Store>>,
    ) -> Result<Self> {
        let PolicyConfig { device, plugin, compile_cache, .. } = &config.policy;
        let Some(kind) = device::kind(*device) else {
            return Ok(Self::Host(Box::new(PolicyLoss {
                config: config.loss().into(),
                backend: Arc::new(CpuBackend::new().with_products(config.policy.dtype.into())),
                implementation: config.grpo.implementation,
                max_tokens: config.grpo.micro_batch_sequences() * config.rollout.max_completion_length(),
            })));
        };
        let (plugin, compile_cache) = (plugin.as_deref(), compile_cache.as_deref());
        let known = grpo_planner::configured_devices(&config.policy);
        let rules_of = |devices: Devices| MeshRules::of(config, shape, prompt, &devices);
        let mut rules = known.map(|devices| rules_of(Devices::assumed(kind, devices))).transpose()?.flatten();
        let mut runtime = match device::open_process(kind, plugin, compile_cache, store)? {
            Some(runtime) => runtime,
            None => {
                let training = rules.as_ref().map(|rules| rules.training.clone()).unwrap_or_default();
                let runtime = Runtime::open_mesh(kind, plugin, training).map_err(grpo_policy::Error::from)?;
                device::with_cache(runtime, compile_cache)
            }
        };
        let devices = runtime.client().devices().len();
        if known.is_none() {
            let mut available = Devices::assumed(kind, devices);
            // The limit instead of the free memory, so that all processes choose the same mesh.
            let first = runtime.client().addressable_devices().first();
            let limit = first.and_then(|device| device.memory_stats().ok()?.bytes_limit);
            if let (true, Some(limit)) = (kind != Kind::Cpu, limit.and_then(|bytes| u64::try_from(bytes).ok())) {
                available.memory = limit;
            }
            rules = rules_of(available)?;
            if rules.is_none() && devices > 1 && kind != Kind::Cpu {
                tracing::warn!("one of {devices} devices is used; policy.mesh={{fsdp: -1}} uses all of them");
            }
        }
        if let Some(MeshRules { training, .. }) = rules.as_ref().filter(|r| *runtime.axis_rules() != r.training) {
            runtime = runtime.on_mesh(training.clone()).map_err(grpo_policy::Error::from)?;
        }
        if let Some(MeshRules { training, rollout }) = &rules {
            warn_of_empty_rows(config, training.parts(Axis::Batch));
            tracing::info!(
                "training on {} and sampling on {}: {:?}",
                training.mesh(),
                rollout.mesh(),
                runtime.devices()
            );
        }
        let runtime = runtime.with_wait_limit(config.policy.wait_limit());
        Ok(Self::Device(Box::new(runtime), rules.map(|rules| rules.rollout)))
    }

    /// Returns the memory of training on prompts of up to `prompt` tokens, by part, and the available bytes.
    ///
    /// # Errors
    /// Invalid weights; a loss that cannot be planned.
    pub(crate) fn memory(
        &self,
        config: &TrainConfig,
        shape: &ModelConfig,
        model: Option<&ModelFolder>,
        prompt: usize,
    ) -> Result<(MemoryTable, Option<u64>)> {
        match self {
            Self::Host(loss) => {
                let weights = model.map(ModelFolder::weights).transpose()?;
                let in_files = weights.map_or(grpo_models::Dtype::F32, |weights| weights.mapped_dtype());
                Ok((training_memory(config, shape, in_files, loss, prompt)?, grpo_models::available_memory()))
            }
            Self::Device(runtime, rollout) => {
                let weights = match model {
                    Some(model) if config.lora.is_some() => TrainingSizes::frozen_dtype(&model.weights()?),
                    _ => grpo_models::Dtype::F32,
                };
                let options = options(config, shape, rollout)?;
                let sizes = training_sizes(config, shape, weights, prompt)?;
                let table = sizes.memory(shape, &options, runtime.axis_rules()).map_err(grpo_policy::Error::from)?;
                Ok((table, runtime.available_memory()))
            }
        }
    }

    /// Checks that a training fits into memory.
    ///
    /// # Errors
    /// [`Error::TooLarge`]; [`grpo_trainer::Error::Exhausted`] for a device.
    pub(crate) fn check(&self, table: &MemoryTable, available: Option<u64>) -> Result<()> {
        match self {
            Self::Host(_) => Error::check_memory(table, available),
            Self::Device(runtime, _) => Ok(runtime.check_memory(table.clone()).map_err(grpo_policy::Error::from)?),
        }
    }

    /// Returns the initial policy of a configuration: a new one of `shape`, or the one in the folder `model`.
    ///
    /// # Errors
    /// Invalid weights; a failing device.
    pub(crate) fn policy(
        self,
        config: &TrainConfig,
        shape: &ModelConfig,
        model: Option<&ModelFolder>,
        purpose: Purpose,
    ) -> Result<Box<dyn Policy>> {
        Ok(match self {
            Self::Host(loss) => {
                let policy = cpu_policy(config, shape, model, *loss, purpose)?;
                Box::new(policy.with_rollout_batch_size(config.rollout.batch_size))
            }
            Self::Device(runtime, rollout) => {
                let mut options = options(config, shape, &rollout)?;
                if config.policy.device == PolicyDevice::PjrtCpu {
                    options.peak_flops = Some(grpo_backend_cpu::peak::flops(Dtype::F32, rayon::current_num_threads()));
                }
                Box::new(pjrt_policy(config, &runtime, shape, model, options)?)
            }
        })
    }
}

/// Warns if a micro-batch does not fill the shards of its rows.
fn warn_of_empty_rows(config: &TrainConfig, shards: usize) {
    let sequences = config.grpo.micro_batch_sequences();
    let rows = sequences.next_multiple_of(shards);
    if rows > sequences {
        let share = 100 * (rows - sequences) / rows;
        tracing::warn!(
            "a micro-batch of {sequences} sequences has {shards} shards of rows: {share} % of its rows are empty; a smaller \
             grpo.gradient_accumulation_steps makes larger micro-batches"
        );
    }
}

/// Returns a policy for the export of a checkpoint, with the initial weights of a configuration. `model` is its [`crate::open_model`]. Its weights
/// are not quantised: with `policy.quantization`, it is on the host and uses them in their files, because they may not fit on the device.
///
/// # Errors
/// Invalid weights; a device that is missing or fails.
pub fn export_policy(config: &TrainConfig, model: Option<&ModelFolder>) -> Result<Box<dyn Policy>> {
    let Some(shape) = model.map(ModelFolder::config).or(config.model.shape()) else {
        return Err(Error::argument("export", "a model", "none"));
    };
    let prompt = longest_prompt(config, shape);
    let mut config = Cow::Borrowed(config);
    if config.policy.quantization.is_some() {
        config.to_mut().policy.device = PolicyDevice::Host;
    }
    let config = &*config;
    PolicyTarget::open(config, shape, prompt, None)?.policy(config, shape, model, Purpose::Export)
}

/// Returns the policy on this CPU. For training, memory was checked before.
fn cpu_policy(
    config: &TrainConfig,
    shape: &ModelConfig,
    model: Option<&ModelFolder>,
    loss: PolicyLoss,
    purpose: Purpose,
) -> Result<CpuPolicy> {
    if let (Some(_), Purpose::Export) = (model, purpose) {
        let mut table = MemoryTable::new();
        table.push("weights (float32)", shape.parameter_count() * grpo_models::Dtype::F32.size() as u64);
        Error::check_memory(&table, grpo_models::available_memory())?;
    }
    // Names, shapes and finiteness are checked while reading. Frozen weights stay in their files.
    let weights = model.map(ModelFolder::weights).transpose()?;
    let quantization = config.policy.quantization.filter(|_| matches!(purpose, Purpose::Training));
    let policy = match (&weights, &config.lora) {
        (Some(weights), Some(lora)) => match quantization {
            Some(format) => CpuPolicy::quantized_with_lora(shape, weights, format, lora, config.seed, loss)?,
            None => CpuPolicy::mapped_with_lora(shape, weights, lora, config.seed, loss)?,
        },
        (Some(weights), None) => {
            let policy = CpuPolicy::from_weights(shape, weights, loss)?;
            let keeps = matches!(purpose, Purpose::Training) && keeps_files(config);
            if keeps { policy.with_reference_in_files(weights)? } else { policy }
        }
        (None, Some(lora)) => CpuPolicy::new(shape, config.seed, loss)?.with_lora(lora, config.seed)?,
        (None, None) => CpuPolicy::new(shape, config.seed, loss)?,
    };
    let policy = if config.policy.freeze_router { policy.with_frozen_routers()? } else { policy };
    let policy = policy.with_products(config.policy.dtype.into())?;
    let policy = policy.with_router_aux_loss(config.policy.router_aux_loss_coef)?;
    Ok(match config.grpo.value_loss() {
        Some(of_values) => policy.with_value_head(of_values)?,
        None => policy,
    })
}

/// Returns the options of the policy on PJRT devices.
fn options(config: &TrainConfig, shape: &ModelConfig, rollout: &Option<AxisRules>) -> Result<PjrtPolicyOptions> {
    Ok(PjrtPolicyOptions { rollout_rules: rollout.clone(), ..policy_options(config, shape)? })
}

/// Returns the policy on PJRT devices.
fn pjrt_policy(
    config: &TrainConfig,
    runtime: &Runtime,
    shape: &ModelConfig,
    model: Option<&ModelFolder>,
    options: PjrtPolicyOptions,
) -> Result<PjrtPolicy> {
    let (loss, seed) = (config.loss(), config.seed);
    let weights = model.map(ModelFolder::weights).transpose()?;
    let policy = match (&weights, &config.lora) {
        (Some(weights), Some(lora)) => {
            PjrtPolicy::from_weights_with_lora(runtime, shape, weights, lora, seed, loss, options)
        }
        (Some(weights), None) => PjrtPolicy::from_weights(runtime, shape, weights, loss, options),
        (None, Some(lora)) => {
            PjrtPolicy::new(runtime, shape, seed, loss, options).and_then(|policy| policy.with_lora(lora, seed))
        }
        (None, None) => PjrtPolicy::new(runtime, shape, seed, loss, options),
    };
    let policy = match config.grpo.value_loss() {
        Some(of_values) => policy.and_then(|policy| policy.with_value_head(of_values)),
        None => policy,
    };
    Ok(policy.map_err(grpo_policy::Error::from)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_tables_of_huge_steps_do_not_overflow() {
        let mut config = TrainConfig::built_in();
        config.rollout.max_completion_length = Some(1_000_000);
        config.rollout.batch_size = usize::MAX;
        config.grpo.num_generations = 1 << 20;
        config.grpo.prompts_per_step = 1;
        config.grpo.gradient_accumulation_steps = 1;
        let shape = ModelConfig { max_position_embeddings: 1 << 20, ..config.model.shape().unwrap().clone() };
        let options = policy_options(&config, &shape).unwrap();
        let on_device = training_sizes(&config, &shape, grpo_models::Dtype::F32, 40_000)
            .unwrap()
            .memory(&shape, &options, &AxisRules::default())
            .unwrap();
        let place = PolicyTarget::open(&config, &shape, 40_000, None).unwrap();
        let (on_host, _) = place.memory(&config, &shape, None, 40_000).unwrap();
        for table in [on_device, on_host] {
            assert!(table.total() > 1 << 40, "{table}");
        }
    }
}
