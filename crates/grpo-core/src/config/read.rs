//! Deserialisation of configurations: flat, without unknown keys.

use super::LossConfig;
use crate::backend_api::strict::{self, UniqueKeys};
use crate::batch::StepData;
use crate::error::{Error, Result};
use serde::de::{self, DeserializeSeed, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};
use std::fmt;

impl Serialize for LossConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

/// serde cannot refuse unknown keys of flattened structs, nor name the key whose value is wrong, so this implementation reads the keys one
/// by one.
impl<'de> Deserialize<'de> for LossConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let given = Value::Object(deserializer.deserialize_map(Keys)?);
        of_the_loss(&given).map_err(de::Error::custom)?;
        let known = serde_json::to_value(Self::default()).map_err(de::Error::custom)?;
        strict::reject_unknown_keys(&given, &known, "").map_err(de::Error::custom)?;
        Self::deserialize(given).map_err(de::Error::custom)
    }
}

/// The keys of a map, each once and with a value of its type.
struct Keys;

impl<'de> Visitor<'de> for Keys {
    type Value = Map<String, Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of loss keys")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut keys = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            let value = map.next_value_seed(ValueOf(&key))?;
            if keys.contains_key(&key) {
                return Err(de::Error::custom(format!("key `{key}` is there twice")));
            }
            keys.insert(key, value);
        }
        Ok(keys)
    }
}

/// The value of a key. It is checked while its key is being read, so that readers that track the path can name it.
struct ValueOf<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for ValueOf<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        let UniqueKeys(value) = UniqueKeys::deserialize(deserializer)?;
        let alone = Map::from_iter([(self.0.to_owned(), value.clone())]);
        LossConfig::deserialize(Value::Object(alone)).map_err(de::Error::custom)?;
        Ok(value)
    }
}

/// Checks that no key belongs to a batch instead of a loss.
fn of_the_loss(given: &Value) -> Result<()> {
    match StepData::KEYS.into_iter().find(|key| given.get(key).is_some()) {
        Some(key) => Err(Error::Config(format!(
            "{key} is a key of a batch, not of a loss: set it with the batch (TokenBatch::with_step), or next to the loss \
             in a batch file"
        ))),
        None => Ok(()),
    }
}

fn not_a_map(value: &Value) -> String {
    format!("expected a map of loss keys, got {value}")
}

impl LossConfig {
    /// Reads and validates a JSON object; absent keys keep their defaults.
    ///
    /// # Errors
    /// [`Error::UnknownKey`], or [`Error::Config`] for illegal values or combinations.
    pub fn from_json(text: &str) -> Result<Self> {
        let UniqueKeys(value) = serde_json::from_str(text).map_err(|e| Error::Config(format!("not JSON: {e}")))?;
        Self::from_value(value)
    }

    /// Reads and validates a parsed value (from YAML, TOML, the environment ...) like [`LossConfig::from_json`].
    ///
    /// # Errors
    /// The errors of [`LossConfig::from_json`].
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
