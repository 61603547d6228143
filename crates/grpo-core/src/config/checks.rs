//! Checks of single numbers.

use crate::error::{Error, Result};

/// Checks that a number, if present, is finite.
///
/// # Errors
/// [`Error::Key`] with `key`.
pub(crate) fn finite(key: &str, value: impl Into<Option<f64>>) -> Result<()> {
    match value.into().filter(|value| !value.is_finite()) {
        Some(value) => Err(Error::of_key(key, format!("{key} must be a finite number, got {value}"))),
        None => Ok(()),
    }
}

/// Checks that a number, if present, is finite and above 0.
///
/// # Errors
/// [`Error::Key`] with `key`.
pub(crate) fn positive(key: &str, value: impl Into<Option<f64>>) -> Result<()> {
    match value.into().filter(|value| !(*value > 0.0 && value.is_finite())) {
        Some(value) => Err(Error::of_key(key, format!("{key} must be a finite number above 0, got {value}"))),
        None => Ok(()),
    }
}
