//! LoRA on the matrices of experts, in dense products. The gate and the up projection of an expert share one A.
//!
//! Legend: B rows, T tokens of a row, E experts, r rank, I and O columns and rows of a matrix.

use super::super::{Axis, Decoder, Matrix, ParameterValues, Role};
use grpo_stablehlo::{DotDimensions, Dtype, Value};
use std::ops::Range;

impl Decoder {
    /// Returns `s x A^T` `[B, T, E, r]` in f32 of all experts for `x` `[B, T, I]`, if the matrix has adapters.
    pub(super) fn low_of_all(&self, layer: &ParameterValues, x: &Value, matrix: Matrix) -> Option<Value> {
        let [a, _] = layer.adapter(matrix)?;
        Some(self.scaled_low(&self.of_adapter(x, a, DotDimensions::contract(2, 2))))
    }

    /// Returns `s x A^T` `[E, B, T, r]` in f32 for `x` `[B, T, E, I]`, the inputs of each expert, if the matrix has adapters.
    pub(super) fn low_of_each(&self, layer: &ParameterValues, x: &Value, matrix: Matrix) -> Option<Value> {
        let [a, _] = layer.adapter(matrix)?;
        let dimensions = DotDimensions { batch: (vec![2], vec![0]), contract: (vec![3], vec![2]) };
        Some(self.scaled_low(&self.of_adapter(x, a, dimensions)))
    }

    /// Returns `low B^T` `[B, T, E, O]` in f32 for `low` `[B, T, E, r]` and these rows of B.
    pub(super) fn high_of_all(
        &self,
        layer: &ParameterValues,
        low: &Value,
        matrix: Matrix,
        rows: Range<usize>,
    ) -> Value {
        let b = rows_of(&layer[Role::LoraB(matrix)], 0, rows);
        let dimensions = DotDimensions { batch: (vec![2], vec![2]), contract: (vec![3], vec![1]) };
        let high = self.of_adapter(low, &b, dimensions).transpose(&[1, 2, 0, 3]);
        self.axis_rules().constrain(&high, &[Some(Axis::Batch), None, Some(Axis::Experts), Some(Axis::Mlp)])
    }

    /// Returns the sum over experts of `low B^T`, `[B, T, O]` in f32, for `low` `[E, B, T, r]`.
    pub(super) fn sum_of_high(&self, layer: &ParameterValues, low: &Value, matrix: Matrix) -> Value {
        let dimensions = DotDimensions { batch: (vec![], vec![]), contract: (vec![0, 3], vec![2, 1]) };
        self.of_adapter(low, &layer[Role::LoraB(matrix)], dimensions)
    }

    /// Multiplies the product of inputs and A by s.
    pub(super) fn scaled_low(&self, low: &Value) -> Value {
        low * low.like(self.scaling())
    }

    fn of_adapter(&self, x: &Value, weight: &Value, dimensions: DotDimensions) -> Value {
        let [x, weight] = [x, weight].map(|operand| operand.convert(self.compute().dtype()));
        x.dot_general(&weight, dimensions, Dtype::F32, self.compute().precision())
    }
}

/// Returns these rows of B, whose rows are along `dimension`.
pub(super) fn rows_of(b: &Value, dimension: usize, rows: Range<usize>) -> Value {
    if rows == (0..b.shape()[dimension]) {
        return b.clone();
    }
    let (mut start, mut limit) = (vec![0; b.shape().len()], b.shape().to_vec());
    (start[dimension], limit[dimension]) = (rows.start, rows.end);
    b.slice(&start, &limit)
}
