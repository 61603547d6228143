//! Arguments of all subcommands with a run's configuration.

use grpo_files::{Configuration, Layers};
use grpo_trainer::TrainConfig;
use std::path::{Path, PathBuf};

/// The layers of a configuration on the command line.
#[derive(Debug, clap::Args)]
pub(crate) struct LayerArgs {
    /// YAML or JSON file, as in configs/train/ [default: the built-in configs/train/arithmetic.yaml].
    #[arg(value_name = "CONFIG")]
    config: Option<PathBuf>,
    /// An older form of the argument CONFIG.
    #[arg(long = "config", value_name = "FILE", hide = true, conflicts_with = "config")]
    named: Option<PathBuf>,
    /// Set one key, after the file and the environment; repeatable.
    #[arg(long, value_name = "A.B=VALUE")]
    pub(crate) set: Vec<String>,
}

impl LayerArgs {
    /// Returns the configuration of a run: defaults < file < environment < `--set`.
    pub(crate) fn resolve(&self) -> anyhow::Result<TrainConfig> {
        Ok(TrainConfig::from_layers(self.layers()?)?)
    }

    /// Returns the layers of a run's configuration: file < environment < `--set`.
    pub(crate) fn layers(&self) -> grpo_files::Result<Layers> {
        of_run(self.config.as_ref().or(self.named.as_ref()), &self.set)
    }
}

/// Returns the configuration of a run: defaults < `file` < environment < `set`; see [`TrainConfig::from_layers`].
pub(crate) fn resolve_run(file: Option<impl AsRef<Path>>, set: &[String]) -> anyhow::Result<TrainConfig> {
    Ok(TrainConfig::from_layers(of_run(file, set)?)?)
}

/// Returns the layers of a run's configuration: `file` < environment < `set`.
pub(crate) fn of_run(file: Option<impl AsRef<Path>>, set: &[String]) -> grpo_files::Result<Layers> {
    let layers = match file {
        Some(path) => Layers::new().file(path.as_ref())?,
        None => Layers::new(),
    };
    layers.env(std::env::vars_os())?.set(set)
}

/// Returns the layers of a configuration: `file`, or `default` (name and text) if it is `None` < environment < `set`.
pub(crate) fn of_file(
    file: Option<impl AsRef<Path>>,
    set: &[String],
    default: (&str, &str),
) -> grpo_files::Result<Layers> {
    let layers = match file {
        Some(path) => Layers::new().file(path.as_ref())?,
        None => Layers::new().text(default.0, default.1)?,
    };
    layers.env(std::env::vars_os())?.set(set)
}

/// Returns the configuration of [`of_file`] over its defaults.
pub(crate) fn resolve<T>(file: Option<impl AsRef<Path>>, set: &[String], default: (&str, &str)) -> grpo_files::Result<T>
where
    T: Configuration,
{
    of_file(file, set, default)?.resolve()
}
