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

/// Implements conversions into variants of an enum.
macro_rules! conversions {
    ($enum:ident: $($type:ty => $variant:ident),*) => {$(
        impl From<$type> for $enum {
            fn from(value: $type) -> Self {
                $enum::$variant(value.into())
            }
        }
    )*};
}

pub(crate) use conversions;

conversions! { NamedValue: &str => String, i64 => Int, bool => Bool }

/// The attributes of a plugin, device or topology, by name.
pub type Attributes = BTreeMap<String, NamedValue>;

pub(crate) fn read(values: &[RawNamedValue<'_>]) -> Attributes {
    values.iter().filter_map(RawNamedValue::read).collect()
}

pub(crate) fn write<'a>(options: &'a [(&'a str, NamedValue)]) -> Vec<RawNamedValue<'a>> {
    options.iter().map(|(name, value)| RawNamedValue::new(name, value)).collect()
}
