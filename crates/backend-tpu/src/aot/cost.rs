//! A compiler's cost estimates, and their extension from one iteration to all iterations of loops.
//!
//! Compilers count a loop body once. The cost of one iteration is the difference to the program without the loop, or
//! with the loop duplicated.

use super::cycles::estimated_cycles;
use grpo_core::error::Result;
use grpo_pjrt::Executable;
use serde::{Deserialize, Serialize};
use std::ops::{Add, Mul, Sub};

/// A compiler's cost estimates of a program on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// The number of floating-point operations, in products and elsewhere.
    pub flops: f64,
    /// The bytes read from and written to the device's memory.
    pub bytes: f64,
    /// The sum over operations of the maximum of compute time and memory time.
    pub seconds: f64,
    /// The cycles of the compiler's other cost model, which ignores memory; 0 if it has none.
    pub cycles: f64,
}

impl Cost {
    /// Reads the estimates of `executable`, with loop bodies counted once. An inner `Err` has the reason why there are
    /// none.
    ///
    /// # Errors
    /// [`grpo_core::Error::Backend`] if the plugin fails.
    pub(super) fn of(executable: &Executable) -> Result<Result<Self, String>> {
        let analysis = match executable.cost_analysis() {
            Ok(analysis) => analysis,
            Err(error) if error.is_unsupported() => return Ok(Err("the plugin has no cost analysis".into())),
            Err(error) => return Err(crate::error::failed(error)),
        };
        // Properties that are zero are missing.
        let read = |name: &str| analysis.get(name).copied().unwrap_or(0.0);
        let program = executable.optimized_program().map_err(crate::error::failed)?;
        let cost = Self {
            flops: read("flops"),
            bytes: read("bytes accessed"),
            seconds: read("optimal_seconds"),
            cycles: program.module().and_then(|module| estimated_cycles(&module)).unwrap_or(0.0),
        };
        // -1 marks an operation of unknown cost.
        Ok(match cost.flops < 0.0 || cost.bytes < 0.0 || cost.seconds < 0.0 {
            true => Err("the plugin's cost analysis does not know every operation".into()),
            false => Ok(cost),
        })
    }

    /// Returns the cost of a program with loops. `once` counts every body once. Each loop has its total number of
    /// iterations (turns), its number of executions (begins; 1 for outer loops), and the cost of the program without
    /// the loop and its body.
    ///
    /// A body's own operations cost (once - without) of the loop minus (once - without) of its nested loops, and run
    /// `turns` times. Sorted by loops, the total is once + the sum of (turns - begins) (once - without).
    pub(super) fn of_loops(once: Self, loops: &[(u64, u64, Self)]) -> Self {
        let more = |turns: u64, begins: u64| turns as f64 - begins as f64;
        loops.iter().fold(once, |sum, (turns, begins, without)| sum + (once - *without) * more(*turns, *begins))
    }

    fn zip(self, other: Self, combine: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            flops: combine(self.flops, other.flops),
            bytes: combine(self.bytes, other.bytes),
            seconds: combine(self.seconds, other.seconds),
            cycles: combine(self.cycles, other.cycles),
        }
    }
}

impl Add for Cost {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
}

impl Sub for Cost {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
}

impl Mul<f64> for Cost {
    type Output = Self;
    fn mul(self, factor: f64) -> Self {
        self.zip(self, |a, _| a * factor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(x: f64) -> Cost {
        Cost { flops: x, bytes: 2.0 * x, seconds: 3.0 * x, cycles: 4.0 * x }
    }

    #[test]
    fn loop_bodies_count_once_per_iteration() {
        // Costs: 1 outside of loops, bodies of 10 and 100.
        let whole = Cost::of_loops(cost(111.0), &[(4, 1, cost(101.0)), (3, 1, cost(11.0))]);
        assert_eq!(whole, cost(1.0 + 4.0 * 10.0 + 3.0 * 100.0));
        assert_eq!(Cost::of_loops(cost(5.0), &[(0, 1, cost(2.0))]), cost(2.0));
        assert_eq!(Cost::of_loops(cost(5.0), &[]), cost(5.0));
    }

    #[test]
    fn nested_loop_bodies_count_once_per_iteration() {
        // Costs: 1 outside; a body of 10 with 4 iterations; nested in it 100 with 3 iterations and 1000 with none.
        let loops = [(4, 1, cost(1.0)), (12, 4, cost(1011.0)), (0, 4, cost(111.0))];
        assert_eq!(Cost::of_loops(cost(1111.0), &loops), cost(1.0 + 4.0 * 10.0 + 12.0 * 100.0));
    }
}
