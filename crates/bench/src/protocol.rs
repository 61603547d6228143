//! What a benchmark and its workers say to each other: one JSON value per line, over the worker's standard input and output.
//!
//! A worker waits for a [`Request`], does it, answers with one [`Reply`], and ends when its input does. It answers
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

/// What a worker is asked.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Get ready: read the inputs, whose files are gone afterwards, plan or compile. Answered by [`Reply::Planned`].
    Plan(Box<Job>),
    /// Log-probabilities of the inputs. Answered by [`Reply::Scored`].
    Score {
        /// Of the job.
        name: String,
    },
    /// One step. Answered by [`Reply::Stepped`].
    Step {
        /// Of the job.
        name: String,
        /// Whether to look at the results after the step, when the time has been taken.
        check: bool,
    },
}

/// A variant or a floor, with everything that a worker needs to know of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// As reports name it.
    pub name: String,
    /// What is measured.
    pub role: Role,
    /// One problem, with all of its variants.
    pub config: BenchConfig,
    /// Of the configuration's variants, the one that this is, or is the floor of. `None` for a peer.
    pub variant: Option<String>,
    /// `cpu`, `pjrt:cpu`, ...
    pub backend: String,
    /// The PJRT plugin, instead of the installed one.
    pub plugin: Option<PathBuf>,
    /// 0 is one per core.
    pub threads: usize,
    /// On the CPU, the instruction set to use instead of the fastest.
    pub isa: Option<String>,
    /// What dL/dlogits is rounded to on this CPU; none: the dtype of the inputs.
    pub dlogits: Option<Dtype>,
    /// The inputs.
    pub tensors: Files,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The loss.
    Loss,
    /// The products of the loss and nothing else, on a PJRT device.
    BareProducts,
    /// Multiply-adds out of registers.
    Multiply(Unit),
    /// Memory.
    Stream {
        /// How it is walked.
        traffic: Traffic,
        /// How much of it.
        bytes: usize,
    },
}

/// What a worker answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// Ready.
    Planned(Box<Planned>),
    /// Log-probabilities `[N]`.
    Scored {
        /// In nats.
        logp: Vec<f32>,
    },
    /// A step is done.
    Stepped(Box<Stepped>),
    /// It could not be.
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
    /// Planning or compiling.
    pub plan_seconds: f64,
    /// How loops are cut.
    pub blocking: Option<Blocking>,
    /// By the plan.
    pub bytes: Bytes,
    /// By the compiler.
    pub compiled: Option<CompiledBytes>,
    /// What a PJRT job runs on.
    pub device: Option<DeviceReport>,
    /// Of a floor: operations or bytes of a step.
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
    /// Everything else.
    pub workspace: Option<u64>,
}

/// What a step has shown.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stepped {
    /// From the call to the moment when all results are there.
    pub seconds: f64,
    /// The loss.
    pub loss: Option<f64>,
    /// 2-norms of gradients, by the names of what they belong to; only of a step that was to be checked.
    pub grad_norms: BTreeMap<String, f64>,
    /// The most memory of the process during the step, beyond inputs and outputs.
    pub high_water: Option<u64>,
    /// What the process held with inputs and outputs before the first step.
    pub resident_before: Option<u64>,
    /// What it holds after this one.
    pub resident_after: Option<u64>,
    /// What the device's allocator saw.
    pub device: Option<DeviceBytes>,
}
