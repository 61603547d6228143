//! The results of a benchmark, as one document.

use super::measure::{Rounds, Timing};
use crate::assertion::Checked;
use crate::config::BenchConfig;
use backend_tpu::program::Blocking;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Everything that was measured in one run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Document {
    /// The version of this program.
    pub version: String,
    /// When it began, UTC, as `2026-11-21T07:30:00Z`.
    pub date: String,
    /// The host that the benchmark ran on.
    pub machine: Machine,
    /// Problems, in the order in which they were measured.
    pub cases: Vec<Case>,
    /// Claims, in the order given.
    pub assertions: Vec<Claim>,
}

/// One problem with everything that was measured of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Case {
    /// The name, made of those of the configuration, the shape and the dtype.
    pub name: String,
    /// The problem, with all of its variants.
    pub config: BenchConfig,
    /// How many steps were run and timed.
    pub rounds: Rounds,
    /// PJRT devices that were measured on, by the backend's name.
    pub devices: BTreeMap<String, DeviceReport>,
    /// The floors that variants are compared with, by name.
    pub floors: BTreeMap<String, Outcome>,
    /// The variants and peers, by name.
    pub variants: BTreeMap<String, Outcome>,
}

/// A claim that was looked at.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Claim {
    /// The problem that the claim was looked at in; `None` for a claim across problems.
    pub case: Option<String>,
    /// The numbers of the claim, and whether it holds.
    #[serde(flatten)]
    pub checked: Checked,
}

impl Document {
    /// Whether something that was to be measured could not be.
    pub fn has_failures(&self) -> bool {
        let outcomes = self.cases.iter().flat_map(|case| case.floors.values().chain(case.variants.values()));
        outcomes.into_iter().any(|outcome| matches!(outcome, Outcome::Failed { .. }))
    }
}

/// The host that a benchmark ran on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Model of the processor, where the system says.
    pub cpu: Option<String>,
    /// Threads that this process may use.
    pub threads: usize,
    /// Operating system and architecture.
    pub system: String,
    /// When allocations get huge pages, where the system says: `always`, `madvise`, `never`.
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

/// The devices that a benchmark ran on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceReport {
    /// The platform: `cpu`, `cuda` or `tpu`.
    pub platform: String,
    /// Versions of the compiler and runtime, in their own words.
    pub platform_version: String,
    /// The model of the devices.
    pub kind: String,
    /// The number of devices that are used.
    pub used: usize,
    /// Bytes that the allocator of one device may use, where it says.
    pub memory_bytes: Option<u64>,
    /// The file of the plugin.
    pub plugin: String,
    /// The version of the PJRT C API that the plugin speaks.
    pub api_version: String,
}

/// The result of a variant.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub enum Outcome {
    /// The variant ran and was measured.
    Measured(Box<Measured>),
    /// The variant failed, although the backend offers it.
    Failed {
        /// Why it did not, or no longer did.
        error: String,
    },
    /// This backend has no such thing.
    NotOffered {
        /// The reason, in the backend's words.
        error: String,
    },
}

/// What was measured of a variant or a floor.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// The backend that it ran on; `peer` for another system's program.
    pub backend: String,
    /// Threads on the CPU; 0 is one per core.
    pub threads: usize,
    /// Versions, where it says.
    pub version: Option<String>,
    /// How the loops are cut, where it says.
    pub blocking: Option<Blocking>,
    /// The loss; the same for all that compute it, but for rounding.
    pub loss: Option<f64>,
    /// 2-norms of the first step's gradients, where they were looked at.
    pub grad_norms: BTreeMap<String, f64>,
    /// Whether loss and norms are those of the others, within the rounding of the dtype; `None` where nothing can be compared.
    pub agrees: Option<bool>,
    /// Planning, or building and compiling the program.
    pub plan_seconds: f64,
    /// The first call, which is not among the timed.
    pub first_call_seconds: f64,
    /// A step; `None` when none was timed.
    pub step_ms: Option<Timing>,
    /// The shares of all threads' time in the timed steps by kind of work, of a variant with `profile`.
    pub work_shares: BTreeMap<String, f64>,
    /// When each timed step began, in seconds after the first of the problem: variants run in alternation.
    pub began_s: Vec<f64>,
    /// Tokens in a second by the median of the times.
    pub tokens_per_second: Option<f64>,
    /// Operations of the products that the result needs; 0 of given logits.
    pub useful_flops: f64,
    /// Useful operations in a second by the median of the times.
    pub useful_flops_per_second: Option<f64>,
    /// The rate of a floor of this machine: operations or bytes in a second, by its median.
    pub rate_per_second: Option<f64>,
    /// The unit of that rate: `FLOP` or `B`.
    pub rate_of: Option<&'static str>,
    /// The floor that it is held against.
    pub floor: Option<String>,
    /// What it could not be faster than.
    pub floor_ms: Option<f64>,
    /// The floor over its median.
    pub share_of_floor: Option<f64>,
    /// The median of the times over the floor.
    pub times_floor: Option<f64>,
    /// Memory of a step.
    pub bytes: StepBytes,
    /// What the compiler has allotted, per device.
    pub compiled_bytes: Option<CompiledBytes>,
    /// What the device's allocator saw of the first call.
    pub device_bytes: Option<DeviceBytes>,
    /// The same numbers by the names of the system that this one follows.
    #[serde(flatten)]
    pub seed: SeedNames,
}

/// Memory of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StepBytes {
    /// Logits, or hidden states and head.
    pub inputs: Option<u64>,
    /// Gradients and results per token.
    pub outputs: Option<u64>,
    /// Everything else, by the plan or the compiler.
    pub workspace: Option<u64>,
    /// The most that was there during a step beyond inputs and outputs, as measured: of the process, or, on a device of its
    /// own, by the device's allocator.
    pub high_water: Option<u64>,
}

/// Numbers by the names of the seed system's benchmark.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SeedNames {
    /// Mean of the times in seconds.
    #[serde(rename = "bench/step_s_mean")]
    pub step_s_mean: Option<f64>,
    /// Median of the times in seconds.
    #[serde(rename = "bench/step_s_p50")]
    pub step_s_p50: Option<f64>,
    /// The time in seconds that nine of ten steps do not exceed.
    #[serde(rename = "bench/step_s_p90")]
    pub step_s_p90: Option<f64>,
    /// Seconds that planning or compiling took.
    #[serde(rename = "bench/compile_s")]
    pub compile_s: f64,
    /// Mean of the times in milliseconds.
    pub avg_step_ms: Option<f64>,
    /// Seconds of the first call.
    pub first_call_s: f64,
    /// Bytes of the inputs.
    #[serde(rename = "mem/inputs_bytes")]
    pub inputs_bytes: Option<u64>,
    /// Bytes of the gradients and of the results per token.
    #[serde(rename = "mem/outputs_bytes")]
    pub outputs_bytes: Option<u64>,
    /// Bytes of workspace that were planned.
    #[serde(rename = "mem/workspace_bytes")]
    pub workspace_bytes: Option<u64>,
    /// Measured, beyond inputs and outputs.
    #[serde(rename = "mem/high_water_bytes")]
    pub high_water_bytes: Option<u64>,
    /// Bytes in use with inputs and outputs before the first step: by the process, or on the device.
    pub mem_after_alloc: Option<u64>,
    /// Bytes in use after the last step.
    pub mem_after_run: Option<u64>,
}

/// What a compiler has allotted to a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompiledBytes {
    /// Bytes of all arguments.
    pub arguments: u64,
    /// All results, with those that take over an argument's memory.
    pub outputs: u64,
    /// Results that take over an argument's memory.
    pub aliased: u64,
    /// Everything else that a run allocates.
    pub temp: u64,
}

/// What a device's allocator saw of a variant's first call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceBytes {
    /// Bytes in use before the call: inputs and gradients, also those of other variants.
    pub before: u64,
    /// The most in use at any time until then.
    pub peak_before: u64,
    /// The most in use at any time until after the call.
    pub peak_after: u64,
    /// Bytes in use after the call.
    pub after: u64,
    /// High water of the step above what was in use before it; `None` when an earlier peak hides it.
    pub step: Option<u64>,
}

impl DeviceBytes {
    /// The numbers that the allocator reports before and after the call, and what follows from them.
    pub fn new(before: u64, peak_before: u64, peak_after: u64, after: u64) -> Self {
        let step = (peak_after > peak_before).then(|| peak_after.saturating_sub(before));
        Self { before, peak_before, peak_after, after, step }
    }
}

/// `time` in UTC to the second, e.g. `2026-11-21T07:30:00Z`.
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
