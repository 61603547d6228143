//! Detection of duplicate keys in JSON objects. Most readers silently take the last value.

use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use std::collections::HashSet;
use std::fmt;

/// JSON without duplicate keys at any depth. Deserialising it checks the keys and discards the values.
pub struct UniqueKeys;

impl<'de> serde::Deserialize<'de> for UniqueKeys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self)
    }
}

/// Implements the methods for values without keys.
macro_rules! accept {
    ($($method:ident: $value:ty),*) => {$(
        fn $method<E>(self, _: $value) -> Result<Self, E> {
            Ok(Self)
        }
    )*};
}

impl<'de> Visitor<'de> for UniqueKeys {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self, A::Error> {
        let mut keys = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            map.next_value::<Self>()?;
            if let Some(key) = keys.replace(key) {
                return Err(A::Error::custom(format!("the key {key:?} is there twice; remove one of them")));
            }
        }
        Ok(Self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self, A::Error> {
        while list.next_element::<Self>()?.is_some() {}
        Ok(Self)
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(Self)
    }

    accept!(visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_f64: f64, visit_str: &str);
}
