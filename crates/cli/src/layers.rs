//! Arguments that every subcommand with a configuration has.

use grpo_files::{Configuration, Layers};
use std::path::{Path, PathBuf};
use trainer::TrainConfig;

/// The layers of a configuration on the command line.
#[derive(Debug, clap::Args)]
pub(crate) struct LayerArgs {
    /// YAML or JSON file, as in configs/train/ [default: the built-in configs/train/arithmetic.yaml].
    #[arg(value_name = "CONFIG")]
    config: Option<PathBuf>,
    /// The same, as it was called before every subcommand took its configuration as an argument.
    #[arg(long = "config", value_name = "FILE", hide = true, conflicts_with = "config")]
    named: Option<PathBuf>,
    /// Set one key, after the file and the environment; repeatable.
    #[arg(long, value_name = "A.B=VALUE")]
    pub(crate) set: Vec<String>,
}

impl LayerArgs {
    /// The configuration of a run: defaults < file < environment < `--set`.
    pub(crate) fn resolve(&self) -> anyhow::Result<TrainConfig> {
        resolve_run(self.config.as_ref().or(self.named.as_ref()), &self.set)
    }
}

/// The configuration of a run: defaults < `file` < environment < `set`; see [`TrainConfig::from_layers`].
pub(crate) fn resolve_run(file: Option<impl AsRef<Path>>, set: &[String]) -> anyhow::Result<TrainConfig> {
    Ok(TrainConfig::from_layers(of_run(file, set)?)?)
}

/// The layers of the configuration of a run: `file` < environment < `set`.
pub(crate) fn of_run(file: Option<impl AsRef<Path>>, set: &[String]) -> grpo_files::Result<Layers> {
    let layers = match file {
        Some(path) => Layers::new().file(path.as_ref())?,
        None => Layers::new(),
    };
    layers.env(std::env::vars_os())?.set(set)
}

/// Defaults < `file`, or `default` (name and text) when there is none < environment < `set`.
pub(crate) fn resolve<T>(file: Option<impl AsRef<Path>>, set: &[String], default: (&str, &str)) -> grpo_files::Result<T>
where
    T: Configuration,
{
    let layers = match file {
        Some(path) => Layers::new().file(path.as_ref())?,
        None => Layers::new().text(default.0, default.1)?,
    };
    layers.env(std::env::vars_os())?.set(set)?.resolve()
}
