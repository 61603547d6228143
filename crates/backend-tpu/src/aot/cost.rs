//! A compiler's estimates, and how the estimate of a loop's body becomes that of all its iterations.
//!
//! Compilers count a body once. What one iteration of a loop costs is found by leaving the loop out, or by the loop twice: the
//! difference.

use super::hlo;
use grpo_core::error::Result;
use pjrt::Executable;
use serde::{Deserialize, Serialize};
use std::ops::{Add, Mul, Sub};

/// A compiler's estimates of what a program costs on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Operations of products and of everything else.
    pub flops: f64,
    /// Bytes to and from the device's memory.
    pub bytes: f64,
    /// Sum over operations of the larger of the times that arithmetic and memory need.
    pub seconds: f64,
    /// Another model of the same compiler, without a notion of memory; 0 where it has none.
    pub cycles: f64,
}

impl Cost {
    /// The estimates of `executable`, with every loop's body counted once; `Err` within says why there are none.
    ///
    /// # Errors
    /// [`grpo_core::Error::Backend`] when the plugin fails.
    pub(super) fn of(executable: &Executable) -> Result<Result<Self, String>> {
        let analysis = match executable.cost_analysis() {
            Ok(analysis) => analysis,
            Err(error) if error.is_unsupported() => return Ok(Err("the plugin has no cost analysis".into())),
            Err(error) => return Err(crate::error::failed(error)),
        };
        // What a program has none of is left out.
        let read = |name: &str| analysis.get(name).copied().unwrap_or(0.0);
        let program = executable.optimized_program().map_err(crate::error::failed)?;
        let cost = Self {
            flops: read("flops"),
            bytes: read("bytes accessed"),
            seconds: read("optimal_seconds"),
            cycles: hlo::estimated_cycles(&program).unwrap_or(0.0),
        };
        // -1 stands for an operation of unknown cost.
        Ok(match cost.flops < 0.0 || cost.bytes < 0.0 || cost.seconds < 0.0 {
            true => Err("the plugin's cost analysis does not know every operation".into()),
            false => Ok(cost),
        })
    }

    /// The cost of a program with loops: `once` counts every body once; of each loop, all its turns, how often it begins
    /// (1 outside of others), and the cost of the program without it and what is in it.
    ///
    /// A body's own operations, which once - without of the loop less that of the loops in it are, count `turns` times;
    /// sorted by loops, that is the sum of (turns - begins) (once - without).
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
    fn every_body_counts_as_often_as_it_turns() {
        // 1 outside, bodies of 10 and 100.
        let whole = Cost::of_loops(cost(111.0), &[(4, 1, cost(101.0)), (3, 1, cost(11.0))]);
        assert_eq!(whole, cost(1.0 + 4.0 * 10.0 + 3.0 * 100.0));
        assert_eq!(Cost::of_loops(cost(5.0), &[(0, 1, cost(2.0))]), cost(2.0));
        assert_eq!(Cost::of_loops(cost(5.0), &[]), cost(5.0));
    }

    #[test]
    fn a_loop_in_a_loop_turns_in_each_of_its_turns() {
        // 1 outside, a body of 10 that turns 4 times, and in it one of 100 that turns 3 times, and one of 1000 that never does.
        let loops = [(4, 1, cost(1.0)), (12, 4, cost(1011.0)), (0, 4, cost(111.0))];
        assert_eq!(Cost::of_loops(cost(1111.0), &loops), cost(1.0 + 4.0 * 10.0 + 12.0 * 100.0));
    }
}
