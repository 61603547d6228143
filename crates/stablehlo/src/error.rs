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
    /// An operation whose meaning is not in the program: the target's own code, replicas that are not there, or a scatter of
    /// windows that are partly outside of the operand, on which the specification and compilers disagree.
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
    /// A mesh of devices that is none, or one in the place of another.
    #[error("mesh `{mesh}`: {reason}")]
    Mesh {
        /// The name of the mesh.
        mesh: String,
        /// What was expected, and what came.
        reason: String,
    },
    /// An axis that a mesh does not have, or that is used where it cannot be.
    #[error("axis `{axis}` of mesh `{mesh}`: {reason}")]
    Axis {
        /// The name of the mesh.
        mesh: String,
        /// The name of the axis.
        axis: String,
        /// What was expected, or why it cannot be used.
        reason: String,
    },
    /// A tensor that is not split evenly over devices.
    #[error("{ty} is not split by {sharding}: {reason}")]
    Split {
        /// The type of the tensor.
        ty: String,
        /// The sharding as programs write it.
        sharding: String,
        /// The dimension and the number of parts, or the ranks.
        reason: String,
    },
    /// Devices that have different numbers where the program says that they have the same.
    #[error("{operation}: {reason}")]
    Disagreement {
        /// The operation by its name.
        operation: &'static str,
        /// The result, the devices, and what they have.
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
