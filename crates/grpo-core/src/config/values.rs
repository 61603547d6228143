//! Values with more than one notation.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::ops::RangeInclusive;

/// Legal range of temperatures, logit scales and softcaps; f32 precision does not suffice outside.
pub(crate) const TEMPERATURES: RangeInclusive<f64> = 1e-6..=1e6;

/// A bound that can be switched off: a number, or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "Value")]
pub enum Bound {
    /// No bound.
    Off,
    /// Values are clamped to +- this number.
    At(f64),
}

impl Bound {
    /// Returns the number, or `None` if the bound is off.
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
            // YAML 1.1 parses `off` as false.
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

/// Bounds of a ratio: an upper bound, or both bounds as `"0.5_2.0"` (verl) or `[0.5, 2.0]`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "Value")]
pub struct Threshold {
    /// Lower bound.
    pub low: Option<f64>,
    /// Upper bound.
    pub high: f64,
}

impl Threshold {
    /// Parses the text form.
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

/// Thresholds in verl's notation: one number, `low_high`, or several of these separated by commas.
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
