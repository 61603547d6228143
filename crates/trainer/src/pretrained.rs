//! A model that is read: its folder, its tokenizer, its weights.

use crate::error::{Error, Result};
use crate::train_config::{ModelSource, TrainConfig};
use models::{HfTokenizer, ModelFolder, Tokenizer, Trained, TrainingMemory, available_memory};
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
    /// Those of [`HfTokenizer::open`]; [`crate::Error::File`] for a template that cannot be read.
    pub(crate) fn tokenizer(&self, config: &TrainConfig) -> Result<Box<dyn Tokenizer>> {
        let (folder, data) = (&self.folder, &config.data);
        let tokenizer =
            HfTokenizer::open(folder.path(), &folder.generation().eos_token_id, folder.config().vocab_size)?;
        let tokenizer = match &data.chat_template {
            None => tokenizer,
            Some(path) => {
                let template = std::fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
                tokenizer.with_chat_template(&template, &path.display().to_string())
            }
        };
        Ok(Box::new(tokenizer.with_chat_template_kwargs(data.chat_template_kwargs.clone())))
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
        let weights = self.folder.weights()?;
        weights.check(shape)?;
        weights.check_finite()?;
        let policy = BurnPolicy::from_weights(shape, &weights, loss)?;
        Ok(match &config.lora {
            Some(lora) => policy.with_lora(lora, config.seed)?,
            None => policy,
        })
    }
}
