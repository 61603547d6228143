//! The results of a benchmark as one document.

use super::measure::{Rounds, Timing};
use super::protocol::Bytes;
use crate::assertion::Checked;
use crate::config::BenchConfig;
use grpo_backend_tpu::program::Blocking;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// All results of one run: of the loss, or with [`ModelCase`](crate::model::ModelCase) of a model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Document<C = Case> {
    /// The version of this program.
    pub version: String,
    /// Start of the run in UTC, as `2026-11-21T07:30:00Z`.
    pub date: String,
    /// The host of the benchmark.
    pub machine: Machine,
    /// Problems in order of measurement.
    pub cases: Vec<C>,
    /// Assertions in the given order.
    pub assertions: Vec<Claim>,
}

/// One problem with its results.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Case {
    /// The name, composed of the names of configuration, shape and dtype.
    pub name: String,
    /// The problem with all of its variants.
    pub config: BenchConfig,
    /// Numbers of warm-up and timed steps.
    pub rounds: Rounds,
    /// PJRT devices by the name of the backend.
    pub devices: BTreeMap<String, DeviceReport>,
    /// The floors that variants are compared with, by name.
    pub floors: BTreeMap<String, Outcome>,
    /// The variants and peers, by name.
    pub variants: BTreeMap<String, Outcome>,
}

/// An evaluated assertion.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Claim {
    /// The problem of the assertion; `None` for an assertion across problems.
    pub case: Option<String>,
    /// The numbers of the assertion, and whether it holds.
    #[serde(flatten)]
    pub checked: Checked,
}

impl Document {
    /// Returns `true` if any measurement failed.
    pub fn has_failures(&self) -> bool {
        let outcomes = self.cases.iter().flat_map(|case| case.floors.values().chain(case.variants.values()));
        outcomes.into_iter().any(Outcome::is_failure)
    }
}

impl<M> Outcome<M> {
    /// Returns `true` if the measurement failed.
    pub fn is_failure(&self) -> bool {
        matches!(self, Self::Failed { .. })
    }

    /// Returns `true` if the system does not offer the variant.
    pub fn is_not_offered(&self) -> bool {
        matches!(self, Self::NotOffered { .. })
    }
}

/// The host of a benchmark.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Model of the processor, if known.
    pub cpu: Option<String>,
    /// Threads available to this process.
    pub threads: usize,
    /// Operating system and architecture.
    pub system: String,
    /// The system's setting for huge pages, if known: `always`, `madvise`, `never`.
    pub huge_pages: Option<String>,
}

impl Machine {
    /// Describes this host.
    pub fn here() -> Self {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = info.lines().find_map(|line| line.strip_prefix("model name"));
        let huge = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok();
        Self {
            cpu: model.map(|model| model.trim_start_matches([' ', '\t', ':']).to_owned()),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            system: format!("{}-{}", std::env::consts::OS, std::env::consts::ARCH),
            huge_pages: huge.and_then(|text| Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())),
        }
    }
}

/// The devices of a benchmark.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceReport {
    /// The platform: `cpu`, `cuda` or `tpu`.
    pub platform: String,
    /// Versions of compiler and runtime, as the plugin reports them.
    pub platform_version: String,
    /// The model of the devices.
    pub kind: String,
    /// The number of used devices.
    pub used: usize,
    /// Memory limit of one device's allocator in bytes, if known.
    pub memory_bytes: Option<u64>,
    /// The file of the plugin.
    pub plugin: String,
    /// The plugin's version of the PJRT C API.
    pub api_version: String,
}

/// The result of a variant.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub enum Outcome<M = Measured> {
    /// The variant was measured.
    Measured(Box<M>),
    /// The variant failed although the backend offers it.
    Failed {
        /// The error.
        error: String,
    },
    /// The backend does not offer the variant.
    NotOffered {
        /// The reason, as the backend reports it.
        error: String,
    },
}

/// The measurements of a variant or a floor.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// The backend; `peer` for another system's program.
    pub backend: String,
    /// Threads on the CPU; 0 is one per core.
    pub threads: usize,
    /// Versions, if reported.
    pub version: Option<String>,
    /// The blocking of the loops, if reported.
    pub blocking: Option<Blocking>,
    /// The loss; equal for all variants that compute it, up to rounding.
    pub loss: Option<f64>,
    /// 2-norms of the first step's gradients, if checked.
    pub grad_norms: BTreeMap<String, f64>,
    /// `true` if loss and norms agree with the other variants' up to the rounding of the dtype; `None` if they cannot be compared.
    pub agrees: Option<bool>,
    /// Seconds of planning, or of building and compiling the program.
    pub plan_seconds: f64,
    /// Seconds of the first call, which is not among the timed steps.
    pub first_call_seconds: f64,
    /// Times of a step; `None` if none was timed.
    pub step_ms: Option<Timing>,
    /// Shares of the kinds of work in the time of all threads over the timed steps, for a variant with `profile`.
    pub work_shares: BTreeMap<String, f64>,
    /// Start of each timed step, in seconds since the first timed step of the problem; steps of variants alternate.
    pub began_s: Vec<f64>,
    /// Tokens per second at the median time.
    pub tokens_per_second: Option<f64>,
    /// Operations of the matrix products that the result needs; 0 for precomputed logits.
    pub useful_flops: f64,
    /// Useful operations per second at the median time.
    pub useful_flops_per_second: Option<f64>,
    /// Rate of one of this machine's floors at the median time: operations or bytes per second.
    pub rate_per_second: Option<f64>,
    /// Unit of `rate_per_second`: `FLOP` or `B`.
    pub rate_of: Option<&'static str>,
    /// Name of the floor that the variant is compared with.
    pub floor: Option<String>,
    /// Lower bound of the step time, in milliseconds.
    pub floor_ms: Option<f64>,
    /// The floor divided by the median time.
    pub share_of_floor: Option<f64>,
    /// The median time divided by the floor.
    pub times_floor: Option<f64>,
    /// Memory of a step.
    pub bytes: StepBytes,
    /// Memory that the compiler has allotted, per device.
    pub compiled_bytes: Option<CompiledBytes>,
    /// The device allocator's statistics of the first call.
    pub device_bytes: Option<DeviceBytes>,
    /// The same numbers under the names of MLLM-JAX's benchmark: `bench/step_s_p50`, `mem/workspace_bytes`, ...
    #[serde(flatten)]
    pub seed: Map<String, Value>,
}

/// Memory of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StepBytes {
    /// The memory according to the plan or the compiler.
    #[serde(flatten)]
    pub planned: Bytes,
    /// Measured peak memory of a step in addition to inputs and outputs: of the process or, on a separate device, of the device's
    /// allocator.
    pub high_water: Option<u64>,
}

/// Memory that a compiler has allotted to an executable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompiledBytes {
    /// Bytes of all arguments.
    pub arguments: u64,
    /// Bytes of all results, including results that alias an argument.
    pub outputs: u64,
    /// Bytes of results that alias an argument.
    pub aliased: u64,
    /// Bytes of all other allocations.
    pub temp: u64,
}

/// Statistics of a device's allocator around a variant's first call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceBytes {
    /// Bytes in use before the call: inputs and gradients, including other variants'.
    pub before: u64,
    /// Peak of bytes in use before the call.
    pub peak_before: u64,
    /// Peak of bytes in use up to the end of the call.
    pub peak_after: u64,
    /// Bytes in use after the call.
    pub after: u64,
    /// Peak of the step above the bytes in use before it; `None` if an earlier peak was higher.
    pub step: Option<u64>,
}

impl DeviceBytes {
    /// Computes the step's peak from the allocator's numbers before and after the call.
    pub fn new(before: u64, peak_before: u64, peak_after: u64, after: u64) -> Self {
        let step = (peak_after > peak_before).then(|| peak_after.saturating_sub(before));
        Self { before, peak_before, peak_after, after, step }
    }
}

/// Formats `time` in UTC to the second, e.g. `2026-11-21T07:30:00Z`.
pub fn utc(time: jiff::Timestamp) -> String {
    format!("{time:.0}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_in_utc_to_the_second() {
        let time: jiff::Timestamp = "2000-02-29T14:34:56.987654321+02:00".parse().expect("a time with an offset");
        assert_eq!(utc(time), "2000-02-29T12:34:56Z");
        assert_eq!(utc(jiff::Timestamp::UNIX_EPOCH), "1970-01-01T00:00:00Z");
    }

    #[test]
    fn a_high_water_mark_counts_only_if_it_rose() {
        assert_eq!(DeviceBytes::new(10, 12, 30, 10).step, Some(20));
        assert_eq!(DeviceBytes::new(10, 30, 30, 10).step, None);
    }
}
