//! The errors of planning.

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A mesh, or another key, that does not fit the model or the devices.
    #[error(transparent)]
    Config(#[from] grpo_run_config::Error),
    /// LoRA targets that the model does not have.
    #[error(transparent)]
    Model(#[from] grpo_models::Error),
    /// The programs of the model cannot be built.
    #[error(transparent)]
    Policy(#[from] grpo_policy_pjrt::Error),
    /// Axes that form no mesh.
    #[error(transparent)]
    Mesh(#[from] grpo_stablehlo::Error),
}
