//! The errors of this crate.

use grpo_core::readable_bytes;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A program of a run exceeds the memory of the device.
    #[error(
        "the program `{program}` with what is beside it needs {}, and the device has {}: {}",
        readable_bytes(*needed), readable_bytes(*there), grpo_run_config::advice::DEVICE_MEMORY
    )]
    DoesNotFit {
        /// The program with the largest memory use.
        program: String,
        /// The memory that it needs with everything else on the device, in bytes.
        needed: u64,
        /// The memory of the device in bytes.
        there: u64,
    },
    /// The run has no decode program for this number of columns of the cache.
    #[error("decode: expected a number of columns that a program of the run reads, got {0}")]
    Columns(usize),
    /// A mesh without some of the devices of several processes, all of which would run every program.
    #[error(
        "policy.mesh: expected a mesh of all {devices} devices, which belong to {processes} processes, found {mesh}: choose a target with as \
         many devices as the mesh, or a larger mesh"
    )]
    PartialMesh {
        /// The mesh.
        mesh: String,
        /// The number of devices of the target.
        devices: usize,
        /// The number of processes that have them.
        processes: usize,
    },
    /// An invalid configuration.
    #[error(transparent)]
    Config(#[from] grpo_run_config::Error),
    /// Options that do not match the model.
    #[error(transparent)]
    Plan(#[from] grpo_planner::Error),
    /// A model that is missing or not supported.
    #[error(transparent)]
    Model(#[from] grpo_models::Error),
    /// A program that cannot be built.
    #[error(transparent)]
    Policy(#[from] grpo_policy::Error),
}
