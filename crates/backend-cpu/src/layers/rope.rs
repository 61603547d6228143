//! Rotary position embedding (arXiv 2104.09864), with the half-split pairs of Llama and Qwen.

use super::attention::Heads;
use super::{Layers, ROWS, fits};
use crate::arch::{MulAdd, simd_dispatch};
use crate::threads::slices::*;
use grpo_core::error::{Error, Result};
use std::sync::Arc;

/// The precomputed cosines and sines of every position.
///
/// The first and second half of a head form pairs (x1, x2), each rotated by the angle position x theta^(-2i/D). Dot
/// products of rotated queries and keys depend on the difference of their positions only.
///
/// ```
/// let table = backend_cpu::layers::RopeTable::new(64, 128, 10_000.0);
/// assert_eq!(table.len(), 128);
/// ```
#[derive(Clone, Debug)]
pub struct RopeTable {
    /// Cosines, then sines `[positions, 2, D / 2]`.
    values: Arc<[f32]>,
    half: usize,
}

impl RopeTable {
    /// Makes the table for an even `head_dim` and the positions `0..max_positions`.
    pub fn new(head_dim: usize, max_positions: usize, theta: f64) -> Self {
        let frequencies: Vec<f64> = (0..head_dim / 2).map(|i| theta.powf(-2.0 * i as f64 / head_dim as f64)).collect();
        Self::of_frequencies(&frequencies, max_positions)
    }

    /// Makes the table of a head of width 2 x `frequencies.len()` for the positions `0..max_positions`: pair i is
    /// rotated by position x `frequencies[i]` radians. Models with an extended context use scaled frequencies.
    ///
    /// ```
    /// use backend_cpu::layers::RopeTable;
    ///
    /// let table = RopeTable::of_frequencies(&[1.0, 0.01], 128);
    /// assert_eq!(table.len(), 128);
    /// ```
    pub fn of_frequencies(frequencies: &[f64], max_positions: usize) -> Self {
        let half = frequencies.len();
        let angles = |position: usize| frequencies.iter().map(move |frequency| position as f64 * frequency);
        let values = (0..max_positions)
            .flat_map(|position| angles(position).map(f64::cos).chain(angles(position).map(f64::sin)))
            .map(|x| x as f32)
            .collect();
        Self { values, half }
    }

    /// Returns the number of positions.
    pub fn len(&self) -> usize {
        self.values.len() / (2 * self.half).max(1)
    }

    /// Returns `true` if the table has no positions.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    fn row(&self, position: usize) -> (&[f32], &[f32]) {
        self.values[2 * self.half * position..2 * self.half * (position + 1)].split_at(self.half)
    }
}

impl Layers {
    /// Rotates the query and key heads of `qkv: [N, (A + 2K) D]` in place, row i by `positions[i]`.
    ///
    /// # Errors
    /// [`Error::Shape`] if the rows, the positions or the table do not match the heads.
    pub fn rotate(&self, qkv: &mut [f32], heads: Heads, table: &RopeTable, positions: &[usize]) -> Result<()> {
        self.turn(qkv, heads, table, positions, 1.0)
    }

    /// Computes dL/dx of [`Layers::rotate`] from dL/dy, in place: the inverse rotation.
    ///
    /// # Errors
    /// As [`Layers::rotate`].
    pub fn rotate_grad(&self, dqkv: &mut [f32], heads: Heads, table: &RopeTable, positions: &[usize]) -> Result<()> {
        self.turn(dqkv, heads, table, positions, -1.0)
    }

    fn turn(&self, qkv: &mut [f32], heads: Heads, table: &RopeTable, positions: &[usize], sign: f32) -> Result<()> {
        fits("rotate", "qkv", qkv.len(), &[positions.len(), heads.row()])?;
        if 2 * table.half != heads.width {
            return Err(Error::shape("rotate", "head width", 2 * table.half, heads.width));
        }
        if let Some(position) = positions.iter().find(|position| **position >= table.len()) {
            return Err(Error::shape("rotate", "positions", format!("below {}", table.len()), position));
        }
        let turned = (heads.query + heads.key_value) * heads.width;
        let block = ROWS * heads.row().max(1);
        qkv.par_chunks_mut(block).zip(positions.par_chunks(ROWS)).for_each(|(rows, positions)| {
            for (row, position) in rows.chunks_exact_mut(heads.row()).zip(positions) {
                let (cos, sin) = table.row(*position);
                turn_heads(self.gemm.isa(), &mut row[..turned], cos, sin, sign);
            }
        });
        Ok(())
    }
}

simd_dispatch! { fn turn_heads(row: &mut [f32], cos: &[f32], sin: &[f32], sign: f32) = turn_heads_body }

#[inline(always)]
fn turn_heads_body<M: MulAdd>(row: &mut [f32], cos: &[f32], sin: &[f32], sign: f32) {
    for head in row.chunks_exact_mut(2 * cos.len()) {
        let (first, second) = head.split_at_mut(cos.len());
        for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(cos.iter().zip(sin)) {
            let (x, y, sin) = (*a, *b, sin * sign);
            *a = x * cos - y * sin;
            *b = y * cos + x * sin;
        }
    }
}
