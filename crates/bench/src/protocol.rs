//! The protocol between a benchmark and its workers: one JSON value per line, over the worker's standard input and output.
//!
//! A worker waits for a [`Request`], fulfils it, answers with one [`Reply`], and ends when its input does. It answers
//! `{"failed": ...}` where it cannot, and goes on waiting. Between two requests it does nothing, so that others can be
//! measured. Anything that a worker wants to tell people goes to standard error.
//!
//! ```json
//! {"plan": {"name": "eager", "role": "loss", "config": {...}, "backend": "cpu", "threads": 2, "tensors": {...}, ...}}
//! {"planned": {"plan_seconds": 0.5, "bytes": {"inputs": 1000, "outputs": 2000, "workspace": null}}}
//! {"step": {"name": "eager", "check": true}}
//! {"stepped": {"seconds": 0.25, "loss": 0.1, "grad_norms": {"hidden": 1.0, "lm_head": 2.0}, "high_water": 300}}
//! ```
//!
//! Keys that a worker does not know are to be passed over; all keys of a reply but `seconds` may be left out. `peers/` has
//! workers in Python.

use super::inputs::Files;
use super::report::{CompiledBytes, DeviceBytes, DeviceReport};
use crate::config::BenchConfig;
use backend_cpu::peak::{Traffic, Unit};
use backend_tpu::program::Blocking;
use grpo_core::Dtype;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A request to a worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Get ready: read the inputs, whose files are gone afterwards, plan or compile. Answered by [`Reply::Planned`].
    Plan(Box<Job>),
    /// Log-probabilities of the inputs. Answered by [`Reply::Scored`].
    Score {
        /// The name of the job.
        name: String,
    },
    /// One step. Answered by [`Reply::Stepped`].
    Step {
        /// The name of the job.
        name: String,
        /// Whether to look at the results after the step, when the time has been taken.
        check: bool,
    },
}

/// A variant or a floor, with everything that a worker needs to know of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// The name of the job in reports.
    pub name: String,
    /// What the job measures.
    pub role: Role,
    /// One problem, with all of its variants.
    pub config: BenchConfig,
    /// The variant of the configuration that this is, or is the floor of. `None` for a peer.
    pub variant: Option<String>,
    /// The backend: `cpu`, `pjrt:cpu`, ...
    pub backend: String,
    /// The PJRT plugin, instead of the installed one.
    pub plugin: Option<PathBuf>,
    /// 0 is one per core.
    pub threads: usize,
    /// The instruction set to use on the CPU instead of the fastest.
    pub isa: Option<String>,
    /// What dL/dlogits is rounded to on this CPU; none: the dtype of the inputs.
    pub dlogits: Option<Dtype>,
    /// Whether to measure where the time of a step goes, on this CPU.
    #[serde(default)]
    pub profile: bool,
    /// The files of the inputs.
    pub tensors: Files,
}

/// What a job measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The loss, with gradients where the variant has them.
    Loss,
    /// The products of the loss and nothing else, on a PJRT device.
    BareProducts,
    /// Multiply-adds out of registers.
    Multiply(Unit),
    /// Bandwidth of memory.
    Stream {
        /// What is done with every word.
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
    /// The inputs have been scored.
    Scored {
        /// Log-probabilities `[N]` in nats.
        logp: Vec<f32>,
    },
    /// A step is done.
    Stepped(Box<Stepped>),
    /// The request could not be fulfilled.
    Failed {
        /// Why, on one line.
        error: String,
        /// Whether there is no such thing, rather than something having gone wrong.
        #[serde(default)]
        not_offered: bool,
    },
}

/// What is known before the first call.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Planned {
    /// Seconds that planning or compiling took.
    pub plan_seconds: f64,
    /// The blocking of the fused loops, where there are any.
    pub blocking: Option<Blocking>,
    /// Memory of a step by the plan.
    pub bytes: Bytes,
    /// Memory of a step by the compiler.
    pub compiled: Option<CompiledBytes>,
    /// The device that a PJRT job runs on.
    pub device: Option<DeviceReport>,
    /// The work of a floor: operations or bytes of a step.
    pub work: Option<f64>,
    /// Versions, or whatever else tells what was measured.
    pub version: Option<String>,
}

/// Memory of a step as it was planned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Bytes {
    /// Logits, or hidden states and head.
    pub inputs: Option<u64>,
    /// Gradients and results per token.
    pub outputs: Option<u64>,
    /// Everything else that a step takes.
    pub workspace: Option<u64>,
}

/// The measurements of a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stepped {
    /// Seconds from the call to the moment when all results are there.
    pub seconds: f64,
    /// Seconds that all threads together spent on each kind of work, where the job measures them: `products`, `packing`, `statistics`,
    /// `gradients`, and `waiting`, which is the rest.
    pub work: BTreeMap<String, f64>,
    /// The loss, where the job computes it.
    pub loss: Option<f64>,
    /// 2-norms of gradients, by the names of what they belong to; only of a step that was to be checked.
    pub grad_norms: BTreeMap<String, f64>,
    /// The most memory of the process during the step, beyond inputs and outputs.
    pub high_water: Option<u64>,
    /// What the process held with inputs and outputs before the first step.
    pub resident_before: Option<u64>,
    /// What the process holds after this step.
    pub resident_after: Option<u64>,
    /// Memory of the step by the device's allocator.
    pub device: Option<DeviceBytes>,
}
