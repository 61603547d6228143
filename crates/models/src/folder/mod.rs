//! Hugging Face model folders.

mod card;
mod config_json;
pub(crate) mod export;
mod family;
pub(crate) mod fields;
mod generation;
mod json_text;
mod python_json;
mod rope_json;
mod wrapper;

pub use card::ModelCard;
pub use export::{ExportOptions, FolderWriter};
pub use family::Family;
pub use generation::GenerationDefaults;
pub use python_json::from_python_json;
pub use wrapper::Wrapper;

use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::names::HEAD;
use crate::weights::files::exists;
use crate::weights::{Dtype, Weights};
use config_json::ConfigJson;
use fields::Fields;
use std::path::{Path, PathBuf};

/// A model folder without its weights, which [`ModelFolder::weights`] opens.
///
/// ```no_run
/// let folder = grpo_models::ModelFolder::open("Qwen2.5-0.5B-Instruct".as_ref())?;
/// println!("{} with {} weights", folder.family(), folder.config().parameter_count());
/// let weights = folder.weights()?;
/// weights.check(folder.config())?;
/// # Ok::<(), grpo_models::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ModelFolder {
    path: PathBuf,
    family: Family,
    wrapper: Option<Wrapper>,
    config: ModelConfig,
    generation: GenerationDefaults,
    dtype: Option<Dtype>,
}

impl ModelFolder {
    /// Reads `config.json` and `generation_config.json`, if it exists. `config.json` may have the layout of transformers 4 (`rope_theta`,
    /// `rope_scaling`, `torch_dtype`) or 5 (`rope_parameters`, `dtype`).
    ///
    /// # Errors
    /// [`Error::File`] if a file is missing or cannot be read; [`Error::Json`] with line and column for invalid JSON; [`Error::Field`] with
    /// name, value and supported values of a field that asks for an unsupported computation. Fields that do not change the computation are
    /// ignored.
    pub fn open(path: &Path) -> Result<Self> {
        let file = path.join("config.json");
        if !exists(&file)? && exists(&path.join("params.json"))? {
            let reason = "there is no config.json, only params.json of Mistral's own format: download config.json, model*.safetensors and \
                          tokenizer.json of the same repository, or convert the folder with convert_mistral_weights_to_hf.py of transformers";
            return Err(Error::weights(path, reason));
        }
        let fields = Fields::read(&file)?;
        let has_head = || Some(Weights::open(path).ok()?.of_text().ok()?.contains(HEAD));
        let ConfigJson { family, wrapper, config, dtype } = ConfigJson::read(&fields, has_head)?;
        let generation = path.join("generation_config.json");
        let generation = if exists(&generation)? { Some(Fields::read(&generation)?) } else { None };
        let text = fields.object("text_config")?;
        let configs: Vec<&Fields> = std::iter::once(&fields).chain(&text).collect();
        let generation = GenerationDefaults::read(generation.as_ref(), &configs, config.vocab_size)?;
        Ok(Self { path: path.to_owned(), family, wrapper, config, generation, dtype })
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the model of images and text that the decoder belongs to, if any. Its other tensors are never loaded; an export copies them.
    pub fn wrapper(&self) -> Option<Wrapper> {
        self.wrapper
    }

    /// Returns the family of the model, or of its text decoder.
    pub fn family(&self) -> Family {
        self.family
    }

    /// Returns the decoder's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the sampling defaults and stop tokens.
    pub fn generation(&self) -> &GenerationDefaults {
        &self.generation
    }

    /// Returns the dtype in `config.json`, if present. The weights may have another.
    pub fn dtype(&self) -> Option<Dtype> {
        self.dtype
    }

    /// Maps the weights of the decoder into memory, by the names of a decoder without a wrapper. [`Weights::check`] checks that they match
    /// [`ModelFolder::config`].
    ///
    /// # Errors
    /// The errors of [`Weights::open`].
    pub fn weights(&self) -> Result<Weights> {
        let weights = Weights::open(&self.path)?;
        if self.wrapper.is_some() {
            weights.of_text()
        } else {
            weights.carrying(self.family.carried_prefix(&self.config).as_deref())
        }
    }
}
