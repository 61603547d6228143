//! Rotary position embedding (arXiv 2104.09864), with the half-split pairs of Llama and Qwen.

use super::attention::Heads;
use super::{Layers, ROWS, fits};
use crate::arch::{MulAdd, simd_dispatch};
use crate::threads::slices::*;
use grpo_core::error::{Error, Result};
use std::sync::Arc;

/// The precomputed cosines and sines of every position.
///
/// The first and second half of the rotated columns form pairs (x1, x2), each rotated by the angle position x
/// theta^(-2i/D). Dot
/// products of rotated queries and keys depend on the difference of their positions only.
///
/// ```
/// let table = grpo_backend_cpu::layers::RopeTable::new(64, 128, 10_000.0);
/// assert_eq!(table.len(), 128);
/// ```
#[derive(Clone, Debug)]
pub struct RopeTable {
    /// Cosines, then sines `[positions, 2, half]`.
    values: Arc<[f32]>,
    /// The number of rotated pairs of a head.
    half: usize,
    /// The factor of queries at each position; an empty list is 1.
    queries: Arc<[f32]>,
}

impl RopeTable {
    /// Makes the table for an even `head_dim` and the positions `0..max_positions`.
    pub fn new(head_dim: usize, max_positions: usize, theta: f64) -> Self {
        let frequencies: Vec<f64> = (0..head_dim / 2).map(|i| theta.powf(-2.0 * i as f64 / head_dim as f64)).collect();
        Self::of_frequencies(&frequencies, max_positions)
    }

    /// Makes the table for the positions `0..max_positions`: pair i of the first 2 x `frequencies.len()` columns of a
    /// head is rotated by position x `frequencies[i]` radians, and further columns are not rotated. Models with an
    /// extended context use scaled frequencies.
    ///
    /// ```
    /// use grpo_backend_cpu::layers::RopeTable;
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
        Self { values, half, queries: Arc::default() }
    }

    /// Multiplies cosines and sines by `factor`, as YaRN does (arXiv 2309.00071).
    #[must_use]
    pub fn scaled(self, factor: f64) -> Self {
        if factor == 1.0 {
            return self;
        }
        Self { values: self.values.iter().map(|x| (f64::from(*x) * factor) as f32).collect(), ..self }
    }

    /// Multiplies the rotated queries of every position by a factor.
    #[must_use]
    pub fn with_query_factors(self, factor: impl Fn(usize) -> f64) -> Self {
        Self { queries: (0..self.len()).map(|position| factor(position) as f32).collect(), ..self }
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
        if 2 * table.half > heads.width || table.half == 0 {
            let expected = format!("at least {}, of at least one pair", 2 * table.half);
            return Err(Error::shape("rotate", "head width", expected, heads.width));
        }
        if let Some(position) = positions.iter().find(|position| **position >= table.len()) {
            return Err(Error::shape("rotate", "positions", format!("below {}", table.len()), position));
        }
        let turned = (heads.query + heads.key_value) * heads.width;
        let block = ROWS * heads.row().max(1);
        qkv.par_chunks_mut(block).zip(positions.par_chunks(ROWS)).for_each(|(rows, positions)| {
            for (row, position) in rows.chunks_exact_mut(heads.row()).zip(positions) {
                let (cos, sin) = table.row(*position);
                turn_heads(self.gemm.isa(), &mut row[..turned], heads.width, cos, sin, sign);
                if let Some(factor) = table.queries.get(*position) {
                    row[..heads.query * heads.width].iter_mut().for_each(|x| *x *= factor);
                }
            }
        });
        Ok(())
    }
}

simd_dispatch! {
    fn turn_heads(row: &mut [f32], width: usize, cos: &[f32], sin: &[f32], sign: f32) = turn_heads_body
}

#[inline(always)]
fn turn_heads_body<M: MulAdd>(row: &mut [f32], width: usize, cos: &[f32], sin: &[f32], sign: f32) {
    for head in row.chunks_exact_mut(width) {
        let (first, second) = head[..2 * cos.len()].split_at_mut(cos.len());
        for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(cos.iter().zip(sin)) {
            let (x, y, sin) = (*a, *b, sin * sign);
            *a = x * cos - y * sin;
            *b = y * cos + x * sin;
        }
    }
}
