//! The options of a run.

use crate::assertion::Assertion;
use std::ffi::OsString;
use std::path::PathBuf;

/// Options of a run.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The worker program with its arguments, which calls [`crate::worker::serve`].
    pub worker: Vec<OsString>,
    /// The PJRT plugin; default the one that [`grpo_backend_tpu::plugins::find`] finds.
    pub plugin: Option<PathBuf>,
    /// Variants and peers by name; empty means all.
    pub variants: Vec<String>,
    /// A virtual environment with the peers' packages; `None` means no peers.
    pub peers_venv: Option<PathBuf>,
    /// A virtual environment with vLLM, a peer of [`crate::model::run`] only.
    pub vllm_venv: Option<PathBuf>,
    /// Assertions about numbers of the report.
    pub assertions: Vec<Assertion>,
}
