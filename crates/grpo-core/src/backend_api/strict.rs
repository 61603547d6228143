//! Deserialisation that refuses unknown keys and suggests the nearest known key.
//!
//! serde's own `deny_unknown_fields` lists the fields but knows neither the path nor the nearest name. This module compares the
//! given value with the serialised default, which therefore must contain every key (no `skip_serializing`).

use crate::error::{Error, Result};
use serde::de::{DeserializeOwned, DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Deserialises `value` over the defaults of `T` and refuses keys that `T::default()` does not have.
///
/// # Errors
/// [`Error::UnknownKey`] with the nearest known key; [`Error::Config`] for a value of the wrong type.
pub fn from_value<T: DeserializeOwned + Serialize + Default>(value: Value) -> Result<T> {
    let known = serde_json::to_value(T::default()).map_err(|e| Error::Config(e.to_string()))?;
    reject_unknown_keys(&value, &known, "")?;
    serde_json::from_value(value).map_err(|e| Error::Config(e.to_string()))
}

/// Compares `given` with `known`. Keys under a known value that is not an object (an enum, a list, null) or that is an empty
/// map, whose keys are the user's names, are left to serde.
///
/// # Errors
/// [`Error::UnknownKey`] for the first key that `known` lacks.
pub fn reject_unknown_keys(given: &Value, known: &Value, path: &str) -> Result<()> {
    let (Value::Object(given), Value::Object(known)) = (given, known) else { return Ok(()) };
    if known.is_empty() {
        return Ok(());
    }
    for (key, value) in given {
        let here = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        // All values of a map with user-defined names have the same type.
        match known.get(key).or(known.get(ANY)) {
            Some(below) => reject_unknown_keys(value, below, &here)?,
            None => {
                // In some builds, JSON maps keep the order of the text.
                let mut names: Vec<&str> = known.keys().map(String::as_str).collect();
                names.sort_unstable();
                return Err(Error::UnknownKey {
                    nearest: nearest(key, names.iter().copied()).map(str::to_owned),
                    known: names.join(", "),
                    path: here,
                });
            }
        }
    }
    Ok(())
}

/// Matches any user-defined name.
const ANY: &str = "*";

/// Least similarity of a suggested key of another section, if no key of the same section is similar.
const SIMILAR_ELSEWHERE: f64 = 0.92;

/// Converts dotted paths to a tree of JSON objects. `*` matches any name.
pub fn tree(paths: &[&str]) -> Value {
    let mut root = Map::new();
    for path in paths {
        let mut here = &mut root;
        for part in path.split('.') {
            let below = here.entry(part).or_insert(Value::Null);
            if below.is_null() {
                *below = Value::Object(Map::new());
            }
            match below {
                Value::Object(map) => here = map,
                _ => break,
            }
        }
    }
    Value::Object(root)
}

/// Returns the path that was probably meant by `unknown`, a key in the wrong section: a path that ends in the same key, or in a key
/// more similar than `nearest`, the nearest key of its own section. Of several paths with the same key it returns the path that shares the
/// most leading sections, then the shortest, then the first.
pub fn elsewhere<'a>(unknown: &str, nearest: Option<&str>, paths: &[&'a str]) -> Option<&'a str> {
    let last = |path: &str| path.rsplit('.').next().unwrap_or_default().to_lowercase();
    let shared = |path: &str| unknown.split('.').zip(path.split('.')).take_while(|(a, b)| a == b).count();
    let key = last(unknown);
    let named = || paths.iter().filter(|path| !path.contains(ANY));
    let same = named().filter(|path| last(path) == key);
    let same = same.min_by_key(|path| (std::cmp::Reverse(shared(path)), path.split('.').count()));
    let similarity = |other: &str| crate::similarity::jaro_winkler(&key, other);
    let here = nearest.map_or(SIMILAR_ELSEWHERE, similarity);
    // Nearly the whole name of a key of the same section, as `max_completion_length` for `max_completion_len`: that section is the right one.
    let is_form = |nearest: &str| {
        let [short, long] = if nearest.len() < key.len() { [nearest, &key] } else { [&*key, nearest] };
        long.starts_with(short) && 5 * short.len() >= 4 * long.len()
    };
    if unknown.contains('.') && nearest.is_some_and(is_form) && here > SIMILAR_ELSEWHERE {
        return None;
    }
    let similar = named().map(|path| (similarity(&last(path)), path)).filter(|(found, _)| *found > here);
    same.or(similar.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, path)| path)).copied()
}

/// Returns the known name most similar to `name`, if it is similar enough for a misspelling.
pub fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    known
        .map(|k| (crate::similarity::jaro_winkler(&name.to_lowercase(), k), k))
        .filter(|(similarity, _)| *similarity > 0.75)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, k)| k)
}

/// A value whose maps contain no key twice. `serde_json::Value` alone silently keeps the last one.
#[derive(Clone, Debug)]
pub struct UniqueKeys(pub Value);

impl<'de> Deserialize<'de> for UniqueKeys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueKeysVisitor).map(Self)
    }
}

struct UniqueKeysVisitor;

impl<'de> DeserializeSeed<'de> for UniqueKeysVisitor {
    type Value = Value;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for UniqueKeysVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a value whose maps name every key once")
    }
    fn visit_unit<E>(self) -> std::result::Result<Value, E> {
        Ok(Value::Null)
    }
    fn visit_bool<E>(self, v: bool) -> std::result::Result<Value, E> {
        Ok(v.into())
    }
    fn visit_i64<E>(self, v: i64) -> std::result::Result<Value, E> {
        Ok(v.into())
    }
    fn visit_u64<E>(self, v: u64) -> std::result::Result<Value, E> {
        Ok(v.into())
    }
    fn visit_f64<E>(self, v: f64) -> std::result::Result<Value, E> {
        Ok(v.into())
    }
    fn visit_str<E>(self, v: &str) -> std::result::Result<Value, E> {
        Ok(v.into())
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = list.next_element_seed(Self)? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Value, A::Error> {
        let mut values = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            let value = map.next_value_seed(Self)?;
            if values.contains_key(&key) {
                return Err(A::Error::custom(format!("key `{key}` is there twice")));
            }
            values.insert(key, value);
        }
        Ok(Value::Object(values))
    }
}
