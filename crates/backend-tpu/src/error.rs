//! Errors of this backend.

use grpo_core::Error;

/// The name of this backend in errors that concern every kind of device.
pub(crate) const NAME: &str = "pjrt";

/// Makes an [`Error::Unsupported`] of this backend: `what` is not supported, `instead` is the alternative.
pub(crate) fn unsupported(what: &str, instead: &str) -> Error {
    Error::Unsupported { backend: NAME.into(), what: what.into(), instead: instead.into() }
}

/// Converts an error of a plugin.
pub(crate) fn failed(error: impl ToString) -> Error {
    Error::Backend { backend: NAME.into(), message: error.to_string() }
}
