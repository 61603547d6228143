//! The loss of a batch file: keys of the loss and of the step in one map.

use crate::backend_api::strict::{self, UniqueKeys};
use crate::batch::StepData;
use crate::config::LossConfig;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A loss and the data of its batch's optimizer step, as one flat map in a batch file.
///
/// ```
/// use grpo_core::format::BatchLoss;
///
/// let BatchLoss { loss, step } =
///     BatchLoss::from_json(r#"{"loss_type": "dapo", "epsilon_high": 0.28, "num_items_in_batch": 512}"#)?;
/// assert_eq!((loss.ratio_high(), step.num_items_in_batch), (1.28, Some(512.0)));
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "UniqueKeys", into = "Value")]
pub struct BatchLoss {
    /// The loss.
    pub loss: LossConfig,
    /// The step.
    pub step: StepData,
}

impl BatchLoss {
    /// Reads and validates a JSON object; absent keys keep their defaults.
    ///
    /// # Errors
    /// The errors of [`LossConfig::from_json`].
    pub fn from_json(text: &str) -> Result<Self> {
        let UniqueKeys(value) = serde_json::from_str(text).map_err(|e| Error::Config(format!("not JSON: {e}")))?;
        let this = Self::from_value(value)?;
        this.loss.validate()?;
        Ok(this)
    }

    fn from_value(value: Value) -> Result<Self> {
        let Value::Object(keys) = value else {
            return Err(Error::Config(format!("expected a map of loss keys, got {value}")));
        };
        let known = serde_json::to_value(Self::default()).map_err(|e| Error::Config(e.to_string()))?;
        let is_step = |key: &String| StepData::KEYS.contains(&key.as_str());
        let (of_step, of_loss): (Map<_, _>, Map<_, _>) = keys.into_iter().partition(|(key, _)| is_step(key));
        strict::reject_unknown_keys(&Value::Object(of_loss.clone()), &known, "")?;
        Ok(Self {
            loss: strict::from_value(Value::Object(of_loss))?,
            step: strict::from_value(Value::Object(of_step))?,
        })
    }
}

impl TryFrom<UniqueKeys> for BatchLoss {
    type Error = Error;
    fn try_from(UniqueKeys(value): UniqueKeys) -> Result<Self> {
        Self::from_value(value)
    }
}

impl From<BatchLoss> for Value {
    fn from(this: BatchLoss) -> Self {
        let map = |value: serde_json::Result<Value>| match value {
            Ok(Value::Object(map)) => map,
            // Structs of numbers, names and lists serialise to maps.
            _ => Map::new(),
        };
        let mut keys = map(serde_json::to_value(this.loss));
        keys.extend(map(serde_json::to_value(this.step)));
        Self::Object(keys)
    }
}
