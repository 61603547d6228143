//! The error of an operation that cannot be built.

use std::panic::Location;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An operation that cannot be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Operands whose shapes, dtypes or attributes do not fit together.
    #[error("{operation}: {reason} (built at {at})")]
    Operation {
        /// The operation by its name in StableHLO.
        operation: &'static str,
        /// The shapes, dtypes or attributes that were expected, and those that came.
        reason: String,
        /// The line of Rust that built it.
        at: &'static Location<'static>,
    },
    /// An operation without a derivative between what is differentiated and what it is differentiated with respect to.
    #[error("{operation} has no derivative: {reason} (built at {at})")]
    NoDerivative {
        /// The operation by its name in StableHLO.
        operation: &'static str,
        /// What to do instead.
        reason: String,
        /// The line of Rust that built it.
        at: &'static Location<'static>,
    },
}
