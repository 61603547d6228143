//! Named options and attributes.

use std::collections::BTreeMap;

use crate::ffi::RawNamedValue;

/// The value of an option or an attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum NamedValue {
    /// A value that is text.
    String(String),
    /// A value that is one integer.
    Int(i64),
    /// A list of integers.
    Ints(Vec<i64>),
    /// A value that is a floating-point number.
    Float(f32),
    /// A value that is true or false.
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

/// What a plugin, device or topology says of itself, by name.
pub type Attributes = BTreeMap<String, NamedValue>;

pub(crate) fn read(values: &[RawNamedValue<'_>]) -> Attributes {
    values.iter().filter_map(RawNamedValue::read).collect()
}

pub(crate) fn write<'a>(options: &'a [(&'a str, NamedValue)]) -> Vec<RawNamedValue<'a>> {
    options.iter().map(|(name, value)| RawNamedValue::new(name, value)).collect()
}
