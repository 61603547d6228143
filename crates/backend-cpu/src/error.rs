//! Errors of this backend, under its name.

use grpo_core::error::Error;

/// The name by which users choose this backend, and which its errors carry.
pub(crate) const NAME: &str = "cpu";

/// An [`Error::Unsupported`] of this backend: `what` was asked for, and `instead` says what works.
pub(crate) fn unsupported(what: impl Into<String>, instead: impl Into<String>) -> Error {
    Error::Unsupported { backend: NAME.into(), what: what.into(), instead: instead.into() }
}
