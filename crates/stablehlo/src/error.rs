//! Errors of building, interpreting and differentiating programs.

use std::panic::Location;

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of building, interpreting or differentiating a program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Operands whose shapes, dtypes or attributes do not fit together.
    #[error("{operation}: {reason} (built at {at})")]
    Operation {
        /// The operation's name in StableHLO.
        operation: &'static str,
        /// The expected and the found shapes, dtypes or attributes.
        reason: String,
        /// The line of Rust that built the operation.
        at: &'static Location<'static>,
    },
    /// Elements that do not form a tensor of the requested type.
    #[error("{reason}")]
    Array {
        /// The expected and the found elements.
        reason: String,
    },
    /// An operation that the interpreter cannot evaluate: a custom call, or a scatter of windows that are partly outside of the operand, on which the specification and compilers disagree.
    #[error("{operation} cannot be interpreted: {reason}")]
    Uninterpreted {
        /// The operation's name in StableHLO.
        operation: &'static str,
        /// The reason, and the requirement if there is one.
        reason: String,
    },
    /// Properties of a program that a [`Builder`](crate::Builder) does not check: arguments that are not the function's,
    /// and dimension numbers of gathers and scatters.
    #[error("{operation}: {reason}")]
    Malformed {
        /// The operation's name in StableHLO.
        operation: &'static str,
        /// The expected and the found value.
        reason: String,
    },
    /// An invalid mesh, or a mesh that differs from the expected one.
    #[error("mesh `{mesh}`: {reason}")]
    Mesh {
        /// The name of the mesh.
        mesh: String,
        /// The expected and the found value.
        reason: String,
    },
    /// An axis that a mesh does not have, or that cannot be used here.
    #[error("axis `{axis}` of mesh `{mesh}`: {reason}")]
    Axis {
        /// The name of the mesh.
        mesh: String,
        /// The name of the axis.
        axis: String,
        /// The expected axis, or why the axis cannot be used.
        reason: String,
    },
    /// A tensor that cannot be sharded evenly over devices.
    #[error("{ty} is not split by {sharding}: {reason}")]
    Split {
        /// The type of the tensor.
        ty: String,
        /// The sharding in MLIR syntax.
        sharding: String,
        /// The dimension and the number of shards, or the ranks.
        reason: String,
    },
    /// Devices that hold different values where the program requires equal ones.
    #[error("{operation}: {reason}")]
    Disagreement {
        /// The operation's name.
        operation: &'static str,
        /// The result, the devices, and their values.
        reason: String,
    },
    /// A program that exceeds a limit of the [`Interpreter`](crate::Interpreter).
    #[error("{operation}: {reason}")]
    Limit {
        /// The StableHLO name of the operation that reached the limit.
        operation: &'static str,
        /// The limit, and the setting that raises it.
        reason: String,
    },
    /// An operation without a derivative on the path from a differentiated argument to a result.
    #[error("{operation} has no derivative: {reason} (built at {at})")]
    NoDerivative {
        /// The operation's name in StableHLO.
        operation: &'static str,
        /// The reason, and what to do instead.
        reason: String,
        /// The line of Rust that built the operation.
        at: &'static Location<'static>,
    },
}
