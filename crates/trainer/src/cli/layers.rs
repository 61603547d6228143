//! Arguments that every subcommand with a configuration has.

use serde::{Serialize, de::DeserializeOwned};
use std::path::PathBuf;
use trainer::config_layers::Layers;

/// Where a configuration comes from.
#[derive(Debug, clap::Args)]
pub(crate) struct LayerArgs {
    /// YAML or JSON file.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Set one key, after the file and the environment; repeatable.
    #[arg(long, value_name = "A.B=VALUE")]
    pub(crate) set: Vec<String>,
}

impl LayerArgs {
    /// Defaults < the file, or `default` (name and text) when none is given < environment < `--set`.
    pub(crate) fn resolve<T>(&self, default: (&str, &str)) -> trainer::Result<T>
    where
        T: Default + Serialize + DeserializeOwned,
    {
        let layers = match &self.config {
            Some(path) => Layers::new().file(path)?,
            None => Layers::new().text(default.0, default.1)?,
        };
        layers.env(std::env::vars_os())?.set(&self.set)?.resolve()
    }
}
