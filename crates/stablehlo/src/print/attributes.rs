//! Attributes as text.

use super::List;
use crate::graph::Sharding;
use crate::types::TensorType;
use std::fmt::{self, Display, Formatter, Write};

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

pub(super) struct Groups<'a>(pub(super) &'a [Vec<usize>]);

impl Display for Groups<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "dense<{:?}> : tensor<{}x{}xi64>", self.0, self.0.len(), self.0[0].len())
    }
}

impl Display for Sharding {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replicated => f.write_str("{replicated}"),
            Self::Manual => f.write_str("{manual}"),
            Self::Tiled { tiles, devices } => {
                let parts: usize = tiles.iter().product();
                let plain = |list: &[usize]| list.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
                let (mut tiles, mut last) = (tiles.clone(), "");
                if devices.len() > parts {
                    tiles.push(devices.len() / parts);
                    last = " last_tile_dim_replicate";
                }
                write!(f, "{{devices=[{}]{}{last}}}", plain(&tiles), plain(devices))
            }
        }
    }
}

/// A string attribute, with special characters escaped.
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
