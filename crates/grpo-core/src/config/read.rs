//! Reading configurations: flat, without unknown keys.

use super::LossConfig;
use crate::backend_api::strict::{self, UniqueKeys};
use crate::batch::StepData;
use crate::error::{Error, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use serde_json::Value;

impl Serialize for LossConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

/// serde cannot refuse unknown keys of flattened structs, so they are looked up before.
impl<'de> Deserialize<'de> for LossConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let UniqueKeys(given) = UniqueKeys::deserialize(deserializer)?;
        if !given.is_object() {
            return Err(de::Error::custom(not_a_map(&given)));
        }
        of_the_loss(&given).map_err(de::Error::custom)?;
        let known = serde_json::to_value(Self::default()).map_err(de::Error::custom)?;
        strict::reject_unknown_keys(&given, &known, "").map_err(de::Error::custom)?;
        Self::deserialize(given).map_err(de::Error::custom)
    }
}

/// Whether no key is known of a batch only.
fn of_the_loss(given: &Value) -> Result<()> {
    match StepData::KEYS.into_iter().find(|key| given.get(key).is_some()) {
        Some(key) => Err(Error::Config(format!(
            "{key} is known of a batch, not of a loss: give it with the batch (TokenBatch::with_step), or beside the loss \
             of a batch file"
        ))),
        None => Ok(()),
    }
}

fn not_a_map(value: &Value) -> String {
    format!("expected a map of loss keys, got {value}")
}

impl LossConfig {
    /// Reads and validates a JSON object; keys that are absent keep their defaults.
    ///
    /// # Errors
    /// [`Error::UnknownKey`], or [`Error::Config`] for values that are not legal alone or together.
    pub fn from_json(text: &str) -> Result<Self> {
        let UniqueKeys(value) = serde_json::from_str(text).map_err(|e| Error::Config(format!("not JSON: {e}")))?;
        Self::from_value(value)
    }

    /// As [`LossConfig::from_json`], from a parsed value (of YAML, TOML, the environment ...).
    ///
    /// # Errors
    /// As [`LossConfig::from_json`].
    pub fn from_value(value: Value) -> Result<Self> {
        if !value.is_object() {
            return Err(Error::Config(not_a_map(&value)));
        }
        of_the_loss(&value)?;
        let config: Self = strict::from_value(value)?;
        config.validate()?;
        Ok(config)
    }
}
