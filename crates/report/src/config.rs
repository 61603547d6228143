//! Configurations of runs as values by key.

use grpo_files::{read_regular, redact};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The size limit of a configuration file in bytes, as in `grpo train`.
const MAX_BYTES: u64 = 1 << 20;

/// Reads a configuration without its secrets, because pages are meant to be shared. Errors lack the file name.
pub(crate) fn read(path: &Path) -> Result<Value, String> {
    let bytes = read_regular(path, MAX_BYTES).map_err(|e| e.to_string())?;
    let text = String::from_utf8(bytes).map_err(|e| e.to_string())?;
    let mut value: Value = serde_saphyr::from_str(&text).map_err(|e| {
        let text = e.to_string();
        text.lines().next().unwrap_or_default().to_owned()
    })?;
    if !value.is_object() {
        return Err("it is no map of keys".to_owned());
    }
    redact(&mut value);
    Ok(value)
}

/// Returns the values of a configuration by dotted key, formatted for display. A list is a single value.
pub(crate) fn leaves(value: &Value) -> BTreeMap<String, String> {
    fn walk(value: &Value, path: &str, out: &mut BTreeMap<String, String>) {
        match value {
            Value::Object(map) if !map.is_empty() => {
                for (key, value) in map {
                    walk(value, &if path.is_empty() { key.clone() } else { format!("{path}.{key}") }, out);
                }
            }
            Value::Number(number) => drop(out.insert(path.to_owned(), number_text(number))),
            Value::String(text) => drop(out.insert(path.to_owned(), text.clone())),
            other => drop(out.insert(path.to_owned(), other.to_string())),
        }
    }
    let mut out = BTreeMap::new();
    walk(value, "", &mut out);
    out
}

/// Formats a number so that `1` and `1.0` are equal.
fn number_text(number: &serde_json::Number) -> String {
    match number.as_f64() {
        Some(value) if number.is_f64() => format!("{value}"),
        _ => number.to_string(),
    }
}

/// Returns the keys whose values differ between configurations, with the value in each; `None` if it is missing.
pub(crate) fn differences(configs: &[Option<&Value>]) -> Vec<(String, Vec<Option<String>>)> {
    let leaves: Vec<_> = configs.iter().map(|config| config.map(leaves)).collect();
    let keys: BTreeSet<&String> = leaves.iter().flatten().flat_map(BTreeMap::keys).collect();
    let row = |key: &String| -> Vec<_> { leaves.iter().map(|leaves| leaves.as_ref()?.get(key).cloned()).collect() };
    // A run without a readable configuration is not compared.
    let differs = |row: &Vec<Option<String>>| {
        let mut known = row.iter().zip(configs).filter(|(_, config)| config.is_some()).map(|(value, _)| value);
        let first = known.next();
        known.any(|value| Some(value) != first)
    };
    keys.into_iter().map(|key| (key.clone(), row(key))).filter(|(_, row)| differs(row)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_keys_that_differ_are_shown() {
        let a = json!({ "seed": 1, "loss": { "beta": 0.0, "loss_type": "grpo" }, "data": { "files": ["a"] } });
        let b = json!({ "seed": 1.0, "loss": { "beta": 0.04, "loss_type": "grpo" }, "data": { "files": ["b"] }, "model": "x" });
        let text = |value: &str| Some(value.to_owned());
        let expected = vec![
            ("data.files".to_owned(), vec![text("[\"a\"]"), text("[\"b\"]"), None]),
            ("loss.beta".to_owned(), vec![text("0"), text("0.04"), None]),
            ("model".to_owned(), vec![None, text("x"), None]),
        ];
        assert_eq!(differences(&[Some(&a), Some(&b), None]), expected);
        assert!(differences(&[Some(&a), Some(&a)]).is_empty() && differences(&[Some(&a)]).is_empty());
    }
}
