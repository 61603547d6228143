//! Errors of this backend, with its name.

use grpo_core::error::Error;

/// The name of this backend in configurations and errors.
pub(crate) const NAME: &str = "cpu";

/// Makes an [`Error::Unsupported`] of this backend: `what` is not supported, `instead` is the alternative.
pub(crate) fn unsupported(what: impl Into<String>, instead: impl Into<String>) -> Error {
    Error::Unsupported { backend: NAME.into(), what: what.into(), instead: instead.into() }
}
