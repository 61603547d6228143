//! Configuration that refuses unknown keys and says which known key was probably meant.
//!
//! serde's own `deny_unknown_fields` lists the fields but does not know the path or the nearest name; this walks the
//! given value beside the serialised default, which therefore has to spell out every key (no `skip_serializing`).

use crate::error::{Error, Result};
use serde::de::{DeserializeOwned, DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Deserialises `value` over the defaults of `T`, refusing keys that `T::default()` does not have.
///
/// # Errors
/// [`Error::UnknownKey`] with the nearest known key; [`Error::Config`] when a value has the wrong type.
pub fn from_value<T: DeserializeOwned + Serialize + Default>(value: Value) -> Result<T> {
    let known = serde_json::to_value(T::default()).map_err(|e| Error::Config(e.to_string()))?;
    reject_unknown_keys(&value, &known, "")?;
    serde_json::from_value(value).map_err(|e| Error::Config(e.to_string()))
}

/// Walks `given` beside `known`; keys under a known value that is not an object (an enum, a list, null), or is a map without an
/// entry, whose keys are names of the user's, are left to serde.
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
        // A map of names of the user's has one kind of value.
        match known.get(key).or(known.get(ANY)) {
            Some(below) => reject_unknown_keys(value, below, &here)?,
            None => {
                // Maps of JSON have their keys in the order of the text in some builds.
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

/// Stands for a name that the user chose.
const ANY: &str = "*";

/// How similar a key of another section has to be where its own section has none that is similar.
const SIMILAR_ELSEWHERE: f64 = 0.92;

/// Returns dotted paths as a tree of JSON objects. `*` matches any name.
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

/// The path among `paths` that an unknown one means where it is in the wrong section: one that ends in the same key, or in one that is more
/// similar than `nearest`, the nearest key of its section. Of several with the same key it is the one with most sections in common, the
/// shortest of these, and the first.
pub fn elsewhere<'a>(unknown: &str, nearest: Option<&str>, paths: &[&'a str]) -> Option<&'a str> {
    let last = |path: &str| path.rsplit('.').next().unwrap_or_default().to_lowercase();
    let shared = |path: &str| unknown.split('.').zip(path.split('.')).take_while(|(a, b)| a == b).count();
    let key = last(unknown);
    let named = || paths.iter().filter(|path| !path.contains(ANY));
    let same = named().filter(|path| last(path) == key);
    let same = same.min_by_key(|path| (std::cmp::Reverse(shared(path)), path.split('.').count()));
    let similarity = |other: &str| strsim::jaro_winkler(&key, other);
    let here = nearest.map_or(SIMILAR_ELSEWHERE, similarity);
    let similar = named().map(|path| (similarity(&last(path)), path)).filter(|(found, _)| *found > here);
    same.or(similar.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, path)| path)).copied()
}

/// The known name most similar to `name`, if any is similar enough to be a likely slip.
pub fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    known
        .map(|k| (strsim::jaro_winkler(&name.to_lowercase(), k), k))
        .filter(|(similarity, _)| *similarity > 0.75)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, k)| k)
}

/// A value none of whose maps names a key twice. `serde_json::Value` alone keeps the last one in silence.
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
