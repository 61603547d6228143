//! Configurations from layers: defaults < file < environment (`GRPO__A__B=value`) < `--set a.b=value`.
//!
//! Each layer is checked before the next one is applied, so that an error names its layer. Values of the environment and of `--set` are
//! parsed as YAML, as in a file: `3` is a number, `true` a boolean, `[a, b]` a list.
//!
//! The crate `config` merges the layers but does not parse them: its YAML reader expands aliases without limit, its paths may contain
//! indices and then allocate that many list entries (`a[999999999]`), and its deserializer rounds 3.7 to an integer. Layers are
//! therefore parsed and checked here, and serde deserializes the merged values.

mod wrong_type;

use crate::error::{Error, Result};
use crate::secrets::{HIDDEN, Secrets, redact, redacted};
use crate::whole::read_regular;
use config::{Config, ConfigError, Source, ValueKind};
use grpo_core::backend_api::strict;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};
use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::Path;

/// The prefix of environment variables of a configuration.
pub const ENV_PREFIX: &str = "GRPO__";

/// The size limit of a configuration file in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// A configuration type that [`Layers::resolve`] can create.
pub trait Configuration: DeserializeOwned + Serialize + Default {
    /// Returns the dotted paths of all keys, including keys of sections that are off by default, with `*` for names chosen by the user. The
    /// error about an unknown key suggests a key of the same name in another section. If the list is empty, the keys of the serialised
    /// default are used.
    fn keys() -> Vec<&'static str> {
        Vec::new()
    }

    /// Returns the key that replaces `removed`, a key of earlier versions, for the error about an unknown key.
    fn successor(_removed: &str) -> Option<&'static str> {
        None
    }

    /// Returns the end of the error about an unknown key whose last part is `name`, in place of the most similar key; `None` if similar keys are
    /// better suggestions.
    fn hint(_name: &str) -> Option<String> {
        None
    }
}

impl Configuration for grpo_core::LossConfig {}
impl Configuration for grpo_core::format::BatchLoss {}

/// The layers of a configuration, in the order of application.
#[derive(Clone, Debug, Default)]
pub struct Layers(Vec<Layer>);

#[derive(Clone, Debug)]
struct Layer {
    origin: String,
    value: Value,
    /// The key of an assignment.
    assigned: Option<String>,
}

impl Layers {
    /// Returns no layers: the configuration equals its defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a YAML or JSON file.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read; [`Error::Layer`] if it is not a YAML map.
    pub fn file(self, path: &Path) -> Result<Self> {
        let io = |e| Error::io("read the configuration", path, e);
        let bytes = read_regular(path, MAX_FILE_BYTES).map_err(io)?;
        let text = String::from_utf8(bytes).map_err(|e| io(std::io::Error::new(ErrorKind::InvalidData, e)))?;
        self.text(&path.display().to_string(), &text)
    }

    /// Adds YAML or JSON text; `origin` names it in errors.
    ///
    /// # Errors
    /// [`Error::Layer`] if the text is not a YAML map.
    pub fn text(self, origin: &str, text: &str) -> Result<Self> {
        match parse(text).map_err(|message| layer_error(origin, message))? {
            // A file with only comments.
            Value::Null => Ok(self),
            value => self.value(origin, value),
        }
    }

    /// Adds a JSON object; `origin` names it in errors.
    ///
    /// # Errors
    /// [`Error::Layer`] if the value is not an object.
    pub fn value(mut self, origin: &str, value: Value) -> Result<Self> {
        match value {
            Value::Object(_) => self.0.push(Layer { origin: origin.to_owned(), value, assigned: None }),
            other => return Err(layer_error(origin, format!("expected a map of keys, got {}", kind(&other)))),
        }
        Ok(self)
    }

    /// Puts these layers on top of the layers in `lower`.
    #[must_use]
    pub fn over(self, mut lower: Self) -> Self {
        lower.0.extend(self.0);
        lower
    }

    /// Lets an assignment to the whole section `key`, as in `--set rewards={math: 1}`, replace the section of the layers below it. The keys of
    /// other sections are merged.
    #[must_use]
    pub fn replacing(mut self, key: &str) -> Self {
        let replaces = |layer: &Layer| layer.assigned.as_deref() == Some(key) && layer.value[key].is_object();
        let last = self.0.iter().rposition(replaces).unwrap_or(0);
        for layer in &mut self.0[..last] {
            layer.value.as_object_mut().and_then(|map| map.remove(key));
        }
        self
    }

    /// Returns the value of the dotted path `key` in the last layer that sets it. Layers that set keys below `key` set `key`, too.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.iter().rev().find_map(|layer| key.split('.').try_fold(&layer.value, |value, part| value.get(part)))
    }

    /// Removes the section `name` from every layer. With `keep`, its keys become top-level keys, which take precedence over the other keys of
    /// the same layer.
    ///
    /// # Errors
    /// [`Error::Layer`] if the section is not a map.
    pub fn optional_section(self, name: &str, keep: bool) -> Result<Self> {
        let mut layers = Self::new();
        for mut layer in self.0 {
            let section = layer.value.as_object_mut().and_then(|map| map.remove(name));
            let origin = format!("{}: section `{name}`", layer.origin);
            layers.0.push(layer);
            if let Some(section) = section.filter(|section| !section.is_null()) {
                let with_section = layers.clone().value(&origin, section)?;
                layers = if keep { with_section } else { layers };
            }
        }
        Ok(layers)
    }

    /// Returns the top-level keys that the layers set, in any order. They distinguish kinds of configurations.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(|layer| layer.value.as_object()).flat_map(|map| map.keys().map(String::as_str))
    }

    /// Adds environment variables with the prefix [`ENV_PREFIX`]: `GRPO__LOSS__BETA=0.1` sets `loss.beta`.
    ///
    /// # Errors
    /// [`Error::Layer`] if a name or value is invalid.
    pub fn env(mut self, variables: impl Iterator<Item = (OsString, OsString)>) -> Result<Self> {
        let mut found: Vec<(String, OsString)> = variables
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
            .filter(|(name, _)| name.starts_with(ENV_PREFIX))
            .collect();
        // The environment has no defined order; sorting puts a section before its keys.
        found.sort();
        for (name, value) in found {
            let origin = format!("environment variable {name}");
            let key = name[ENV_PREFIX.len()..].to_lowercase().replace("__", ".");
            let value = value.into_string().map_err(|_| layer_error(&origin, "the value is not UTF-8".into()))?;
            self.0.push(assignment(origin, &key, &value)?);
        }
        Ok(self)
    }

    /// Adds assignments `a.b=value`.
    ///
    /// # Errors
    /// [`Error::Layer`] if an assignment is invalid.
    pub fn set(mut self, assignments: &[String]) -> Result<Self> {
        for text in assignments {
            let Some((key, value)) = text.split_once('=') else {
                let origin = set_origin(text.split([':', ' ']).next().unwrap_or_default(), None);
                return Err(layer_error(&origin, "expected KEY=VALUE, e.g. grpo.max_steps=100".into()));
            };
            self.0.push(assignment(set_origin(key, Some(value)), key.trim(), value)?);
        }
        Ok(self)
    }

    /// Returns the defaults of `T` with all layers applied. `T`'s own `validate` checks combinations of values.
    ///
    /// # Errors
    /// The errors of [`Layers::resolve_over`].
    pub fn resolve<T: Configuration>(self) -> Result<T> {
        self.resolve_over(T::default())
    }

    /// Returns `defaults` with all layers applied.
    ///
    /// # Errors
    /// [`Error::Layer`] with the layer, the dotted path and, for an unknown key, the most similar known one.
    pub fn resolve_over<T: Configuration>(self, defaults: T) -> Result<T> {
        let known = serde_json::to_value(&defaults).map_err(|e| layer_error("defaults", e.to_string()))?;
        let keys = T::keys();
        let tree = if keys.is_empty() { known.clone() } else { strict::tree(&keys) };
        let mut merged =
            Config::builder().add_source(Layer { origin: "defaults".into(), value: known.clone(), assigned: None });
        let (mut resolved, mut before) = (defaults, known.clone());
        for mut layer in self.0 {
            let origin = layer.origin.clone();
            let secrets = Secrets::of(&layer.value);
            let failed = |e: ConfigError| layer_error(&origin, secrets.hide(&e.to_string()));
            unknown_keys::<T>(&layer.value, &tree, &keys)
                .map_err(|error| Error::Layer { origin: origin.clone(), source: Box::new(error) })?;
            if let Some(key) = list_for_section(&layer.value, &tree, "") {
                return Err(layer_error(&origin, format!("key `{key}`: expected a map of keys, got a list")));
            }
            drop_empty_sections(&mut layer.value, &known);
            let given = layer.value.clone();
            merged = merged.add_source(layer);
            let value: Value = merged.build_cloned().and_then(Config::try_deserialize).map_err(failed)?;
            resolved = serde_path_to_error::deserialize(&value)
                .map_err(|e| layer_error(&origin, wrong_type::explain::<T>(&e, &before, &given, &value)))?;
            before = value;
        }
        Ok(resolved)
    }
}

/// Returns an error for keys that are not in `tree`. The error has the hint about the key, or suggests one of `keys` in other sections.
fn unknown_keys<T: Configuration>(given: &Value, tree: &Value, keys: &[&'static str]) -> Result<()> {
    let Err(error) = strict::reject_unknown_keys(given, tree, "") else { return Ok(()) };
    Err(match error {
        grpo_core::Error::UnknownKey { path, nearest, known } if !keys.is_empty() => {
            if let Some(hint) = T::hint(path.rsplit('.').next().unwrap_or(&path)) {
                return Err(Error::Text(format!("unknown key `{path}`: {hint}")));
            }
            let similar = || strict::elsewhere(&path, nearest.as_deref(), keys);
            let nearest = T::successor(&path).or_else(similar).map(str::to_owned).or(nearest);
            grpo_core::Error::UnknownKey { path, nearest, known }.into()
        }
        other => other.into(),
    })
}

/// Returns the key of a section that was given as a list, which serde would accept as the values of its keys in order.
fn list_for_section(given: &Value, known: &Value, path: &str) -> Option<String> {
    let known = known.as_object().filter(|known| !known.is_empty())?;
    match given {
        Value::Array(_) => Some(path.to_owned()),
        Value::Object(given) => given.iter().find_map(|(key, value)| {
            let here = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            list_for_section(value, known.get(key).or(known.get("*"))?, &here)
        }),
        _ => None,
    }
}

impl Source for Layer {
    fn clone_into_box(&self) -> Box<dyn Source + Send + Sync> {
        Box::new(self.clone())
    }

    fn collect(&self) -> Result<config::Map<String, config::Value>, ConfigError> {
        merged_value(&self.origin, self.value.clone()).into_table()
    }
}

/// Returns a configuration as YAML without its [secrets](crate::redact), for display, logs and publication. [`Layers::text`] reads it
/// back with the same values, apart from the secrets.
///
/// # Errors
/// The errors of [`to_yaml_with_secrets`].
pub fn to_yaml<T: Serialize + DeserializeOwned>(config: &T) -> Result<String> {
    let (shown, has_secrets) =
        redacted(config).map_err(|e| layer_error("the resolved configuration", e.to_string()))?;
    to_yaml_with_secrets(if has_secrets { &shown } else { config })
}

/// Returns a configuration as YAML that [`Layers::text`] reads back with the same values. Only for the config.yaml of a run.
///
/// # Errors
/// [`Error::Layer`] if `T` has a value that YAML cannot represent (a map whose keys are not strings).
pub fn to_yaml_with_secrets<T: Serialize>(config: &T) -> Result<String> {
    serde_saphyr::to_string(config).map_err(|e| layer_error("the resolved configuration", e.to_string()))
}

fn layer_error(origin: &str, message: String) -> Error {
    Error::Layer { origin: origin.to_owned(), source: Box::new(Error::Text(message)) }
}

fn parse(text: &str) -> Result<Value, String> {
    serde_saphyr::from_str(text).map_err(|error| {
        // The YAML reader adds a drawing of the position below the first line; errors here have one line.
        let text = error.to_string();
        let line = text.lines().next().unwrap_or_default();
        line.strip_prefix("error: ").unwrap_or(line).to_owned()
    })
}

/// Returns the name of an assignment for errors, without a value that is or may contain a secret.
fn set_origin(key: &str, value: Option<&str>) -> String {
    let Some(value) = value else { return format!("--set {key}") };
    let nested = assignment(String::new(), key.trim(), value).map(|layer| layer.value);
    let holds_secrets = match nested {
        Ok(nested) => {
            let mut shown = nested.clone();
            redact(&mut shown);
            shown != nested
        }
        // Text that cannot be parsed is shown, unless its key may hold a secret.
        Err(_) => {
            ["headers", "env", "command", "url", "://"].iter().any(|place| format!("{key}={value}").contains(place))
        }
    };
    if holds_secrets { format!("--set {key}={HIDDEN}") } else { format!("--set {key}={value}") }
}

fn assignment(origin: String, key: &str, value: &str) -> Result<Layer> {
    let legal = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if key.split('.').any(|part| part.is_empty() || !part.chars().all(legal)) {
        let message = format!("`{key}` is no dotted path of keys such as `grpo.max_steps`");
        return Err(layer_error(&origin, message));
    }
    let value = parse(value).map_err(|message| layer_error(&origin, message))?;
    let nested = key.rsplit('.').fold(value, |value, part| Value::Object(Map::from_iter([(part.to_owned(), value)])));
    Ok(Layer { origin, value: nested, assigned: Some(key.to_owned()) })
}

/// Converts a value to `config`'s type, because its own conversion rejects integers above `i64::MAX`.
fn merged_value(origin: &String, value: Value) -> config::Value {
    let kind = match value {
        Value::Null => ValueKind::Nil,
        Value::Bool(b) => b.into(),
        Value::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(i), _) => i.into(),
            (None, Some(u)) => u.into(),
            (None, None) => n.as_f64().into(),
        },
        Value::String(text) => text.into(),
        Value::Array(list) => list.into_iter().map(|v| merged_value(origin, v)).collect::<Vec<_>>().into(),
        Value::Object(map) => {
            map.into_iter().map(|(k, v)| (k, merged_value(origin, v))).collect::<config::Map<_, _>>().into()
        }
    };
    config::Value::new(Some(origin), kind)
}

/// Removes sections without keys (`grpo:` with all keys commented out), which would replace the section by null.
fn drop_empty_sections(given: &mut Value, known: &Value) {
    let (Value::Object(given), Value::Object(known)) = (given, known) else { return };
    given.retain(|key, value| !(value.is_null() && known.get(key).is_some_and(Value::is_object)));
    for (key, value) in given.iter_mut() {
        if let Some(known) = known.get(key) {
            drop_empty_sections(value, known);
        }
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "a map",
    }
}

#[cfg(test)]
mod tests;
