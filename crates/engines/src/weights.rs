//! Weights on their way to servers: a folder per version.

use crate::error::{Error, Result};
use grpo_models::{
    AdapterOptions, AdapterWriter, Dtype, ExportOptions, FolderWriter, LoraConfig, ModelFolder, NamedTensor,
};
use grpo_policy::Policy;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A version of the policy's weights. Its folder is removed when nothing refers to the version any more.
#[derive(Debug)]
pub(crate) struct Weights {
    /// The number of the copy, from 1: a later copy has a larger number.
    pub(crate) number: u64,
    /// The version, as in [`grpo_policy::RolloutEngine::update_weights`].
    pub(crate) version: u64,
    /// A name that no other run and no earlier process has given to weights.
    pub(crate) name: String,
    pub(crate) folder: PathBuf,
}

impl Drop for Weights {
    fn drop(&mut self) {
        // At the end of a run, the folder of all weights is removed before.
        if let Err(error) = std::fs::remove_dir_all(&self.folder)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!("cannot remove old weights in {}: {error}", self.folder.display());
        }
    }
}

/// Writes the folders of a run.
pub(crate) struct WeightFolders {
    root: TempDir,
    /// The beginning of the name of all weights.
    prefix: String,
    model: ModelFolder,
    lora: Option<LoraConfig>,
    dtype: Dtype,
    written: u64,
}

impl WeightFolders {
    /// Creates a folder for the weights of `model`, or of the adapters `lora` to it, in `place`. `dtype` is the dtype of whole models.
    ///
    /// # Errors
    /// [`Error::Folder`].
    pub(crate) fn create(
        place: Option<&Path>,
        model: ModelFolder,
        lora: Option<LoraConfig>,
        dtype: Dtype,
    ) -> Result<Self> {
        let place = place.map_or_else(std::env::temp_dir, Path::to_owned);
        let mut builder = tempfile::Builder::new();
        builder.prefix("grpo-").rand_bytes(10);
        // Servers may run as another user.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o755));
        let make = || builder.tempdir_in(std::path::absolute(&place)?);
        let root = make().map_err(|source| Error::Folder { path: place.clone(), source })?;
        // The random name of the folder is new on this machine and, in all likelihood, on all others.
        let prefix = root.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self { root, prefix, model, lora, dtype, written: 0 })
    }

    /// Writes the weights of the policy.
    ///
    /// # Errors
    /// Errors of the files and of the policy's export.
    pub(crate) fn write(&mut self, policy: &dyn Policy, version: u64) -> grpo_policy::Result<Weights> {
        self.written += 1;
        let name = format!("{}-{}", self.prefix, self.written);
        let folder = self.root.path().join(self.written.to_string());
        match &self.lora {
            Some(lora) => {
                let base_model = Some(self.model.path().to_string_lossy().into_owned());
                let options = AdapterOptions { base_model, copies_tokenizer: false, ..AdapterOptions::default() };
                let model = &self.model;
                let mut writer = AdapterWriter::create(&folder, lora, model.config(), Some(model), options)?;
                policy.export_adapter(&mut |tensor: NamedTensor| Ok(writer.write(&tensor.name, &tensor.data)?))?;
                writer.finish()?;
            }
            None => {
                let options = ExportOptions { dtype: self.dtype, ..ExportOptions::default() };
                let mut writer = FolderWriter::create(&folder, self.model.config(), Some(&self.model), options)?;
                policy.export_model(&mut |tensor: NamedTensor| Ok(writer.write(&tensor.name, &tensor.data)?))?;
                writer.finish()?;
            }
        }
        Ok(Weights { number: self.written, version, name, folder })
    }
}
