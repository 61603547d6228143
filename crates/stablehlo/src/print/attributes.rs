//! Prints attributes.

use super::List;
use crate::types::TensorType;
use std::fmt::Write;

pub(super) fn i64_array(values: &[usize]) -> String {
    if values.is_empty() { "array<i64>".into() } else { format!("array<i64: {}>", List(values)) }
}

pub(super) fn row_major(ty: &TensorType) -> String {
    let order: Vec<usize> = (0..ty.rank()).rev().collect();
    if order.is_empty() {
        "dense<> : tensor<0xindex>".into()
    } else {
        format!("dense<{order:?}> : tensor<{}xindex>", order.len())
    }
}

/// Quotes a string attribute and escapes special characters.
pub(super) fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for byte in text.bytes() {
        match byte {
            b'"' | b'\\' => {
                let _ = write!(out, "\\{byte:02X}");
            }
            0x20..=0x7E => out.push(byte.into()),
            _ => {
                let _ = write!(out, "\\{byte:02X}");
            }
        }
    }
    out.push('"');
    out
}
