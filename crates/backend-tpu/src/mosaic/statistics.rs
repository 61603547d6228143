//! Row statistics of logits, in one pass.
//!
//! Each of the 128 lanes of a row keeps its own maximum and sums (an online softmax over every 128th column), so that
//! no operation crosses lanes before the last block.

use super::spec::{KernelSpec, LANES, LOWEST, ROWS, load, rows};
use grpo_stablehlo::mosaic::{Builder, Kernel, Reducer, Ref, Value};
use grpo_stablehlo::{Dtype, Result};

/// The number of statistics of a row: M, S, D and z_y, in this order.
pub const STATISTICS: usize = 4;

/// Makes the kernel that computes statistics from targets and logits.
///
/// * targets: i32 `[B, 1, T]`; a number outside of the vocabulary, such as -1, means no target.
/// * logits: `[B, T, V]`.
/// * result: f32 `[B, 4, T]`, [`STATISTICS`]. M is `f32::MIN` if only the target is above -inf; z_y is 0 without a
///   target. A NaN other than the target's makes S NaN.
///
/// # Errors
/// Returns an error if a block is not a multiple of 128 or too large for any chip, a size is 0, the scale is not above
/// 0, or the dtype is neither bf16 nor f32.
#[track_caller]
pub fn statistics_kernel(spec: &KernelSpec) -> Result<Kernel> {
    let k = spec.builder("softmax_statistics")?;
    let targets = k.input(spec.rows(1, Dtype::I32), spec.rows_window(1));
    let logits = k.input(spec.logits(), spec.logits_window());
    let out = k.output(spec.rows(STATISTICS, Dtype::F32), spec.rows_window(STATISTICS));
    let [max, sum, dot, picked] = std::array::from_fn(|_| spec.lanes(&k, Dtype::F32));
    let target = spec.lanes(&k, Dtype::I32);
    let lanes =
        Lanes { spec, k: &k, logits: &logits, target: &target, max: &max, sum: &sum, dot: &dot, picked: &picked };

    let block = k.program_id(2);
    k.when(&block.eq(&k.scalar(0)), || {
        target.store_all(&spec.spread(&targets, 0));
        // Finite, so that differences to it are not NaN, and below every logit except -inf.
        let lowest = k.splat(f64::from(f32::MIN), max.ty().clone());
        max.store_all(&lowest);
        [&sum, &dot, &picked].into_iter().for_each(|lanes| lanes.store_all(&lowest.like(0.0)));
    });
    let before_last = spec.vocab.div_ceil(spec.vocab_block) - 1;
    let rest = spec.vocab - before_last * spec.vocab_block;
    let last = k.scalar(before_last as i32);
    if rest == spec.vocab_block {
        lanes.add_block(rest);
    } else {
        k.when(&block.lt(&last), || lanes.add_block(spec.vocab_block));
        k.when(&block.eq(&last), || lanes.add_block(rest));
    }
    k.when(&block.eq(&last), || lanes.write(&out));

    k.cost(spec.cost(1, 10, 1 + STATISTICS));
    k.finish()
}

/// The accumulators of a block of rows, per lane; `dot` is in units of ln 2.
struct Lanes<'k> {
    spec: &'k KernelSpec,
    k: &'k Builder,
    logits: &'k Ref,
    target: &'k Ref,
    max: &'k Ref,
    sum: &'k Ref,
    dot: &'k Ref,
    picked: &'k Ref,
}

impl Lanes<'_> {
    /// Adds the first `columns` columns of the block.
    fn add_block(&self, columns: usize) {
        self.spec.for_rows(self.k, |row| self.add_rows(row, columns));
    }

    fn add_rows(&self, row: &Value, columns: usize) {
        let k = self.k;
        let lane = k.iota(1, &[ROWS, LANES]);
        let first_column = k.program_id(2) * k.scalar(self.spec.vocab_block as i32);
        let target = rows(self.target, row) - first_column.broadcast(&[ROWS, LANES]);
        let (before, mut picked) = (rows(self.max, row), rows(self.picked, row));
        let nothing = before.like(f64::NEG_INFINITY);

        let mut max = before.clone();
        let mut others = vec![];
        for slice in 0..columns.div_ceil(LANES) {
            let column = lane.like((slice * LANES) as i64) + &lane;
            let is_target = column.eq(&target);
            let mut z = load(self.logits, row, slice);
            if (slice + 1) * LANES > columns {
                z = column.lt(&column.like(columns as i64)).select(&z, &nothing);
            }
            picked = is_target.select(&z, &picked);
            z = is_target.select(&nothing, &z);
            max = max.max(&z);
            others.push(z);
        }
        let (mut sum, mut dot) = self.rescaled(&max, &before, &rows(self.sum, row), &rows(self.dot, row));
        for z in others {
            let d = (z - &max) * max.like(self.spec.exponent_scale());
            let e = d.exp2();
            dot = dot + &e * d.max(&d.like(LOWEST));
            sum = sum + e;
        }
        for (lanes, value) in [(self.max, max), (self.sum, sum), (self.dot, dot), (self.picked, picked)] {
            lanes.store(&[row.into(), 0.into()], &value);
        }
    }

    /// Rescales sums relative to `before` to sums relative to `max`, which must not be smaller.
    fn rescaled(&self, max: &Value, before: &Value, sum: &Value, dot: &Value) -> (Value, Value) {
        let shift = ((before - max) * max.like(self.spec.exponent_scale())).max(&max.like(LOWEST));
        let factor = shift.exp2();
        (&factor * sum, factor * (dot + sum * shift))
    }

    /// Merges the lanes of every row and writes the statistics.
    fn write(&self, out: &Ref) {
        let all = [self.spec.time_block, LANES];
        let lanes = self.max.load_all();
        let max = lanes.reduce(Reducer::Max, 1).broadcast(&all);
        let (sum, dot) = self.rescaled(&max, &lanes, &self.sum.load_all(), &self.dot.load_all());
        let total = |value: &Value| value.reduce(Reducer::Add, 1).broadcast(&all);
        let dot = total(&dot) * max.like(std::f64::consts::LN_2);
        // One statistic per lane, so that one transpose moves all of them.
        let lane = self.k.iota(1, &all);
        let packed = [total(&sum), dot, total(&self.picked.load_all())]
            .iter()
            .zip(1..)
            .fold(max, |packed, (value, i)| lane.eq(&lane.like(i)).select(value, &packed));
        let along_lanes = packed.transpose().slice(&[0, 0], &[STATISTICS, self.spec.time_block]);
        out.store_all(&along_lanes.reshape(&[1, STATISTICS, self.spec.time_block]));
    }
}
