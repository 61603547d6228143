//! Configuration of metrics sinks other than metrics.jsonl. It does not affect the numbers of a run.

use crate::error::Result;
use crate::wandb::Mode;
use grpo_files::check_key as check;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use std::path::PathBuf;

/// The section `logging` of a configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoggingConfig {
    /// `true` if event files are written to `tensorboard/` in the run folder.
    pub tensorboard: bool,
}

/// The section `wandb` of a configuration, with the names of the SDK's `wandb.init`.
#[derive(Clone, Debug, SmartDefault, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WandbConfig {
    /// The mode; default the environment variable `WANDB_MODE`, else disabled.
    pub mode: Option<Mode>,
    /// The project of the run.
    #[default("grpo".into())]
    pub project: String,
    /// The user or team; default the server's.
    pub entity: Option<String>,
    /// The displayed name; default `run.name`.
    pub name: Option<String>,
    /// The group of the run.
    pub group: Option<String>,
    /// The tags of the run.
    pub tags: Vec<String>,
    /// The folder that contains `wandb/`; default the run folder.
    pub dir: Option<PathBuf>,
}

impl WandbConfig {
    /// Returns the mode from the configuration, else from `WANDB_MODE`, else disabled.
    ///
    /// # Errors
    /// [`crate::Error::Mode`] if the configuration has no mode and `WANDB_MODE` is invalid.
    pub fn resolved_mode(&self) -> Result<Mode> {
        match (self.mode, std::env::var_os("WANDB_MODE")) {
            (Some(mode), _) => Ok(mode),
            (None, Some(text)) => Mode::parse(&text.to_string_lossy()),
            (None, None) => Ok(Mode::Disabled),
        }
    }

    /// Checks every field as the SDK does, and `WANDB_MODE` if it is used.
    ///
    /// # Errors
    /// [`crate::Error::Config`]; the errors of [`WandbConfig::resolved_mode`].
    pub fn validate(&self) -> Result<()> {
        self.resolved_mode()?;
        let fits = (1..=128).contains(&self.project.chars().count())
            && !self.project.contains(['/', '\\', '#', '?', '%', ':']);
        check(fits, "wandb.project", "1 to 128 characters without any of / \\ # ? % :", &self.project)?;
        for tag in &self.tags {
            check((1..=64).contains(&tag.chars().count()), "wandb.tags", "1 to 64 characters per tag", tag)?;
        }
        Ok(())
    }
}
