//! Named options and attributes.

use std::collections::BTreeMap;

use crate::ffi::RawNamedValue;

/// The value of an option or an attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum NamedValue {
    /// A string.
    String(String),
    /// An integer.
    Int(i64),
    /// A list of integers.
    Ints(Vec<i64>),
    /// A floating-point number.
    Float(f32),
    /// A boolean.
    Bool(bool),
}

impl From<&str> for NamedValue {
    fn from(text: &str) -> Self {
        NamedValue::String(text.into())
    }
}

impl From<i64> for NamedValue {
    fn from(int: i64) -> Self {
        NamedValue::Int(int)
    }
}

impl From<bool> for NamedValue {
    fn from(bool: bool) -> Self {
        NamedValue::Bool(bool)
    }
}

/// The attributes of a plugin, device or topology, by name.
pub type Attributes = BTreeMap<String, NamedValue>;

pub(crate) fn read(values: &[RawNamedValue<'_>]) -> Attributes {
    values.iter().filter_map(RawNamedValue::read).collect()
}

pub(crate) fn write<'a>(options: &'a [(&'a str, NamedValue)]) -> Vec<RawNamedValue<'a>> {
    options.iter().map(|(name, value)| RawNamedValue::new(name, value)).collect()
}
