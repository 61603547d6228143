//! Runs precomputed logits through the TPU kernels of [`crate::mosaic`], in place of a
//! [`crate::program::softmax::Tile`].
//!
//! Legend: B batches of T tokens, N = B T, V vocabulary.

use crate::mosaic::{KernelSpec, dlogits_kernel, statistics_kernel};
use crate::program::numerics::MosaicBlocks;
use crate::program::softmax::{Columns, RowGrad, Statistics};
use crate::program::spec::Spec;
use grpo_core::error::{Error, Result};
use grpo_stablehlo::Value;
use grpo_stablehlo::mosaic::Kernel;

pub(crate) struct Kernels {
    spec: KernelSpec,
    statistics: Kernel,
    gradient: Kernel,
    /// The logits for the kernels, `[B, T, V]`.
    logits: Value,
    /// The target's column, i32 `[N]`; -1 if there is none.
    targets: Value,
}

/// Returns the factor of logits in the kernels, from the configuration's temperature and logit_scale; kernels are
/// compiled for it.
pub(crate) fn scale(spec: &Spec) -> f32 {
    (spec.loss.logit_scale * spec.loss.temperature_factors(None).logits) as f32
}

impl Kernels {
    /// `logits` are `[N, V]`; `targets` are i32 `[N]`.
    ///
    /// # Errors
    /// [`Error::Config`] for invalid blocks.
    pub(crate) fn new(spec: &Spec, blocks: MosaicBlocks, logits: &Value, targets: &Value) -> Result<Self> {
        let [n, v] = [0, 1].map(|d| logits.shape()[d]);
        let MosaicBlocks { batch, time_block, vocab_block } = blocks;
        if batch == 0 || !n.is_multiple_of(batch) {
            return Err(Error::Config(format!("mosaic.batch is {batch}, which does not divide {n} tokens")));
        }
        let scale = scale(spec);
        let kernel =
            KernelSpec { time_block, vocab_block, ..KernelSpec::new(batch, n / batch, v, logits.dtype(), scale) };
        let refused = |e: grpo_stablehlo::Error| Error::Config(e.to_string());
        Ok(Self {
            statistics: statistics_kernel(&kernel).map_err(refused)?,
            gradient: dlogits_kernel(&kernel).map_err(refused)?,
            logits: logits.reshape(&[batch, n / batch, v]),
            targets: targets.clone(),
            spec: kernel,
        })
    }

    /// Reshapes `[N]` to `[B, 1, T]`.
    fn row(&self, value: &Value) -> Value {
        value.reshape(&[self.spec.batch, 1, self.spec.tokens])
    }

    fn call(&self, kernel: &Kernel, operands: &[&Value]) -> Value {
        let f = self.logits.builder();
        f.custom_call(kernel.custom_call(), operands, &kernel.result_types()).swap_remove(0)
    }
}

impl Columns for Kernels {
    fn statistics(&self, entropy: bool) -> Statistics {
        let all = self.call(&self.statistics, &[&self.row(&self.targets), &self.logits]);
        let KernelSpec { batch, tokens, .. } = self.spec;
        let row = |i: usize| all.slice(&[0, i, 0], &[batch, i + 1, tokens]).reshape(&[batch * tokens]);
        let [max, sum, dot, target] = [0, 1, 2, 3].map(row);
        // Restore -inf, which the kernel represents by finite numbers.
        let least = max.like(f64::NEG_INFINITY);
        let alone = max.le(&max.like(f64::from(f32::MIN)));
        let absent = self.targets.lt(&self.targets.like(0));
        Statistics {
            max: alone.select(&least, &max),
            sum,
            dot: entropy.then_some(dot),
            target: absent.select(&least, &target),
        }
    }

    fn gradient(&self, row_grad: &RowGrad, live: &Value) -> Value {
        let zero = row_grad.constant.like(0.0);
        let kept = |row: &Value| self.row(&live.select(row, &zero));
        // Finite, so that differences to it are not NaN.
        let max = self.row(&row_grad.max.max(&zero.like(f64::from(f32::MIN))));
        let linear = kept(row_grad.linear.as_ref().unwrap_or(&zero));
        let rows = [&max, &kept(&row_grad.constant), &linear, &kept(&row_grad.target)];
        let coefficients = zero.builder().concatenate(&rows, 1);
        let dlogits = self.call(&self.gradient, &[&self.row(&self.targets), &coefficients, &self.logits]);
        let KernelSpec { batch, tokens, vocab, .. } = self.spec;
        dlogits.reshape(&[batch * tokens, vocab])
    }
}
