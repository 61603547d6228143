//! What a benchmark says, as one document.

use super::measure::{Rounds, Timing};
use crate::assertion::Checked;
use crate::config::BenchConfig;
use backend_tpu::program::Blocking;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Everything that was measured in one run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Document {
    /// Of this program.
    pub version: String,
    /// When it began, UTC, as `2026-11-21T07:30:00Z`.
    pub date: String,
    /// The host.
    pub machine: Machine,
    /// Problems, in the order in which they were measured.
    pub cases: Vec<Case>,
    /// Claims, in the order given.
    pub assertions: Vec<Claim>,
}

/// One problem.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Case {
    /// Of the configuration, the shape and the dtype.
    pub name: String,
    /// The problem, with all of its variants.
    pub config: BenchConfig,
    /// How often.
    pub rounds: Rounds,
    /// PJRT devices that were measured on, by the backend's name.
    pub devices: BTreeMap<String, DeviceReport>,
    /// By name; what variants are held against.
    pub floors: BTreeMap<String, Outcome>,
    /// By name.
    pub variants: BTreeMap<String, Outcome>,
}

/// A claim that was looked at.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Claim {
    /// In this problem; `None` for a claim across problems.
    pub case: Option<String>,
    /// What came out.
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

/// The host.
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
    /// This one.
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

/// The devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceReport {
    /// `cpu`, `cuda`, `tpu`.
    pub platform: String,
    /// Of the compiler and runtime, in their own words.
    pub platform_version: String,
    /// The model.
    pub kind: String,
    /// How many of them are used.
    pub used: usize,
    /// That one's allocator may use, where it says.
    pub memory_bytes: Option<u64>,
    /// The library.
    pub plugin: String,
    /// Of the PJRT C API.
    pub api_version: String,
}

/// What became of a variant.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub enum Outcome {
    /// It ran.
    Measured(Box<Measured>),
    /// It should have run.
    Failed {
        /// Why it did not, or no longer did.
        error: String,
    },
    /// This backend has no such thing.
    NotOffered {
        /// In the backend's words.
        error: String,
    },
}

/// What was measured of a variant or a floor.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// What it ran on; `peer` for somebody else's program.
    pub backend: String,
    /// On the CPU; 0 is one per core.
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
    /// When each timed step began, in seconds after the first of the problem: variants take turns.
    pub began_s: Vec<f64>,
    /// By the median.
    pub tokens_per_second: Option<f64>,
    /// Operations of the products that the result needs; 0 of given logits.
    pub useful_flops: f64,
    /// Those by the median.
    pub useful_flops_per_second: Option<f64>,
    /// Of a floor of this machine: operations or bytes in a second, by its median.
    pub rate_per_second: Option<f64>,
    /// What that counts: `FLOP` or `B`.
    pub rate_of: Option<&'static str>,
    /// The floor that it is held against.
    pub floor: Option<String>,
    /// What it could not be faster than.
    pub floor_ms: Option<f64>,
    /// The floor over its median.
    pub share_of_floor: Option<f64>,
    /// Its median over the floor.
    pub times_floor: Option<f64>,
    /// Memory of a step.
    pub bytes: StepBytes,
    /// What the compiler has allotted, per device.
    pub compiled_bytes: Option<CompiledBytes>,
    /// What the device's allocator saw of the first call.
    pub device_bytes: Option<DeviceBytes>,
    /// The same by the names of the system that this one follows.
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
    /// Mean.
    #[serde(rename = "bench/step_s_mean")]
    pub step_s_mean: Option<f64>,
    /// Median.
    #[serde(rename = "bench/step_s_p50")]
    pub step_s_p50: Option<f64>,
    /// 9 of 10.
    #[serde(rename = "bench/step_s_p90")]
    pub step_s_p90: Option<f64>,
    /// Planning or compiling.
    #[serde(rename = "bench/compile_s")]
    pub compile_s: f64,
    /// Mean.
    pub avg_step_ms: Option<f64>,
    /// The first call.
    pub first_call_s: f64,
    /// Of inputs.
    #[serde(rename = "mem/inputs_bytes")]
    pub inputs_bytes: Option<u64>,
    /// Of gradients and results per token.
    #[serde(rename = "mem/outputs_bytes")]
    pub outputs_bytes: Option<u64>,
    /// Planned.
    #[serde(rename = "mem/workspace_bytes")]
    pub workspace_bytes: Option<u64>,
    /// Measured, beyond inputs and outputs.
    #[serde(rename = "mem/high_water_bytes")]
    pub high_water_bytes: Option<u64>,
    /// In use with inputs and outputs before the first step: by the process, or on the device.
    pub mem_after_alloc: Option<u64>,
    /// In use after the last one.
    pub mem_after_run: Option<u64>,
}

/// What a compiler has allotted to a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompiledBytes {
    /// All arguments.
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
    /// In use before it: inputs and gradients, also those of other variants.
    pub before: u64,
    /// The most in use at any time until then.
    pub peak_before: u64,
    /// The same after it.
    pub peak_after: u64,
    /// In use after it.
    pub after: u64,
    /// High water of the step above what was in use before it; `None` when an earlier peak hides it.
    pub step: Option<u64>,
}

impl DeviceBytes {
    /// Of the allocator's words before and after.
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
