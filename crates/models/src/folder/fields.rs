//! Typed access to fields of a JSON object; errors name the file and the field.

use crate::error::{Error, Result, shortened};
use grpo_files::UniqueKeys;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// The size limit of JSON files of a model folder in bytes. Configurations have a few thousand.
const LIMIT: u64 = 64 << 20;

/// A JSON object of a file, or an object nested in it.
pub(crate) struct Fields {
    path: PathBuf,
    /// The path of the object in the file, ending in a dot; empty for the outermost object.
    prefix: String,
    map: Map<String, Value>,
}

impl Fields {
    /// Reads the object in the file `path`.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        Ok(Self::read_with_text(path)?.1)
    }

    /// As [`Fields::read`], with the text of the file.
    pub(crate) fn read_with_text(path: &Path) -> Result<(String, Self)> {
        let bytes = grpo_files::read_regular(path, LIMIT).map_err(|e| Error::io("read", path, e))?;
        let fields = Self::parse(path, &bytes)?;
        // JSON is UTF-8.
        Ok((String::from_utf8_lossy(&bytes).into_owned(), fields))
    }

    /// Parses the object in `bytes`, the contents of `path`.
    pub(crate) fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let error = |e: serde_json::Error| Error::Json {
            path: path.to_owned(),
            line: e.line(),
            column: e.column(),
            reason: format!("expected a JSON object: {e}"),
        };
        let bytes = &*super::python_json::as_json(bytes);
        let map = serde_json::from_slice(bytes).map_err(error)?;
        let UniqueKeys = serde_json::from_slice(bytes).map_err(error)?;
        Ok(Self { path: path.to_owned(), prefix: String::new(), map })
    }

    /// Wraps an object that is to be written as `config.json`.
    pub(crate) fn of(map: Map<String, Value>) -> Self {
        Self { path: "config.json".into(), prefix: String::new(), map }
    }

    /// Returns the value of `key`; `None` if it is missing or null, which `transformers` treats alike.
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Returns the object in `key`.
    pub(crate) fn object(&self, key: &str) -> Result<Option<Self>> {
        self.typed(key, "an object", |value| {
            let map = value.as_object()?.clone();
            Some(Self { path: self.path.clone(), prefix: format!("{}{key}.", self.prefix), map })
        })
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "a text", Value::as_str)
    }

    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    /// Returns a non-negative integer. Python may write it as `8192.0`.
    pub(crate) fn count(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "a whole number that is not negative", |value| {
            let whole = value.as_f64().filter(|n| n.fract() == 0.0 && (0.0..9e15).contains(n))?;
            Some(value.as_u64().map_or(whole as usize, |n| n as usize))
        })
    }

    /// Returns the result of `read` for the value of `key`, if the key is present.
    pub(crate) fn typed<'a, T>(
        &'a self,
        key: &str,
        supported: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.unsupported(key, supported))
    }

    /// Returns the value of a required key.
    pub(crate) fn required<T>(&self, key: &str, value: Option<T>, supported: &str) -> Result<T> {
        value.ok_or_else(|| self.unsupported(key, supported))
    }

    /// Returns an [`Error::Field`] about the value of `key`.
    pub(crate) fn unsupported(&self, key: &str, supported: impl Into<String>) -> Error {
        let found = self.map.get(key).map_or_else(|| "missing".to_owned(), |value| shortened(&value.to_string(), 200));
        Error::Field {
            path: self.path.clone(),
            field: format!("{}{key}", self.prefix),
            found,
            supported: supported.into(),
        }
    }

    /// Checks that unsupported features are off. A row has the key, the allowed values, and the supported computation in words.
    pub(crate) fn refuse<'a>(&self, table: impl IntoIterator<Item = &'a (&'a str, Neutral, &'a str)>) -> Result<()> {
        let asks =
            |(key, neutral, _): &&(&str, Neutral, &str)| self.get(key).is_some_and(|value| !neutral.holds(value));
        match table.into_iter().find(asks) {
            Some((key, _, supported)) => Err(self.unsupported(key, *supported)),
            None => Ok(()),
        }
    }

    /// Returns the keys of the object.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &str> {
        self.map.keys().map(String::as_str)
    }
}

/// Values of a field that do not change the computation.
pub(crate) enum Neutral {
    /// Null, false, zero, empty.
    Off,
    /// Null or 1.
    One,
    /// Null or true.
    On,
}

impl Neutral {
    fn holds(&self, value: &Value) -> bool {
        match self {
            Self::Off => match value {
                Value::Null => true,
                Value::Bool(flag) => !flag,
                Value::Number(number) => number.as_f64() == Some(0.0),
                Value::String(text) => text.is_empty(),
                Value::Array(list) => list.is_empty(),
                Value::Object(map) => map.is_empty(),
            },
            Self::One => value.as_f64() == Some(1.0),
            Self::On => *value == Value::Bool(true),
        }
    }
}

/// Returns `true` if the list of classes has this name.
pub(super) fn has_name(architectures: Option<&Vec<Value>>, name: &str) -> bool {
    architectures.is_some_and(|list| list.iter().any(|class| class == name))
}
