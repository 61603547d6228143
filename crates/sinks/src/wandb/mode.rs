//! Modes of W&B runs.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use strum::EnumString;

/// The key `wandb.mode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, EnumString)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Nothing is written.
    #[default]
    #[strum(serialize = "disabled", serialize = "")]
    Disabled,
    /// The run stays in its folder until `wandb sync` uploads it.
    #[strum(serialize = "offline", serialize = "dryrun")]
    Offline,
    /// The run is written as in mode offline, and the caller calls [`upload`](super::upload) at the end.
    #[strum(serialize = "online", serialize = "run")]
    Online,
}

impl Mode {
    /// Parses `WANDB_MODE`, including the SDK's old names `dryrun` and `run`.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        text.parse().map_err(|_| Error::Mode(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wandb_modes_have_the_names_of_the_sdk() {
        for (text, mode) in [
            ("", Mode::Disabled),
            ("disabled", Mode::Disabled),
            ("offline", Mode::Offline),
            ("dryrun", Mode::Offline),
            ("online", Mode::Online),
            ("run", Mode::Online),
        ] {
            assert_eq!(Mode::parse(text).unwrap(), mode);
        }
        let error = Mode::parse("shared").unwrap_err().to_string();
        assert!(error.contains("WANDB_MODE") && error.contains("shared"), "{error}");
        assert_eq!(serde_json::to_string(&Mode::Online).unwrap(), "\"online\"");
    }
}
