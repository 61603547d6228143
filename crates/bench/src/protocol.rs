//! The protocol between a benchmark and its workers: one JSON value per line, over the worker's standard input and output.
//!
//! A worker waits for a [`Request`], fulfils it, answers with one [`Reply`], and exits at the end of its input. If it cannot fulfil a
//! request, it answers `{"failed": ...}` and waits for the next one. Between requests it is idle, so that other workers can be
//! measured. Messages for users go to standard error.
//!
//! ```json
//! {"plan": {"name": "eager", "role": "loss", "config": {...}, "backend": "cpu", "threads": 2, "tensors": {...}, ...}}
//! {"planned": {"plan_seconds": 0.5, "bytes": {"inputs": 1000, "outputs": 2000, "workspace": null}}}
//! {"step": {"name": "eager", "check": true}}
//! {"stepped": {"seconds": 0.25, "loss": 0.1, "grad_norms": {"hidden": 1.0, "lm_head": 2.0}, "high_water": 300}}
//! ```
//!
//! A worker ignores unknown keys; all keys of a reply except `seconds` are optional. `peers/` has
//! workers in Python.

use super::inputs::Files;
use super::report::{CompiledBytes, DeviceBytes, DeviceReport};
use crate::config::{BenchConfig, VariantConfig};
use crate::model::{ModelJob, ModelTimes};
use grpo_backend_cpu::peak::{Traffic, Unit};
use grpo_backend_tpu::program::Blocking;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A request to a worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Read the inputs, whose files are deleted afterwards, and plan or compile. Answered by [`Reply::Planned`].
    Plan(Box<Job>),
    /// Compute log-probabilities of the inputs. Answered by [`Reply::Scored`].
    Score {
        /// The name of the job.
        name: String,
    },
    /// Run one step. Answered by [`Reply::Stepped`].
    Step {
        /// The name of the job.
        name: String,
        /// `true` to report loss and gradient norms after the timed part.
        check: bool,
    },
    /// Measure work on a model. Answered by [`Reply::Model`].
    Model(Box<ModelJob>),
}

/// A variant or a floor, with everything that a worker needs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// Name of the job in reports.
    pub name: String,
    /// The measured quantity.
    pub role: Role,
    /// One problem with all of its variants.
    pub config: BenchConfig,
    /// The variant of the configuration, or the variant that the floor belongs to. `None` for a peer.
    pub variant: Option<String>,
    /// The backend: `cpu`, `pjrt:cpu`, ...
    pub backend: String,
    /// The PJRT plugin; default the installed one.
    pub plugin: Option<PathBuf>,
    /// Threads; 0 is one per core.
    pub threads: usize,
    /// The files of the inputs.
    pub tensors: Files,
}

impl Job {
    /// Returns the settings of the variant; the default ones for a peer.
    pub(crate) fn settings(&self) -> VariantConfig {
        let settings = self.variant.as_ref().and_then(|name| self.config.variants.as_ref()?.get(name));
        settings.cloned().unwrap_or_default()
    }
}

/// The quantity that a job measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The loss, with the variant's gradients.
    Loss,
    /// Only the matrix products of the loss, on a PJRT device.
    BareProducts,
    /// Multiply-adds on registers.
    Multiply(Unit),
    /// Bandwidth of memory.
    Stream {
        /// The operation on every word.
        traffic: Traffic,
        /// The size of the buffer in bytes.
        bytes: usize,
    },
}

/// An answer of a worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// The job is planned and ready to run.
    Planned(Box<Planned>),
    /// The log-probabilities of the inputs.
    Scored {
        /// Log-probabilities `[N]` in nats.
        logp: Vec<f32>,
    },
    /// The result of a step.
    Stepped(Box<Stepped>),
    /// The measurement of work on a model.
    Model(Box<ModelTimes>),
    /// The error of a request.
    Failed {
        /// The reason, on one line.
        error: String,
        /// `true` if the backend does not offer this, `false` for a failure.
        #[serde(default)]
        not_offered: bool,
    },
}

/// The result of planning, before the first call.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Planned {
    /// Seconds that planning or compiling took.
    pub plan_seconds: f64,
    /// The blocking of the fused loops, if any.
    pub blocking: Option<Blocking>,
    /// Planned memory of a step.
    pub bytes: Bytes,
    /// Compiled memory of a step.
    pub compiled: Option<CompiledBytes>,
    /// The device of a PJRT job.
    pub device: Option<DeviceReport>,
    /// Work of a floor's step: operations or bytes.
    pub work: Option<f64>,
    /// Versions of the measured software.
    pub version: Option<String>,
}

/// Planned memory of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Bytes {
    /// Bytes of logits, or of hidden states and head.
    pub inputs: Option<u64>,
    /// Bytes of gradients and results per token.
    pub outputs: Option<u64>,
    /// Bytes of all other memory of a step.
    pub workspace: Option<u64>,
}

/// The measurements of a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stepped {
    /// Seconds from the call until all results are available.
    pub seconds: f64,
    /// Seconds that all threads together spent on each kind of work, if measured: `products`, `packing`, `statistics`,
    /// `gradients`, and `waiting`, which is the rest.
    pub work: BTreeMap<String, f64>,
    /// The loss, if the job computes it.
    pub loss: Option<f64>,
    /// 2-norms of gradients by the names of their tensors; only for a checked step.
    pub grad_norms: BTreeMap<String, f64>,
    /// Peak memory of the process during the step, in addition to inputs and outputs.
    pub high_water: Option<u64>,
    /// Memory of the process with inputs and outputs before the first step.
    pub resident_before: Option<u64>,
    /// Memory of the process after this step.
    pub resident_after: Option<u64>,
    /// Memory of the step according to the device's allocator.
    pub device: Option<DeviceBytes>,
}
