//! Gated activations: y = f(gate) * up (arXiv 2002.05202).
//!
//! With f = silu, silu(z) = z sigmoid(z), this is SwiGLU. With the tanh approximation of GELU it is GeGLU, and as
//! 0.5 (1 + tanh(u)) = sigmoid(2u), GELU is z sigmoid(2u) with u = sqrt(2/pi) (z + 0.044715 z^3).

use super::linear::with_length;
use super::{Layers, ROWS, fits};
use crate::arch::{MulAdd, simd_dispatch};
use crate::softmax::exp;
use crate::threads::{count, slices::*};
use grpo_core::error::Result;

/// The least width for which less than [`ROWS`] rows are a task.
const WIDE: usize = 2048;

/// The activation f of a gate.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Activation {
    /// z sigmoid(z).
    #[default]
    Silu,
    /// The tanh approximation of GELU (arXiv 1606.08415).
    GeluTanh,
    /// gpt-oss's: y = (u + 1) g sigmoid(alpha g), with g = min(gate, limit) and u = clamp(up, -limit, limit). The entries of gate and up
    /// alternate in a row.
    Clamped {
        /// The factor of the gate in its sigmoid.
        alpha: f32,
        /// The limit of gate and up.
        limit: f32,
    },
}

impl Layers {
    /// Computes y `[N, I]` of rows `[N, 2 I]`, each gate then up, or both alternating if the activation is clamped.
    ///
    /// # Errors
    /// [`grpo_core::Error::Shape`] if `gate_up` is not a whole number of rows.
    pub fn gated(&self, gate_up: &[f32], activation: Activation, width: usize) -> Result<Vec<f32>> {
        self.gated_in(Vec::new(), gate_up, activation, width)
    }

    /// Like [`Layers::gated`], but y `[N, I]` is written into `memory` if its capacity suffices; see [`Layers::linear_packed_in`].
    ///
    /// # Errors
    /// As [`Layers::gated`].
    pub fn gated_in(
        &self,
        memory: Vec<f32>,
        gate_up: &[f32],
        activation: Activation,
        width: usize,
    ) -> Result<Vec<f32>> {
        let n = gate_up.len() / (2 * width).max(1);
        fits("gated", "gate_up", gate_up.len(), &[n, 2, width])?;
        let mut y = with_length(memory, n * width);
        // Few rows, as in sampling, are divided among the threads if they are long.
        let rows = if width >= WIDE { ROWS.min(n.div_ceil(count())).max(1) } else { ROWS };
        let block = rows * width.max(1);
        y.par_chunks_mut(block).zip(gate_up.par_chunks(2 * block)).for_each(|(y, gate_up)| match activation {
            Activation::Silu => silu(self.gemm.isa(), gate_up, width, y),
            Activation::GeluTanh => gelu_tanh(self.gemm.isa(), gate_up, width, y),
            Activation::Clamped { alpha, limit } => clamped(self.gemm.isa(), gate_up, alpha, limit, y),
        });
        Ok(y)
    }

    /// Computes dL/d(gate, up) `[N, 2 I]` from the forward pass's input and dy `[N, I]`.
    ///
    /// # Errors
    /// As [`Layers::gated`].
    pub fn gated_grad(&self, gate_up: &[f32], dy: &[f32], activation: Activation, width: usize) -> Result<Vec<f32>> {
        let n = dy.len() / width.max(1);
        fits("gated_grad", "dy", dy.len(), &[n, width])?;
        fits("gated_grad", "gate_up", gate_up.len(), &[n, 2, width])?;
        let mut out = vec![0.0; gate_up.len()];
        let block = ROWS * width.max(1);
        let inputs = gate_up.par_chunks(2 * block).zip(dy.par_chunks(block));
        out.par_chunks_mut(2 * block).zip(inputs).for_each(|(out, (gate_up, dy))| match activation {
            Activation::Silu => silu_grad(self.gemm.isa(), gate_up, dy, width, out),
            Activation::GeluTanh => gelu_tanh_grad(self.gemm.isa(), gate_up, dy, width, out),
            Activation::Clamped { alpha, limit } => clamped_grad(self.gemm.isa(), gate_up, dy, alpha, limit, out),
        });
        Ok(out)
    }
}

/// Computes 1 / (1 + e^-z) with an exponential of a non-positive argument.
#[inline(always)]
pub(super) fn sigmoid<M: MulAdd>(z: f32) -> f32 {
    let e = exp::<M>(-z.abs()).1;
    let small = e / (1.0 + e);
    if z < 0.0 { small } else { 1.0 - small }
}

simd_dispatch! { fn silu(gate_up: &[f32], width: usize, y: &mut [f32]) = silu_body }

#[inline(always)]
fn silu_body<M: MulAdd>(gate_up: &[f32], width: usize, y: &mut [f32]) {
    for (row, y) in gate_up.chunks_exact(2 * width).zip(y.chunks_exact_mut(width)) {
        let (gate, up) = row.split_at(width);
        for ((y, z), up) in y.iter_mut().zip(gate).zip(up) {
            *y = z * sigmoid::<M>(*z) * up;
        }
    }
}

simd_dispatch! { fn silu_grad(gate_up: &[f32], dy: &[f32], width: usize, out: &mut [f32]) = silu_grad_body }

/// Uses silu'(z) = s (1 + z (1 - s)) with s = sigmoid(z).
#[inline(always)]
fn silu_grad_body<M: MulAdd>(gate_up: &[f32], dy: &[f32], width: usize, out: &mut [f32]) {
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

/// 2 sqrt(2/pi).
const TWICE_ROOT: f32 = 1.595_769_2;
/// The coefficient of the cube.
const CUBE: f32 = 0.044_715;

simd_dispatch! { fn gelu_tanh(gate_up: &[f32], width: usize, y: &mut [f32]) = gelu_tanh_body }

#[inline(always)]
fn gelu_tanh_body<M: MulAdd>(gate_up: &[f32], width: usize, y: &mut [f32]) {
    for (row, y) in gate_up.chunks_exact(2 * width).zip(y.chunks_exact_mut(width)) {
        let (gate, up) = row.split_at(width);
        for ((y, z), up) in y.iter_mut().zip(gate).zip(up) {
            let twice_u = TWICE_ROOT * z * M::mul_add(CUBE * z, *z, 1.0);
            *y = z * sigmoid::<M>(twice_u) * up;
        }
    }
}

simd_dispatch! { fn gelu_tanh_grad(gate_up: &[f32], dy: &[f32], width: usize, out: &mut [f32]) = gelu_tanh_grad_body }

/// Uses gelu'(z) = s (1 + z (1 - s) 2u') with s = sigmoid(2u).
#[inline(always)]
fn gelu_tanh_grad_body<M: MulAdd>(gate_up: &[f32], dy: &[f32], width: usize, out: &mut [f32]) {
    let rows = gate_up.chunks_exact(2 * width).zip(dy.chunks_exact(width)).zip(out.chunks_exact_mut(2 * width));
    for ((row, dy), out) in rows {
        let ((gate, up), (dgate, dup)) = (row.split_at(width), out.split_at_mut(width));
        for (((dgate, dup), (z, up)), dy) in dgate.iter_mut().zip(dup).zip(gate.iter().zip(up)).zip(dy) {
            let square = z * z;
            let s = sigmoid::<M>(TWICE_ROOT * z * M::mul_add(CUBE, square, 1.0));
            let slope = TWICE_ROOT * M::mul_add(3.0 * CUBE, square, 1.0);
            *dup = dy * z * s;
            *dgate = dy * up * s * M::mul_add(z * (1.0 - s), slope, 1.0);
        }
    }
}

simd_dispatch! { fn clamped(gate_up: &[f32], alpha: f32, limit: f32, y: &mut [f32]) = clamped_body }

#[inline(always)]
fn clamped_body<M: MulAdd>(gate_up: &[f32], alpha: f32, limit: f32, y: &mut [f32]) {
    for ([gate, up], y) in gate_up.as_chunks().0.iter().zip(y) {
        let (g, u) = (at_most(*gate, limit), at_least(at_most(*up, limit), -limit));
        *y = (u + 1.0) * g * sigmoid::<M>(alpha * g);
    }
}

simd_dispatch! {
    fn clamped_grad(gate_up: &[f32], dy: &[f32], alpha: f32, limit: f32, out: &mut [f32]) = clamped_grad_body
}

/// Inputs beyond the limits have no gradient.
#[inline(always)]
fn clamped_grad_body<M: MulAdd>(gate_up: &[f32], dy: &[f32], alpha: f32, limit: f32, out: &mut [f32]) {
    for (([gate, up], [dgate, dup]), dy) in gate_up.as_chunks().0.iter().zip(out.as_chunks_mut().0).zip(dy) {
        let (g, u) = (at_most(*gate, limit), at_least(at_most(*up, limit), -limit));
        let s = sigmoid::<M>(alpha * g);
        *dup = if up.abs() > limit { 0.0 } else { dy * g * s };
        *dgate = if *gate > limit { 0.0 } else { dy * (u + 1.0) * s * M::mul_add(alpha * g, 1.0 - s, 1.0) };
    }
}

/// Returns min(x, limit), and NaN for NaN.
#[inline(always)]
fn at_most(x: f32, limit: f32) -> f32 {
    if x > limit { limit } else { x }
}

/// Returns max(x, limit), and NaN for NaN.
#[inline(always)]
fn at_least(x: f32, limit: f32) -> f32 {
    if x < limit { limit } else { x }
}
