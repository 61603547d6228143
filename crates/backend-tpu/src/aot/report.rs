//! What a compiler says of a program.

use super::analysis::Analysis;
use super::chip::Chip;
use super::cost::Cost;
use crate::program::Blocking;
use serde::{Deserialize, Serialize};
use stablehlo::Loop;

/// What a compiler says of a program, per device. Bytes are what it has allotted; times are its estimates, never
/// measurements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// How the loops are cut; `None` for a program without tiles.
    pub blocking: Option<Blocking>,
    /// Bytes of all arguments.
    pub argument_bytes: u64,
    /// All results, with those that take over an argument's memory.
    pub output_bytes: u64,
    /// Results that take over an argument's memory.
    pub alias_bytes: u64,
    /// Everything else that a run allocates.
    pub temp_bytes: u64,
    /// Bytes of the program's code.
    pub code_bytes: u64,
    /// Bytes of the text that was compiled.
    pub program_bytes: u64,
    /// What has to fit into the device's memory: arguments, results that are not aliased, temporaries and code.
    pub total_bytes: u64,
    /// Estimate of all operations; a loop's body counts once per iteration, here and below.
    pub flops: Option<f64>,
    /// Estimate of what goes to and from memory.
    pub bytes_accessed: Option<f64>,
    /// Estimate of the time: the sum over operations of the larger of what arithmetic and memory need.
    pub estimate_seconds: Option<f64>,
    /// Another estimate of the same compiler, without a notion of memory, in cycles.
    pub estimate_cycles: Option<f64>,
    /// The estimated cycles in seconds, where the chip's clock is known.
    pub estimate_cycles_seconds: Option<f64>,
    /// Why there are no estimates.
    pub no_estimate: Option<String>,
    /// The loops of the program, by the numbers of their iterations, in order.
    pub loops: Vec<LoopReport>,
    /// The time that no program can beat on this chip.
    pub floor: Floor,
    /// What compiling took on this machine, in seconds.
    pub compile_seconds: f64,
    /// The processor time that it took, in seconds.
    pub compile_processor_seconds: f64,
    /// Whether that was in an earlier run, whose outcome was remembered.
    pub from_cache: bool,
}

/// The loops of a program that have as many iterations, and are within loops that have.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoopReport {
    /// The number of iterations each time one of them begins; `None` when the program does not say.
    pub trips: Option<u64>,
    /// How often each begins: the iterations of the loops around it, multiplied; 1 outside of all loops.
    pub begins: Option<u64>,
    /// Estimate of the time of one iteration of each in seconds, in which the loops in it turn once.
    pub body_seconds: Option<f64>,
}

impl LoopReport {
    /// Whether a loop is one of these.
    pub(super) fn counts(&self, l: &Loop) -> bool {
        (self.trips, self.begins) == (l.trips, l.begins)
    }
}

/// What no program can beat on a chip: the larger of two times.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Floor {
    /// Operations of the products without which there is no result.
    pub flops: f64,
    /// Every argument once, every result once.
    pub bytes: f64,
    /// The larger of the two times, at the chip's peak for bf16 and its bandwidth, as published.
    pub seconds: f64,
}

impl Floor {
    /// That of `flops` operations and `bytes` moved.
    pub fn new(flops: f64, bytes: f64, chip: Chip) -> Self {
        Self { flops, bytes, seconds: (flops / chip.peak_flops).max(bytes / chip.bandwidth) }
    }
}

impl Report {
    /// The report of a program that has been compiled; what the compiler estimates is added by [`Report::with_cost`].
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
