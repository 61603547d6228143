//! A compiler's report on a program.

use super::analysis::Analysis;
use super::chip::Chip;
use super::cost::Cost;
use super::traffic::Traffic;
use crate::program::Blocking;
use grpo_stablehlo::Loop;
use serde::{Deserialize, Serialize};

/// A compiler's report on a program, per device. Bytes are the compiler's allocations; times are its estimates, never
/// measurements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The blocking of the loops; `None` for a program without tiles.
    pub blocking: Option<Blocking>,
    /// Bytes of all arguments.
    pub argument_bytes: u64,
    /// The bytes of all results, including results that reuse an argument's memory.
    pub output_bytes: u64,
    /// The bytes of results that reuse an argument's memory.
    pub alias_bytes: u64,
    /// The bytes of all other allocations of a run.
    pub temp_bytes: u64,
    /// Bytes of the program's code.
    pub code_bytes: u64,
    /// The bytes of the compiled text.
    pub program_bytes: u64,
    /// The bytes that must fit into the device's memory: arguments, results that are not aliased, temporaries and code.
    pub total_bytes: u64,
    /// The estimated number of floating-point operations. Here and below, a loop body counts once per iteration.
    pub flops: Option<f64>,
    /// The estimated memory traffic in bytes.
    pub bytes_accessed: Option<f64>,
    /// The estimated time: the sum over operations of the maximum of compute time and memory time.
    pub estimate_seconds: Option<f64>,
    /// The estimated cycles of the compiler's other cost model, which ignores memory.
    pub estimate_cycles: Option<f64>,
    /// The estimated cycles in seconds, if the chip's clock is known.
    pub estimate_cycles_seconds: Option<f64>,
    /// The bytes that collectives move. Without estimates, a loop body counts once.
    pub traffic: Traffic,
    /// The reason why there are no estimates.
    pub no_estimate: Option<String>,
    /// The loops of the program, grouped by trip count, in order.
    pub loops: Vec<LoopReport>,
    /// The lower bound of the time on this chip.
    pub floor: Floor,
    /// The compile time on this machine in seconds.
    pub compile_seconds: f64,
    /// The processor time of the compilation in seconds.
    pub compile_processor_seconds: f64,
    /// `true` if the analysis was read from the cache; compile times are then from an earlier run.
    pub from_cache: bool,
}

/// The loops of a program with equal trip counts and equal numbers of executions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoopReport {
    /// The number of iterations per execution; `None` if the program does not determine it.
    pub trips: Option<u64>,
    /// The number of executions: the product of the trip counts of the enclosing loops; 1 without any.
    pub begins: Option<u64>,
    /// The estimated time of one iteration of all these loops in seconds, with nested loops counted once.
    pub body_seconds: Option<f64>,
}

impl LoopReport {
    /// Returns `true` if a loop is one of these.
    pub(super) fn counts(&self, l: &Loop) -> bool {
        (self.trips, self.begins) == (l.trips, l.begins)
    }
}

/// A lower bound of the time on a chip: the maximum of compute time and memory time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Floor {
    /// The operations of the required products.
    pub flops: f64,
    /// The bytes of all arguments and results, each moved once.
    pub bytes: f64,
    /// The maximum of compute time and memory time, with the chip's published bf16 peak and bandwidth.
    pub seconds: f64,
}

impl Floor {
    /// Computes the bound of `flops` operations and `bytes` moved.
    pub fn new(flops: f64, bytes: f64, chip: Chip) -> Self {
        Self { flops, bytes, seconds: (flops / chip.peak_flops).max(bytes / chip.bandwidth) }
    }
}

impl Report {
    /// Makes the report of a compiled program; [`Report::with_cost`] adds the estimates.
    pub(super) fn new(blocking: Option<Blocking>, analysis: &Analysis, floor: Floor) -> Self {
        Self {
            blocking,
            argument_bytes: analysis.argument_bytes,
            output_bytes: analysis.output_bytes,
            alias_bytes: analysis.alias_bytes,
            temp_bytes: analysis.temp_bytes,
            code_bytes: analysis.code_bytes,
            program_bytes: analysis.program_bytes,
            total_bytes: analysis.total_bytes(),
            flops: None,
            bytes_accessed: None,
            estimate_seconds: None,
            estimate_cycles: None,
            estimate_cycles_seconds: None,
            traffic: analysis.traffic.clone(),
            no_estimate: None,
            loops: vec![],
            floor,
            compile_seconds: analysis.compile_seconds,
            compile_processor_seconds: analysis.compile_processor_seconds,
            from_cache: analysis.from_cache,
        }
    }

    pub(super) fn with_cost(self, cost: Result<Cost, String>, loops: Vec<LoopReport>, chip: Chip) -> Self {
        let cost = match cost {
            Ok(cost) => cost,
            Err(reason) => return Self { no_estimate: Some(reason), loops, ..self },
        };
        let cycles = Some(cost.cycles).filter(|cycles| *cycles > 0.0);
        Self {
            flops: Some(cost.flops),
            bytes_accessed: Some(cost.bytes),
            estimate_seconds: Some(cost.seconds),
            estimate_cycles: cycles,
            estimate_cycles_seconds: cycles.zip(chip.clock).map(|(cycles, clock)| cycles / clock),
            loops,
            ..self
        }
    }
}
