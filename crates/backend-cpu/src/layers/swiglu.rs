//! SwiGLU: y = silu(gate) * up with silu(z) = z sigmoid(z) (arXiv 2002.05202).

use super::{Layers, ROWS, fits};
use crate::arch::{MulAdd, simd_dispatch};
use crate::softmax::exp;
use crate::threads::slices::*;
use grpo_core::error::Result;

impl Layers {
    /// Computes y `[N, I]` of rows `[N, 2 I]`, each gate then up.
    ///
    /// # Errors
    /// [`grpo_core::Error::Shape`] if `gate_up` is not a whole number of rows.
    pub fn swiglu(&self, gate_up: &[f32], width: usize) -> Result<Vec<f32>> {
        let n = gate_up.len() / (2 * width).max(1);
        fits("swiglu", "gate_up", gate_up.len(), &[n, 2, width])?;
        let mut y = vec![0.0; n * width];
        let block = ROWS * width.max(1);
        y.par_chunks_mut(block).zip(gate_up.par_chunks(2 * block)).for_each(|(y, gate_up)| {
            forward(self.gemm.isa(), gate_up, width, y);
        });
        Ok(y)
    }

    /// Computes dL/d(gate, up) `[N, 2 I]` from the forward pass's input and dy `[N, I]`.
    ///
    /// # Errors
    /// As [`Layers::swiglu`].
    pub fn swiglu_grad(&self, gate_up: &[f32], dy: &[f32], width: usize) -> Result<Vec<f32>> {
        let n = dy.len() / width.max(1);
        fits("swiglu_grad", "dy", dy.len(), &[n, width])?;
        fits("swiglu_grad", "gate_up", gate_up.len(), &[n, 2, width])?;
        let mut out = vec![0.0; gate_up.len()];
        let block = ROWS * width.max(1);
        let inputs = gate_up.par_chunks(2 * block).zip(dy.par_chunks(block));
        out.par_chunks_mut(2 * block).zip(inputs).for_each(|(out, (gate_up, dy))| {
            backward(self.gemm.isa(), gate_up, dy, width, out);
        });
        Ok(out)
    }
}

/// Computes 1 / (1 + e^-z) with an exponential of a non-positive argument.
#[inline(always)]
fn sigmoid<M: MulAdd>(z: f32) -> f32 {
    let e = exp::<M>(-z.abs()).1;
    let small = e / (1.0 + e);
    if z < 0.0 { small } else { 1.0 - small }
}

simd_dispatch! { fn forward(gate_up: &[f32], width: usize, y: &mut [f32]) = forward_body }

#[inline(always)]
fn forward_body<M: MulAdd>(gate_up: &[f32], width: usize, y: &mut [f32]) {
    for (row, y) in gate_up.chunks_exact(2 * width).zip(y.chunks_exact_mut(width)) {
        let (gate, up) = row.split_at(width);
        for ((y, z), up) in y.iter_mut().zip(gate).zip(up) {
            *y = z * sigmoid::<M>(*z) * up;
        }
    }
}

simd_dispatch! { fn backward(gate_up: &[f32], dy: &[f32], width: usize, out: &mut [f32]) = backward_body }

/// Uses silu'(z) = s (1 + z (1 - s)) with s = sigmoid(z).
#[inline(always)]
fn backward_body<M: MulAdd>(gate_up: &[f32], dy: &[f32], width: usize, out: &mut [f32]) {
    let rows = gate_up.chunks_exact(2 * width).zip(dy.chunks_exact(width)).zip(out.chunks_exact_mut(2 * width));
    for ((row, dy), out) in rows {
        let ((gate, up), (dgate, dup)) = (row.split_at(width), out.split_at_mut(width));
        for (((dgate, dup), (z, up)), dy) in dgate.iter_mut().zip(dup).zip(gate.iter().zip(up)).zip(dy) {
            let s = sigmoid::<M>(*z);
            *dup = dy * z * s;
            *dgate = dy * up * s * M::mul_add(*z, 1.0 - s, 1.0);
        }
    }
}
