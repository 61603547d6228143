//! Times of a program that reads every weight once in its dtype and multiplies at the peak, on this machine. A program that holds weights in fewer
//! bits can take less time where memory is the bound.

use super::Numbers;
use super::report::Work;
use grpo_backend_cpu::peak::{Stream, Traffic, flops};
use grpo_core::Dtype;
use grpo_models::{ModelConfig, TokenCounts};

/// Bytes of the buffer for the bandwidth, far larger than caches.
const BYTES: usize = 1 << 28;

/// The measured rates of this machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rates {
    /// Bytes read from memory per second.
    bytes: f64,
    /// Multiply-adds in the dtype of products, in flop/s.
    flops: f64,
}

impl Rates {
    /// Measures the rates of `threads` threads; 0 is one per core.
    pub(super) fn measure(dtype: Dtype, threads: usize) -> Self {
        let mut read = Stream::new(Traffic::Read, threads, BYTES);
        let seconds = (0..5).map(|_| read.run()).fold(f64::INFINITY, f64::min);
        Self { bytes: read.bytes() / seconds, flops: flops(dtype, threads) }
    }

    /// Returns those times and their rates under the names of the numbers of a system. A pass over a batch reads the weights once and takes
    /// the flops of its tokens.
    pub(super) fn floor(&self, dtype: Dtype, work: Work, config: &ModelConfig) -> Numbers {
        let flops_of = |counts: &[(usize, usize, usize)]| {
            let mut sum = TokenCounts::default();
            counts.iter().for_each(|(before, count, logits)| sum.add(config, *before, *count, *logits));
            config.forward_flops(&sum)
        };
        // Two flops per weight that a token uses. Of experts that is at least the part that is read; an embedding is only read for the
        // rows of the tokens.
        let weights = 0.5 * flops_of(&[(0, 1, 1)]);
        let pass = |flops: f64| (weights * dtype.bytes() as f64 / self.bytes).max(flops / self.flops);
        let mut numbers = Numbers::from([("bytes_per_s", self.bytes), ("flops_per_s", self.flops)]);
        match work {
            Work::Generation { rows, prompt, tokens } => {
                let times = rows as f64;
                let step = pass(times * flops_of(&[(prompt + tokens / 2, 1, 1)]));
                let first = pass(times * flops_of(&[(0, prompt - 1, 0), (prompt - 1, 1, 1)]));
                numbers.extend([("first_token_s", first), ("tokens_per_s", times / step)]);
            }
            Work::Update { rows, prompt, completion, .. } => {
                // Forward and backward pass, as in the metric `mfu` of a run.
                let flops = 3.0 * rows as f64 * flops_of(&[(0, prompt, 0), (prompt, completion, completion)]);
                let step = flops / self.flops;
                numbers.extend([("step_s", step), ("tokens_per_s", (rows * (prompt + completion)) as f64 / step)]);
            }
        }
        numbers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_row_is_bound_by_memory_and_many_rows_by_multiply_adds() {
        let (rates, config) = (Rates { bytes: 1e9, flops: 1e10 }, ModelConfig::default());
        let floor =
            |rows, dtype| rates.floor(dtype, Work::Generation { rows, prompt: 4, tokens: 8 }, &config)["tokens_per_s"];
        let mut counts = TokenCounts::default();
        counts.add(&config, 0, 1, 1);
        let bytes = 4.0 * 0.5 * config.forward_flops(&counts);
        assert!((floor(1, Dtype::F32) * bytes / 1e9 - 1.0).abs() < 1e-9);
        assert!((floor(1, Dtype::Bf16) / floor(1, Dtype::F32) - 2.0).abs() < 1e-9);
        let many = floor(1000, Dtype::F32);
        assert!((floor(2000, Dtype::Bf16) / many - 1.0).abs() < 1e-9 && many < 1e10 / (bytes / 2.0));
    }

    #[test]
    fn an_update_has_the_flops_of_three_passes() {
        let (rates, config) = (Rates { bytes: 1e9, flops: 1e10 }, ModelConfig::default());
        let update = Work::Update { rows: 2, prompt: 3, completion: 5, micro_batches: 1 };
        let mut counts = TokenCounts::default();
        for _ in 0..2 {
            counts.add(&config, 0, 3, 0);
            counts.add(&config, 3, 5, 5);
        }
        let floor = rates.floor(Dtype::F32, update, &config);
        assert!((floor["step_s"] * 1e10 / (3.0 * config.forward_flops(&counts)) - 1.0).abs() < 1e-9);
        assert!((floor["tokens_per_s"] * floor["step_s"] - 16.0).abs() < 1e-9);
    }
}
