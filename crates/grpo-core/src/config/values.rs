//! Values that can be written in more than one way.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A bound that can be switched off: a number, or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "Value")]
pub enum Bound {
    /// No bound.
    Off,
    /// Values are held to +- this.
    At(f64),
}

impl Bound {
    /// The number, unless it is off.
    pub fn value(self) -> Option<f64> {
        match self {
            Self::Off => None,
            Self::At(number) => Some(number),
        }
    }
}

impl TryFrom<Value> for Bound {
    type Error = String;
    fn try_from(value: Value) -> Result<Self, String> {
        match (&value, value.as_f64()) {
            (_, Some(number)) => Ok(Self::At(number)),
            // YAML 1.1 reads the word off as false.
            (Value::Bool(false), _) => Ok(Self::Off),
            (Value::String(word), _) if word == "off" => Ok(Self::Off),
            _ => Err(format!("expected a number or `off`, got {value}")),
        }
    }
}

impl From<Bound> for Value {
    fn from(bound: Bound) -> Self {
        match bound {
            Bound::Off => "off".into(),
            Bound::At(number) => number.into(),
        }
    }
}

/// Bounds of a ratio: an upper one, or both as `"0.5_2.0"` (verl) or `[0.5, 2.0]`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "Value")]
pub struct Threshold {
    /// Lower bound.
    pub low: Option<f64>,
    /// Upper bound.
    pub high: f64,
}

impl Threshold {
    /// As text gives it.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let number = |part: &str| {
            part.trim().parse::<f64>().map_err(|_| format!("expected a number or `low_high`, got `{text}`"))
        };
        match text.split_once('_') {
            Some((low, high)) => Ok(Self { low: Some(number(low)?), high: number(high)? }),
            None => Ok(Self { low: None, high: number(text)? }),
        }
    }
}

impl TryFrom<Value> for Threshold {
    type Error = String;
    fn try_from(value: Value) -> Result<Self, String> {
        let wrong = || format!("expected a number, `\"low_high\"` or [low, high], got {value}");
        match &value {
            Value::String(text) => Self::parse(text),
            Value::Array(pair) => match pair.as_slice() {
                [low, high] => {
                    Ok(Self { low: Some(low.as_f64().ok_or_else(wrong)?), high: high.as_f64().ok_or_else(wrong)? })
                }
                _ => Err(wrong()),
            },
            _ => Ok(Self { low: None, high: value.as_f64().ok_or_else(wrong)? }),
        }
    }
}

impl From<Threshold> for Value {
    fn from(threshold: Threshold) -> Self {
        match threshold.low {
            None => threshold.high.into(),
            Some(low) => vec![low, threshold.high].into(),
        }
    }
}

/// Thresholds as verl writes them: one number, or `low_high`, or several of these between commas.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Value")]
pub struct Thresholds(pub String);

impl TryFrom<Value> for Thresholds {
    type Error = String;
    fn try_from(value: Value) -> Result<Self, String> {
        match value {
            Value::String(text) => Ok(Self(text)),
            Value::Number(number) => Ok(Self(number.to_string())),
            other => Err(format!("expected a number or text such as `0.5_2.0,0.1`, got {other}")),
        }
    }
}

/// Sequences of a batch: their indices, or one flag for each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "Value")]
pub enum Rows {
    /// Their indices.
    Indices(Vec<usize>),
    /// Whether each is one of them.
    Flags(Vec<bool>),
}

impl Default for Rows {
    fn default() -> Self {
        Self::Indices(vec![])
    }
}

impl Rows {
    /// Whether none is named.
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Indices(indices) => indices.is_empty(),
            Self::Flags(flags) => !flags.contains(&true),
        }
    }

    /// Indices in a batch of `sequences`.
    ///
    /// # Errors
    /// What does not fit such a batch, in words.
    pub(crate) fn indices(&self, sequences: usize) -> Result<Vec<usize>, String> {
        match self {
            Self::Indices(indices) => match indices.iter().find(|index| **index >= sequences) {
                Some(index) => Err(format!("names sequence {index}, but the batch has {sequences}")),
                None => Ok(indices.clone()),
            },
            Self::Flags(flags) if flags.len() == sequences => Ok((0..sequences).filter(|i| flags[*i]).collect()),
            Self::Flags(flags) => Err(format!("has {} flags, but the batch has {sequences} sequences", flags.len())),
        }
    }
}

impl TryFrom<Value> for Rows {
    type Error = String;
    fn try_from(value: Value) -> Result<Self, String> {
        let wrong = || format!("expected a list of indices, or of one true or false per sequence, got {value}");
        let list = value.as_array().ok_or_else(wrong)?;
        if !list.is_empty() && list.iter().all(Value::is_boolean) {
            return Ok(Self::Flags(list.iter().map(|flag| *flag == Value::Bool(true)).collect()));
        }
        let index = |v: &Value| v.as_u64().and_then(|i| usize::try_from(i).ok()).ok_or_else(wrong);
        let indices = list.iter().map(index).collect::<Result<Vec<_>, _>>()?;
        match indices.iter().enumerate().find(|(i, index)| indices[..*i].contains(index)) {
            Some((_, index)) => Err(format!("sequence {index} is there twice; flags are written true and false")),
            None => Ok(Self::Indices(indices)),
        }
    }
}

impl From<Rows> for Value {
    fn from(rows: Rows) -> Self {
        match rows {
            Rows::Indices(indices) => indices.into(),
            Rows::Flags(flags) => flags.into(),
        }
    }
}
