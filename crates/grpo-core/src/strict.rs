//! Configuration that refuses unknown keys and says which known key was probably meant.
//!
//! serde's own `deny_unknown_fields` lists the fields but does not know the path or the nearest name; this walks the
//! given value beside the serialised default, which therefore has to spell out every key (no `skip_serializing`).

use crate::error::{Error, Result};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

/// Deserialises `value` over the defaults of `T`, refusing keys that `T::default()` does not have.
///
/// # Errors
/// [`Error::UnknownKey`] with the nearest known key; [`Error::Config`] when a value has the wrong type.
pub fn from_value<T: DeserializeOwned + Serialize + Default>(value: Value) -> Result<T> {
    let known = serde_json::to_value(T::default()).map_err(|e| Error::Config(e.to_string()))?;
    reject_unknown_keys(&value, &known, "")?;
    serde_json::from_value(value).map_err(|e| Error::Config(e.to_string()))
}

/// Walks `given` beside `known`; keys under a known value that is not an object (an enum, a list, null) are left to
/// serde.
///
/// # Errors
/// [`Error::UnknownKey`] for the first key that `known` lacks.
pub fn reject_unknown_keys(given: &Value, known: &Value, path: &str) -> Result<()> {
    let (Value::Object(given), Value::Object(known)) = (given, known) else { return Ok(()) };
    for (key, value) in given {
        let here = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        match known.get(key) {
            Some(below) => reject_unknown_keys(value, below, &here)?,
            None => {
                return Err(Error::UnknownKey {
                    nearest: nearest(key, known.keys().map(String::as_str)).map(str::to_owned),
                    known: known.keys().cloned().collect::<Vec<_>>().join(", "),
                    path: here,
                });
            }
        }
    }
    Ok(())
}

/// The known name most similar to `name`, if any is similar enough to be a likely slip.
pub fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    known
        .map(|k| (strsim::jaro_winkler(&name.to_lowercase(), k), k))
        .filter(|(similarity, _)| *similarity > 0.75)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, k)| k)
}
