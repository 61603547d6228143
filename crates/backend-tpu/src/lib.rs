//! The GRPO loss on any PJRT device.
#![forbid(unsafe_code)]

pub mod mosaic;
pub mod plugins;
pub mod program;

use grpo_core::Error;

pub(crate) const NAME: &str = "pjrt";

pub(crate) fn unsupported(what: &str, instead: &str) -> Error {
    Error::Unsupported { backend: NAME.into(), what: what.into(), instead: instead.into() }
}
