//! A model that is read: its folder, its tokenizer, its weights.

use crate::error::Result;
use crate::prompts::open_tokenizer;
use crate::train_config::{ModelSource, TrainConfig};
use models::{ModelFolder, Tokenizer, Trained, TrainingMemory, available_memory};
use policy_burn::{BurnPolicy, PolicyLoss};

/// The folder of the model that a configuration names, found and read but for its weights.
pub(crate) struct Pretrained {
    /// What the folder says of the model.
    pub(crate) folder: ModelFolder,
}

impl Pretrained {
    /// The model that `config` names; `None` where it describes a new one.
    ///
    /// # Errors
    /// [`crate::Error::Model`] where there is no such model, or where it is none that can be computed.
    pub(crate) fn of(config: &TrainConfig) -> Result<Option<Self>> {
        let ModelSource::Pretrained(name) = &config.model else { return Ok(None) };
        let path = models::locate(name, config.model_revision.as_deref())?;
        Ok(Some(Self { folder: ModelFolder::open(&path)? }))
    }

    /// The tokenizer, with the stop tokens of the folder, and the chat template and its variables of the section `data`.
    ///
    /// # Errors
    /// Those of [`open_tokenizer`].
    pub(crate) fn tokenizer(&self, config: &TrainConfig) -> Result<Box<dyn Tokenizer>> {
        Ok(Box::new(open_tokenizer(&self.folder, &config.data)?))
    }

    /// The policy on the host, with the weights of the folder and adapters where the configuration has them.
    ///
    /// # Errors
    /// [`models::Error::TooLarge`] before anything is loaded; what is wrong with the weights otherwise.
    pub(crate) fn policy(&self, config: &TrainConfig, loss: PolicyLoss) -> Result<BurnPolicy> {
        let shape = self.folder.config();
        let trained = match &config.lora {
            None => Trained::All,
            Some(lora) => {
                Trained::Adapters(lora.parameters(shape)?.iter().map(|parameter| parameter.len() as u64).sum())
            }
        };
        let memory = TrainingMemory {
            weights: shape.parameter_count(),
            dtype: models::Dtype::F32,
            reference: config.needs_ref_policy() && config.lora.is_none(),
            trained,
        };
        let table = memory.table();
        tracing::info!(
            "{} of {}, which needs beside activations:\n{table}",
            self.folder.family(),
            self.folder.path().display()
        );
        if let Some(available) = available_memory() {
            table.check(available)?;
        }
        // Checked as they are read: names, shapes, and that every value is finite.
        let policy = BurnPolicy::from_weights(shape, &self.folder.weights()?, loss)?;
        Ok(match &config.lora {
            Some(lora) => policy.with_lora(lora, config.seed)?,
            None => policy,
        })
    }
}
