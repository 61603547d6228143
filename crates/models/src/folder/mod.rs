//! A Hugging Face model folder.

mod card;
mod config_json;
pub(crate) mod export;
pub(crate) mod fields;
mod generation;
mod json_text;
mod python_json;

pub use card::ModelCard;
pub use config_json::Family;
pub use export::{ExportOptions, FolderWriter};
pub use generation::GenerationDefaults;
pub use python_json::from_python_json;

use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::weights::{Dtype, Weights};
use config_json::ConfigJson;
pub(crate) use fields::Fields;
use std::path::{Path, PathBuf};

/// What a model folder says about its model: everything but the weights, which [`ModelFolder::weights`] opens.
///
/// ```no_run
/// let folder = models::ModelFolder::open("Qwen2.5-0.5B-Instruct".as_ref())?;
/// println!("{} with {} weights", folder.family(), folder.config().parameter_count());
/// let weights = folder.weights()?;
/// weights.check(folder.config())?;
/// # Ok::<(), models::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ModelFolder {
    path: PathBuf,
    family: Family,
    config: ModelConfig,
    generation: GenerationDefaults,
    dtype: Option<Dtype>,
}

impl ModelFolder {
    /// Reads `config.json` and, where it is there, `generation_config.json`. Both layouts of `config.json` are read: that of
    /// transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and that of 5 (`rope_parameters`, `dtype`).
    ///
    /// # Errors
    /// [`Error::File`] where a file is missing or cannot be read, [`Error::Json`] with line and column where it is no JSON, and
    /// [`Error::Field`] for a field that changes the mathematics to something that is not computed here: its name, its value,
    /// and what is supported. Fields that do not change what is computed are not read.
    pub fn open(path: &Path) -> Result<Self> {
        let fields = Fields::read(&path.join("config.json"))?;
        let ConfigJson { family, config, dtype } = ConfigJson::read(&fields)?;
        let generation = path.join("generation_config.json");
        let generation = if exists(&generation)? { Some(Fields::read(&generation)?) } else { None };
        let generation = GenerationDefaults::read(generation.as_ref(), &fields, config.vocab_size)?;
        Ok(Self { path: path.to_owned(), family, config, generation, dtype })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The family of decoders that the model belongs to.
    pub fn family(&self) -> Family {
        self.family
    }

    /// The decoder's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// How the authors sample from the model, and which tokens end a completion.
    pub fn generation(&self) -> &GenerationDefaults {
        &self.generation
    }

    /// The number type of the weights by `config.json`, if it names one. The weights themselves may have others.
    pub fn dtype(&self) -> Option<Dtype> {
        self.dtype
    }

    /// Maps the weights into memory. [`Weights::check`] says whether they are those of [`ModelFolder::config`].
    ///
    /// # Errors
    /// Those of [`Weights::open`].
    pub fn weights(&self) -> Result<Weights> {
        Weights::open(&self.path)
    }
}

/// Whether there is something of this name.
pub(crate) fn exists(path: &Path) -> Result<bool> {
    path.try_exists().map_err(|e| Error::io("look for", path, e))
}
