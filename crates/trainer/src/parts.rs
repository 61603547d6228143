//! The parts of a run behind their traits, and those that a configuration names.

use crate::backends;
use crate::error::{Error, Result};
use crate::pretrained::{Pretrained, Purpose, adapter_weights};
use crate::prompts::{check_rows, encode_prompt, open_data};
use crate::train_config::{PolicyConfig, TrainConfig};
use backend_tpu::plugins::Kind;
use data::Dataset;
use models::{CharTokenizer, ModelConfig, Tokenizer, Trained, TrainingMemory};
use policy::{Policy, PolicyEngine, RolloutEngine, Sequence};
use policy_burn::{BurnPolicy, PolicyLoss};
use policy_device::{DevicePolicy, DevicePolicyOptions, RolloutOptions, RolloutSizes, TrainShape, TrainingSizes};
use rewards::Rewards;

/// Prompts that are looked at to say how much memory a step takes.
const PROMPTS: usize = 32;

/// Everything that [`crate::Trainer`] works with, each replaceable by one of your own.
///
/// ```no_run
/// use std::sync::Arc;
/// use trainer::{Parts, TrainConfig, Trainer};
///
/// # fn main() -> trainer::Result<()> {
/// let config = TrainConfig::built_in();
/// let mut parts = Parts::from_config(&config)?;
/// let words = Arc::new(data::task::Reverse { min_length: 2, max_length: 4 });
/// parts.dataset = Box::new(data::TaskMixture::from_tasks(vec![(words, 1.0)], 0.1, config.seed)?);
/// let run = Trainer::with_parts(config, parts)?;
/// # Ok(())
/// # }
/// ```
pub struct Parts {
    /// The policy that is trained, with its loss and its optimizer.
    pub policy: Box<dyn Policy>,
    /// The tokenizer of the policy.
    pub tokenizer: Box<dyn Tokenizer>,
    /// The problems.
    pub dataset: Box<dyn Dataset>,
    /// The reward functions with their weights.
    pub rewards: Rewards,
    /// The engine that samples completions.
    pub engine: Box<dyn RolloutEngine>,
}

impl Parts {
    /// The parts that a configuration names: a decoder on the host or on a device, read or new, with its tokenizer (that of characters for a new one),
    /// data, rewards, and sampling where the weights are.
    ///
    /// # Errors
    /// Those of [`TrainConfig::validate`], [`backends::open`], and of a model that is read.
    pub fn from_config(config: &TrainConfig) -> Result<Self> {
        Ok(Self::resolved(config.clone())?.1)
    }

    /// The configuration with what it takes from the model (the length of completions and, where it asks for it,
    /// generation_config.json), and its parts.
    pub(crate) fn resolved(config: TrainConfig) -> Result<(TrainConfig, Self)> {
        config.validate_sources()?;
        let Some(model) = Pretrained::of(&config)? else {
            return Self::assemble(config, Box::new(CharTokenizer), None);
        };
        let config = config.with_generation_defaults(model.folder.generation());
        let tokenizer = model.tokenizer(&config)?;
        Self::assemble(config, tokenizer, Some(&model))
    }

    /// The same with a tokenizer of your own, of as many tokens as `model.vocab_size`.
    ///
    /// # Errors
    /// As [`Parts::from_config`].
    pub fn with_tokenizer(config: &TrainConfig, tokenizer: Box<dyn Tokenizer>) -> Result<Self> {
        config.validate_sources()?;
        let model = Pretrained::of(config)?;
        Ok(Self::assemble(config.clone(), tokenizer, model.as_ref())?.1)
    }

    /// The parts, and the configuration with what the context of the model decides.
    fn assemble(
        config: TrainConfig,
        tokenizer: Box<dyn Tokenizer>,
        model: Option<&Pretrained>,
    ) -> Result<(TrainConfig, Self)> {
        let Some(shape) = model.map(|model| model.folder.config()).or(config.model.shape()).cloned() else {
            return Err(Error::argument("Parts", "a model", "none"));
        };
        let shape = &shape;
        let config = config.with_context(shape.max_position_embeddings);
        config.validate_for(tokenizer.vocab_size(), shape.max_position_embeddings)?;
        // Before a plugin is loaded.
        if let Some(lora) = &config.lora {
            lora.resolve(shape)?;
        }
        let rewards = Rewards::with_seed(&config.rewards, config.seed)?;
        let longest = shape.max_position_embeddings.saturating_sub(config.rollout.max_completion_length());
        let (dataset, report) = open_data(&config.data, config.seed, tokenizer.as_ref(), longest)?;
        if let Some(report) = &report {
            check_rows(&config.data, report, &rewards, tokenizer.has_chat_template())?;
        }
        match &report {
            Some(report) if report.dropped() > 0 => tracing::warn!("{report}"),
            Some(report) => tracing::info!("{report}"),
            None => {}
        }
        // A look at some of them: the longest says what a step of a model that is read takes.
        let prompts = if model.is_some() { dataset.probe(PROMPTS)? } else { Vec::new() };
        let lengths = prompts.iter().map(|item| Ok(encode_prompt(tokenizer.as_ref(), &item.prompt)?.len()));
        let prompt = lengths.collect::<Result<Vec<_>>>()?.into_iter().max().unwrap_or(0);
        let policy = policy(&config, shape, model, Purpose::Training { prompt })?;
        Ok((config, Self { policy, tokenizer, dataset, rewards, engine: Box::new(PolicyEngine) }))
    }
}

/// The policy of a configuration, before anything is trained: a new one of `shape`, or that of the folder `model`.
///
/// # Errors
/// Those of [`backends::open`], of a device that is not there, and of a model that is read.
pub(crate) fn policy(
    config: &TrainConfig,
    shape: &ModelConfig,
    model: Option<&Pretrained>,
    purpose: Purpose,
) -> Result<Box<dyn Policy>> {
    Ok(match config.policy.device.kind() {
        None => {
            Box::new(host_policy(config, shape, model, purpose)?.with_rollout_batch_size(config.rollout.batch_size))
        }
        Some(kind) => Box::new(device_policy(config, kind, shape, model, purpose)?),
    })
}

/// The policy in burn on this CPU.
fn host_policy(
    config: &TrainConfig,
    shape: &ModelConfig,
    model: Option<&Pretrained>,
    purpose: Purpose,
) -> Result<BurnPolicy> {
    let loss = PolicyLoss {
        config: config.loss(),
        backend: backends::open(&config.grpo.backend, config.grpo.plugin.as_deref())?,
        implementation: config.grpo.implementation,
        max_tokens: config.grpo.micro_batch_sequences() * config.rollout.max_completion_length(),
    };
    let policy = match (model, &config.lora) {
        (Some(model), _) => model.policy(config, loss, purpose)?,
        (None, lora) => {
            if let Purpose::Training { .. } = purpose {
                expect_room(config, shape)?;
            }
            let policy = BurnPolicy::new(shape, config.seed, loss)?;
            match lora {
                Some(lora) => policy.with_lora(lora, config.seed)?,
                None => policy,
            }
        }
    };
    Ok(match config.grpo.value_loss() {
        Some(of_values) => policy.with_value_head(of_values)?,
        None => policy,
    })
}

/// Checks that a new model of this shape, its gradients and its moments fit into this machine's memory.
fn expect_room(config: &TrainConfig, shape: &ModelConfig) -> Result<()> {
    let trained = match &config.lora {
        Some(lora) => Trained::Adapters(adapter_weights(lora, shape)?),
        None => Trained::All,
    };
    let reference = (config.needs_ref_policy() && config.lora.is_none()).then_some(models::Dtype::F32);
    let memory = TrainingMemory { weights: shape.parameter_count(), dtype: models::Dtype::F32, trained, reference };
    match models::available_memory() {
        Some(available) => Ok(memory.table().check(available)?),
        None => Ok(()),
    }
}

/// The policy on a device of PJRT. A new model has the same initial weights there as on the host.
///
/// # Errors
/// [`policy_device::Error::TooLarge`] before anything is loaded.
fn device_policy(
    config: &TrainConfig,
    kind: Kind,
    shape: &ModelConfig,
    model: Option<&Pretrained>,
    purpose: Purpose,
) -> Result<DevicePolicy> {
    let PolicyConfig { plugin, compile_cache, .. } = &config.policy;
    let options = device_options(config, shape)?;
    let runtime = backends::device(kind, plugin.as_deref(), compile_cache.as_deref())?;
    if let Purpose::Training { prompt } = purpose {
        let weights = match model {
            Some(model) if config.lora.is_some() => TrainingSizes::frozen_dtype(&model.folder.weights()?),
            _ => models::Dtype::F32,
        };
        let table = training_sizes(config, shape, weights, prompt)?.memory(shape, &options);
        if model.is_some() {
            let room = runtime.available_memory().map_or("an unknown memory".into(), |bytes| format!("{bytes} bytes"));
            tracing::info!(
                "training takes on pjrt:{}, which has {room} left, with prompts of up to {prompt} tokens, at least:\n{table}",
                kind.name()
            );
        }
        runtime.check_memory(table).map_err(policy::Error::from)?;
    }
    let runtime = runtime.with_wait_limit(config.policy.wait_limit());
    let policy = match model {
        Some(model) => {
            let weights = model.folder.weights()?;
            match &config.lora {
                Some(lora) => DevicePolicy::from_weights_with_lora(
                    &runtime,
                    shape,
                    &weights,
                    lora,
                    config.seed,
                    config.loss(),
                    options,
                ),
                None => DevicePolicy::from_weights(&runtime, shape, &weights, config.loss(), options),
            }
        }
        None => {
            let mut weights = Vec::new();
            let of_model = TrainConfig { lora: None, ..config.clone() };
            host_policy(&of_model, shape, None, Purpose::Export)?.export_model(&mut weights)?;
            let policy = DevicePolicy::from_tensors(&runtime, shape, &weights, config.loss(), options);
            match &config.lora {
                Some(lora) => policy.and_then(|policy| policy.with_lora(lora, config.seed)),
                None => policy,
            }
        }
    };
    let policy = match config.grpo.value_loss() {
        Some(of_values) => policy.and_then(|policy| policy.with_value_head(of_values)),
        None => policy,
    };
    Ok(policy.map_err(policy::Error::from)?)
}

/// How the policy of a run uses its device.
fn device_options(config: &TrainConfig, shape: &ModelConfig) -> Result<DevicePolicyOptions> {
    Ok(DevicePolicyOptions {
        compute: config.policy.compute(),
        attention: config.policy.attention(),
        save: config.policy.save(shape)?,
        can_roll_back: config.keeps_state_to_roll_back(),
        rollout: RolloutOptions { slots: config.rollout.batch_size, ..RolloutOptions::default() },
        ..DevicePolicyOptions::default()
    })
}

/// The sizes of a run on a device whose longest prompt has so many tokens, and where the model's weights are of number type `weights`.
fn training_sizes(
    config: &TrainConfig,
    shape: &ModelConfig,
    weights: models::Dtype,
    prompt: usize,
) -> Result<TrainingSizes> {
    let completion = config.rollout.max_completion_length();
    let sequence = Sequence { prompt: vec![0; prompt], completion: vec![0; completion] };
    Ok(TrainingSizes {
        micro_batch: TrainShape::of(&vec![sequence; config.grpo.micro_batch_sequences()]),
        rollout: RolloutSizes {
            prompts: config.grpo.prompts_per_step,
            longest_prompt: prompt,
            num_generations: config.grpo.num_generations,
            max_completion_length: completion,
        },
        weights,
        adapters: config.lora.as_ref().map(|lora| adapter_weights(lora, shape)).transpose()?,
        ref_policy: config.needs_ref_policy() && config.lora.is_none(),
        mixes_ref_policy: config.grpo.sync_ref_model,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::one_update("{}", false)]
    #[case::two_updates("{grpo: {num_iterations: 2}}", true)]
    #[case::a_reference_that_moves("{grpo: {sync_ref_model: true}, loss: {beta: 0.1}}", true)]
    #[case::switched_off("{grpo: {num_iterations: 2}, policy: {can_roll_back: false, device: 'pjrt:cpu'}}", false)]
    fn weights_to_go_back_to_take_memory_of_a_device_only_where_a_step_can_be_taken_back(
        #[case] settings: &str,
        #[case] twice: bool,
    ) {
        let config = TrainConfig::from_layers(grpo_files::Layers::new().text("a test", settings).unwrap()).unwrap();
        let shape = config.model.shape().unwrap();
        let options = device_options(&config, shape).unwrap();
        let sizes = training_sizes(&config, shape, models::Dtype::F32, 16).unwrap();
        assert_eq!(sizes.memory(shape, &options).to_string().contains("to go back to"), twice);
        assert_eq!(config.keeps_state_to_roll_back(), twice);
    }
}
