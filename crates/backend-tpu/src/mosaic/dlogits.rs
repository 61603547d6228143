//! The gradient with respect to logits, in place.

use super::spec::{KernelSpec, LANES, LOWEST, ROWS, load, place, rows};
use grpo_stablehlo::mosaic::Kernel;
use grpo_stablehlo::{Dtype, Result};

/// The number of coefficients of a row: M, constant, linear and dL/dz_y, in this order.
pub const COEFFICIENTS: usize = 4;

/// Makes the kernel that computes dL/dlogits from targets, coefficients and logits.
///
/// * targets: i32 `[B, 1, T]`; a number outside of the vocabulary, such as -1, means no target.
/// * coefficients: f32 `[B, 4, T]`, [`COEFFICIENTS`]: dL/dz_j = e_j (constant + linear d_j) if j is not the target.
/// * logits: `[B, T, V]`; the result shares their buffer and dtype.
///
/// A row whose coefficients except for M are 0 has a gradient of 0 for any logits, including NaN.
///
/// # Errors
/// Returns an error if a block is not a multiple of 128 or too large for any chip, a size is 0, the scale is not above
/// 0, or the dtype is neither bf16 nor f32.
#[track_caller]
pub fn dlogits_kernel(spec: &KernelSpec) -> Result<Kernel> {
    let k = spec.builder("softmax_dlogits")?;
    let targets = k.input(spec.rows(1, Dtype::I32), spec.rows_window(1));
    let coefficients = k.input(spec.rows(COEFFICIENTS, Dtype::F32), spec.rows_window(COEFFICIENTS));
    let logits = k.input(spec.logits(), spec.logits_window());
    let out = k.output(spec.logits(), spec.logits_window());
    k.alias(&out, &logits);
    let [max, constant, linear, at_target] = std::array::from_fn(|_| spec.lanes(&k, Dtype::F32));
    let target = spec.lanes(&k, Dtype::I32);

    let block = k.program_id(2);
    k.when(&block.eq(&k.scalar(0)), || {
        target.store_all(&spec.spread(&targets, 0));
        for (i, lanes) in [&max, &constant, &linear, &at_target].into_iter().enumerate() {
            lanes.store_all(&spec.spread(&coefficients, i));
        }
    });
    let first_column = &block * k.scalar(spec.vocab_block as i32);
    spec.for_rows(&k, |row| {
        let lane = k.iota(1, &[ROWS, LANES]);
        let target = rows(&target, row) - first_column.broadcast(&[ROWS, LANES]);
        let [max, constant, linear, at_target] = [&max, &constant, &linear, &at_target].map(|lanes| rows(lanes, row));
        let zero = max.like(0.0);
        let inactive = constant.eq(&zero) & linear.eq(&zero) & at_target.eq(&zero);
        // Here, d_j is in units of ln 2.
        let linear = linear * zero.like(std::f64::consts::LN_2);
        for slice in 0..spec.vocab_block / LANES {
            let d = (load(&logits, row, slice) - &max) * zero.like(spec.exponent_scale());
            let slope = &constant + &linear * d.max(&zero.like(LOWEST));
            // A selection, not a product: a logit of an inactive row may be NaN.
            let gradient = inactive.select(&zero, &(d.exp2() * slope));
            let column = lane.like((slice * LANES) as i64) + &lane;
            let gradient = column.eq(&target).select(&at_target, &gradient).convert(spec.dtype);
            out.store(&place(row, slice), &gradient.reshape(&[1, ROWS, LANES]));
        }
    });

    k.cost(spec.cost(2, 8, 1 + COEFFICIENTS));
    k.finish()
}
