//! Opens pretrained models, and estimates the memory of training.

use crate::error::Result;
use grpo_models::{Dtype, MemoryTable, ModelConfig, ModelFolder, TrainedMemory, TrainingMemory, resident_memory};
use grpo_planner::trained;
use grpo_policy_cpu::{PolicyLoss, StepMemory};
use grpo_run_config::{ModelSource, TrainConfig};
use std::path::PathBuf;

/// The use of a policy.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Purpose {
    /// Training.
    Training,
    /// Export of a checkpoint's weights.
    Export,
}

/// Returns `true` if the pretrained model stays the reference policy for the whole run.
pub(crate) fn keeps_files(config: &TrainConfig) -> bool {
    config.needs_ref_policy() && config.lora.is_none() && config.warmup.steps == 0 && !config.grpo.sync_ref_model
}

/// Opens the pretrained model that `config` names; `None` if the configuration describes a new one.
///
/// # Errors
/// [`grpo_trainer::Error::Model`] if the model is missing or not supported.
pub fn open_model(config: &TrainConfig) -> Result<Option<ModelFolder>> {
    open(config, grpo_models::locate)
}

/// Like [`open_model`], without looking for or downloading weights; the folder has the tokenizer files.
///
/// # Errors
/// The errors of [`open_model`].
pub(crate) fn open_described(config: &TrainConfig) -> Result<Option<ModelFolder>> {
    open(config, |name, revision| grpo_models::Hub::from_env().locate_tokenizer(name, revision))
}

/// Returns the model with its weights. Missing weights are downloaded from the commit of the files that were already read.
///
/// # Errors
/// The errors of [`open_model`].
pub(crate) fn with_weights(described: ModelFolder, config: &TrainConfig) -> Result<ModelFolder> {
    let ModelSource::Pretrained(name) = &config.model else { return Ok(described) };
    let path = grpo_models::locate_weights(name, config.model_revision.as_deref(), described.path())?;
    if path == described.path() { Ok(described) } else { Ok(ModelFolder::open(&path)?) }
}

fn open(
    config: &TrainConfig,
    locate: impl FnOnce(&str, Option<&str>) -> grpo_models::Result<PathBuf>,
) -> Result<Option<ModelFolder>> {
    let ModelSource::Pretrained(name) = &config.model else { return Ok(None) };
    Ok(Some(ModelFolder::open(&locate(name, config.model_revision.as_deref())?)?))
}

/// Returns the memory of training a model of this shape on prompts of up to `prompt` tokens, by part. `in_files` is the dtype of its weight
/// files, f32 for a new model.
///
/// # Errors
/// A loss that cannot be planned; LoRA targets that the model does not have.
pub(crate) fn training_memory(
    config: &TrainConfig,
    shape: &ModelConfig,
    in_files: Dtype,
    loss: &PolicyLoss,
    prompt: usize,
) -> Result<MemoryTable> {
    let needs_reference = config.needs_ref_policy() && config.lora.is_none();
    let memory = TrainingMemory {
        weights: shape.parameter_count(),
        dtype: if config.lora.is_some() { in_files } else { Dtype::F32 },
        quantized: config.policy.quantization.map(|quantization| quantization.memory(shape)),
        reference: needs_reference.then_some(if keeps_files(config) { in_files } else { Dtype::F32 }),
        trained: trained(config, shape)?,
        optimizer: config.largest_optimizer(),
    };
    let grpo = &config.grpo;
    let step = StepMemory {
        prompt,
        completion: config.rollout.max_completion_length(),
        samples: grpo.prompts_per_step * grpo.num_generations,
        per_prompt: grpo.num_generations,
        batch: config.rollout.batch_size,
        micro_batch: grpo.micro_batch_sequences(),
        products: config.policy.dtype.into(),
        records_experts: config.policy.replay_routing,
        head_adapter: config.lora.as_ref().is_some_and(|lora| {
            let matrices = lora.resolve(shape);
            matrices.is_ok_and(|matrices| matrices.iter().any(|matrix| matrix.name == "lm_head"))
        }),
    };
    let mut table = step.table(shape, &memory, loss)?;
    if config.keeps_state_to_roll_back() {
        let TrainedMemory { roll_back, .. } = TrainedMemory::of(memory.trained_weights(), memory.optimizer);
        table.push("state to go back to when a step fails", roll_back);
    }
    if let Some((now, _)) = resident_memory() {
        table.push("the program and its data", now);
    }
    Ok(table)
}
