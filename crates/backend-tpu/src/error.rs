//! Errors of this backend.

use grpo_core::Error;

/// The name of this backend in errors that concern every kind of device.
pub(crate) const NAME: &str = "pjrt";

/// An [`Error::Unsupported`] of this backend: `what` was asked for, and `instead` says what works.
pub(crate) fn unsupported(what: &str, instead: &str) -> Error {
    Error::Unsupported { backend: NAME.into(), what: what.into(), instead: instead.into() }
}

/// An error that a plugin reported.
pub(crate) fn failed(error: pjrt::Error) -> Error {
    Error::Backend { backend: NAME.into(), message: error.to_string() }
}
