//! Data sets on the Hugging Face Hub.

use crate::error::Result;
use grpo_data::{DataConfig, DatasetHub, HubError};
use grpo_models::Hub;
use std::path::PathBuf;

/// The hub and the cache of the environment.
struct HuggingFace(Hub);

impl DatasetHub for HuggingFace {
    fn list(&self, name: &str, revision: Option<&str>) -> Result<Vec<String>, HubError> {
        Ok(self.0.list_dataset(name, revision)?)
    }

    fn fetch(&self, name: &str, revision: Option<&str>, files: &[String]) -> Result<Vec<PathBuf>, HubError> {
        Ok(self.0.fetch_dataset(name, revision, files)?)
    }
}

/// Replaces patterns, folders and names of data sets by paths of files, and downloads files that are not in the cache
/// ([`grpo_models::Hub::from_env`]).
///
/// # Errors
/// The errors of [`DataConfig::expand_paths`].
pub fn expand_paths(config: &mut DataConfig) -> Result<()> {
    Ok(config.expand_paths(&HuggingFace(Hub::from_env()))?)
}
