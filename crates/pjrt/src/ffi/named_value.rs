//! `PJRT_NamedValue`, the only struct with a union.

use std::ffi::c_void;
use std::marker::PhantomData;

use super::{Header, Slice, pointer::OutSlice};
use crate::value::NamedValue;

/// A name and a value: an option for the plugin, or an attribute from it.
#[repr(C)]
pub(crate) struct RawNamedValue<'a> {
    header: Header,
    name: Slice<'a, u8>,
    kind: i32,
    value: RawValue,
    /// The elements of a list or string; 1 for a scalar.
    len: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
union RawValue {
    pointer: *const c_void,
    int: i64,
    float: f32,
    bool: bool,
}

impl<'a> RawNamedValue<'a> {
    pub(crate) fn new(name: &'a str, value: &'a NamedValue) -> Self {
        let (kind, value, len) = match value {
            NamedValue::String(text) => (0, RawValue { pointer: text.as_ptr().cast() }, text.len()),
            NamedValue::Int(int) => (1, RawValue { int: *int }, 1),
            NamedValue::Ints(list) => (2, RawValue { pointer: list.as_ptr().cast() }, list.len()),
            NamedValue::Float(float) => (3, RawValue { float: *float }, 1),
            NamedValue::Bool(bool) => (4, RawValue { bool: *bool }, 1),
        };
        RawNamedValue { header: Header::new(size_of::<Self>()), name: name.into(), kind, value, len }
    }

    /// Copies a value that the plugin wrote; `None` for a kind that this crate does not support.
    pub(crate) fn read(&self) -> Option<(String, NamedValue)> {
        // SAFETY: `kind` tells the active member of the union; pointers are valid for `len` elements while `self` is.
        let value = unsafe {
            match self.kind {
                0 => NamedValue::String(String::from_utf8_lossy(self.list(self.value.pointer.cast())).into_owned()),
                1 => NamedValue::Int(self.value.int),
                2 => NamedValue::Ints(self.list(self.value.pointer.cast()).to_vec()),
                3 => NamedValue::Float(self.value.float),
                4 => NamedValue::Bool(self.value.bool),
                _ => return None,
            }
        };
        Some((String::from_utf8_lossy(self.name.get()).into_owned(), value))
    }

    fn list<T>(&self, pointer: *const T) -> &[T] {
        OutSlice { pointer, len: self.len, borrow: PhantomData }.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_values_of_every_kind_are_read_as_written() {
        let values = [
            NamedValue::String("text".into()),
            NamedValue::String(String::new()),
            NamedValue::Int(-7),
            NamedValue::Ints(vec![1, -2]),
            NamedValue::Float(0.5),
            NamedValue::Bool(true),
        ];
        for value in values {
            assert_eq!(RawNamedValue::new("name", &value).read(), Some(("name".to_owned(), value)));
        }
        let unknown = RawNamedValue { kind: 5, ..RawNamedValue::new("name", &NamedValue::Bool(true)) };
        assert_eq!(unknown.read(), None);
    }
}
