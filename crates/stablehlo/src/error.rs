//! The errors of operations that cannot be built, or not be interpreted.

use std::panic::Location;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An operation that cannot be built, or not be interpreted.
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
    /// Elements that are no tensor of a type.
    #[error("{reason}")]
    Array {
        /// The elements that were expected, and those that came.
        reason: String,
    },
    /// An operation whose meaning is not in the program: the target's own code, replicas that meet, or a scatter of windows
    /// that are partly outside of the operand, on which the specification and compilers disagree.
    #[error("{operation} cannot be interpreted: {reason}")]
    Uninterpreted {
        /// The operation by its name in StableHLO.
        operation: &'static str,
        /// What it would take.
        reason: String,
    },
    /// A program that is none: operands, types and attributes that do not fit together, or arguments that are not the
    /// function's. What a [`Builder`](crate::Builder) made is checked already, but for the dimension numbers of gathers
    /// and scatters.
    #[error("{operation}: {reason}")]
    Malformed {
        /// The operation by its name in StableHLO.
        operation: &'static str,
        /// What was expected, and what came.
        reason: String,
    },
    /// A program that needs more than the [`Interpreter`](crate::Interpreter) may spend.
    #[error("{operation}: {reason}")]
    Limit {
        /// The operation by its name in StableHLO, at which the limit was reached.
        operation: &'static str,
        /// The limit, and what to raise.
        reason: String,
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
