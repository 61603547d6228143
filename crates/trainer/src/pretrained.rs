//! Opens a pretrained model: its folder, tokenizer and weights.

use crate::error::Result;
use models::{Dtype, LoraConfig, MemoryTable, ModelConfig, ModelFolder, Trained, TrainingMemory};
use models::{available_memory, resident_memory};
use policy_cpu::{CpuPolicy, PolicyLoss, StepMemory};
use run_config::{ModelSource, TrainConfig};

/// The use of a policy.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Purpose {
    /// Training.
    Training,
    /// Export of a checkpoint's weights.
    Export,
}

/// Returns `true` if the pretrained model stays the reference policy for the whole run.
fn keeps_files(config: &TrainConfig) -> bool {
    config.needs_ref_policy() && config.lora.is_none() && config.warmup.steps == 0 && !config.grpo.sync_ref_model
}

/// A pretrained model, opened without its weights.
pub struct Pretrained {
    /// The contents of the model's folder.
    pub folder: ModelFolder,
}

/// Returns the number of adapter weights for a model of this shape.
pub(crate) fn adapter_weights(lora: &LoraConfig, shape: &ModelConfig) -> Result<u64> {
    Ok(lora.parameters(shape)?.iter().map(|parameter| parameter.len() as u64).sum())
}

impl Pretrained {
    /// Opens the model that `config` names; `None` if the configuration describes a new one.
    ///
    /// # Errors
    /// [`crate::Error::Model`] if the model is missing or not supported.
    pub fn of(config: &TrainConfig) -> Result<Option<Self>> {
        let ModelSource::Pretrained(name) = &config.model else { return Ok(None) };
        let path = models::locate(name, config.model_revision.as_deref())?;
        Ok(Some(Self { folder: ModelFolder::open(&path)? }))
    }

    /// Like [`Pretrained::of`], without looking for or downloading weights; the folder has the tokenizer files.
    ///
    /// # Errors
    /// The errors of [`Pretrained::of`].
    pub(crate) fn described(config: &TrainConfig) -> Result<Option<Self>> {
        let ModelSource::Pretrained(name) = &config.model else { return Ok(None) };
        let path = models::locate_tokenizer(name, config.model_revision.as_deref())?;
        Ok(Some(Self { folder: ModelFolder::open(&path)? }))
    }

    /// Returns the model with its weights. Missing weights are downloaded from the commit of the files that were already read.
    ///
    /// # Errors
    /// The errors of [`Pretrained::of`].
    pub(crate) fn with_weights(self, config: &TrainConfig) -> Result<Self> {
        let ModelSource::Pretrained(name) = &config.model else { return Ok(self) };
        let path = models::locate_weights(name, config.model_revision.as_deref(), self.folder.path())?;
        if path == self.folder.path() { Ok(self) } else { Ok(Self { folder: ModelFolder::open(&path)? }) }
    }

    /// Returns the CPU policy with the weights of the folder, and with adapters if they are configured.
    ///
    /// # Errors
    /// [`models::Error::TooLarge`] if an export does not fit into memory; invalid weights.
    pub(crate) fn policy(&self, config: &TrainConfig, loss: PolicyLoss, purpose: Purpose) -> Result<CpuPolicy> {
        let shape = self.folder.config();
        let weights = self.folder.weights()?;
        // For training, memory was checked before.
        if let (Purpose::Export, Some(available)) = (purpose, available_memory()) {
            let mut table = MemoryTable::new();
            table.push("weights (float32)", shape.parameter_count() * Dtype::F32.size() as u64);
            table.check(available)?;
        }
        // Names, shapes and finiteness are checked while reading. Frozen weights stay in their files.
        let policy = match &config.lora {
            Some(lora) => return Ok(CpuPolicy::mapped_with_lora(shape, &weights, lora, config.seed, loss)?),
            None => CpuPolicy::from_weights(shape, &weights, loss)?,
        };
        let keeps = matches!(purpose, Purpose::Training) && keeps_files(config);
        Ok(if keeps { policy.with_reference_in_files(&weights)? } else { policy })
    }
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
    let trained = match &config.lora {
        None => Trained::All,
        Some(lora) => Trained::Adapters(adapter_weights(lora, shape)?),
    };
    let needs_reference = config.needs_ref_policy() && config.lora.is_none();
    let memory = TrainingMemory {
        weights: shape.parameter_count(),
        dtype: if config.lora.is_some() { in_files } else { Dtype::F32 },
        reference: needs_reference.then_some(if keeps_files(config) { in_files } else { Dtype::F32 }),
        trained,
    };
    let grpo = &config.grpo;
    let step = StepMemory {
        prompt,
        completion: config.rollout.max_completion_length(),
        samples: grpo.prompts_per_step * grpo.num_generations,
        per_prompt: grpo.num_generations,
        batch: config.rollout.batch_size,
        micro_batch: grpo.micro_batch_sequences(),
        head_adapter: config.lora.as_ref().is_some_and(|lora| {
            let matrices = lora.resolve(shape);
            matrices.is_ok_and(|matrices| matrices.iter().any(|matrix| matrix.name == "lm_head"))
        }),
    };
    let mut table = step.table(shape, &memory, loss)?;
    if config.keeps_state_to_roll_back() {
        // Weights and moments from before the step, in f32.
        let trained = match trained {
            Trained::All => memory.weights,
            Trained::Adapters(count) => count,
        };
        let bytes = trained.saturating_mul(3 * Dtype::F32.size() as u64);
        table.push("state to go back to when a step fails (float32)", bytes);
    }
    if let Some((now, _)) = resident_memory() {
        table.push("the program and its data", now);
    }
    Ok(table)
}
