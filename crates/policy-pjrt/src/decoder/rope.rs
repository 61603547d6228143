//! Rotary position embeddings (arXiv 2104.09864).
//!
//! Legend: B rows, T tokens of a row, D head dimension.

use super::Decoder;
use stablehlo::{Dtype, TensorType, Unary, Value};

/// Cosines and sines of the rotation angles of tokens, one angle per pair of columns of a head.
#[derive(Clone, Debug)]
pub struct Rotary {
    /// `[B, D / 2, T]`, f32.
    pub(crate) cos: Value,
    pub(crate) sin: Value,
}

impl Decoder {
    /// Computes the rotations of tokens at `positions` `[B, T]`, i32.
    pub fn rotary(&self, positions: &Value) -> Rotary {
        let frequencies = self.config.rope_frequencies();
        let builder = positions.builder();
        let shape = [positions.shape()[0], frequencies.len(), positions.shape()[1]];
        let table = builder.dense(frequencies.iter().copied(), TensorType::new(Dtype::F32, [frequencies.len()]));
        let positions = positions.convert(Dtype::F32).broadcast_in_dim(&shape, &[0, 2]);
        let angles = positions * table.broadcast_in_dim(&shape, &[1]);
        Rotary { cos: angles.unary(Unary::Cosine), sin: angles.unary(Unary::Sine) }
    }
}

impl Rotary {
    /// Wraps cosines and sines `[B, D / 2, T]`, f32.
    pub(crate) fn new(cos: &Value, sin: &Value) -> Self {
        Self { cos: cos.clone(), sin: sin.clone() }
    }

    /// Rotates every head of `x` `[B, ..., D, T]`, f32: column i with column D / 2 + i, as `rotate_half` of transformers does. The halves are
    /// rounded to dtype `result` before they are joined, so that the derivative cuts cotangents before it widens them: libtpu would write wide
    /// cotangents of whole heads.
    pub(crate) fn turn(&self, x: &Value, result: Dtype) -> Value {
        let (tokens, columns) = (x.shape().len() - 1, x.shape().len() - 2);
        let width = x.shape()[columns];
        let half = |from: usize| {
            let (mut start, mut limit) = (vec![0; tokens + 1], x.shape().to_vec());
            (start[columns], limit[columns]) = (from, from + width / 2);
            x.slice(&start, &limit)
        };
        let (left, right) = (half(0), half(width / 2));
        let wide = |table: &Value| table.broadcast_in_dim(left.shape(), &[0, columns, tokens]);
        let (cos, sin) = (wide(&self.cos), wide(&self.sin));
        let turned = [&left * &cos - &right * &sin, &right * &cos + &left * &sin];
        x.builder().concatenate(&turned.map(|half| half.convert(result)).each_ref(), columns)
    }
}
