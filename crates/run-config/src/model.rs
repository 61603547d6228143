//! The key `model`: a folder or a name on Hugging Face, or the section with the shape of a new model.

use grpo_models::ModelConfig;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use smart_default::SmartDefault;
use std::fmt;

/// The source of the policy's initial weights.
///
/// ```
/// use grpo_run_config::{ModelSource, TrainConfig};
///
/// // In a file: `model: Qwen/Qwen2.5-0.5B-Instruct`, or `model: path/to/folder`.
/// let pretrained = TrainConfig { model: ModelSource::Pretrained("path/to/folder".into()), ..Default::default() };
/// let new = TrainConfig { model: grpo_models::ModelConfig { hidden_size: 32, ..Default::default() }.into(), ..Default::default() };
/// # assert!(pretrained.model.shape().is_none() && new.model.shape().is_some());
/// ```
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize)]
#[serde(untagged)]
pub enum ModelSource {
    /// A model folder in Hugging Face's layout, or a model's name (`ORGANISATION/NAME`) in the local cache or on the hub.
    Pretrained(String),
    /// A new model of this shape, with random weights that depend on the seed.
    #[default]
    New(Box<ModelConfig>),
}

impl ModelSource {
    /// Returns the shape of a new model; `None` for a pretrained one.
    pub fn shape(&self) -> Option<&ModelConfig> {
        match self {
            Self::New(shape) => Some(shape),
            Self::Pretrained(_) => None,
        }
    }

    /// Returns the shape for changes; a pretrained model becomes a new model of the default shape.
    pub fn shape_mut(&mut self) -> &mut ModelConfig {
        if let Self::Pretrained(_) = self {
            *self = Self::default();
        }
        match self {
            Self::New(shape) => shape,
            Self::Pretrained(_) => unreachable!("replaced above"),
        }
    }
}

impl From<ModelConfig> for ModelSource {
    fn from(shape: ModelConfig) -> Self {
        Self::New(Box::new(shape))
    }
}

/// Written by hand, because the errors of an untagged enum would not name the wrong key.
impl<'de> Deserialize<'de> for ModelSource {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Source;
        impl<'de> Visitor<'de> for Source {
            type Value = ModelSource;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a model folder, the name of a model, or a section with the shape of a new one")
            }
            fn visit_str<E: Error>(self, name: &str) -> Result<ModelSource, E> {
                Ok(ModelSource::Pretrained(name.to_owned()))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ModelSource, A::Error> {
                ModelConfig::deserialize(MapAccessDeserializer::new(map)).map(ModelSource::from)
            }
        }
        deserializer.deserialize_any(Source)
    }
}
