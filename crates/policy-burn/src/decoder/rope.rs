//! Rotary position embedding (arXiv 2104.09864), in the half-split arrangement of Llama and Qwen2.

use burn::tensor::{Device, Tensor, TensorData};
use std::sync::Arc;

/// The cosines and sines of every position, made once on the host.
///
/// A head's first half and second half form pairs (x1, x2), each turned by position x theta^(-2i/D). Dot products of
/// turned queries and keys depend on the difference of their positions only.
#[derive(Clone, Debug)]
pub struct RopeTable {
    /// The cosines `[positions, D]`: cos, cos.
    cos: Arc<Vec<f32>>,
    /// The sines `[positions, D]`: -sin, sin; the sign that the swapped halves need.
    sin: Arc<Vec<f32>>,
    head_dim: usize,
}

/// Rows of the table for one call, `[B, T, 1, D]` each, so that they broadcast over heads.
#[derive(Clone, Debug)]
pub(crate) struct Rotation {
    cos: Tensor<4>,
    sin: Tensor<4>,
}

impl RopeTable {
    /// The table for positions `0..max_positions` and an even `head_dim`.
    pub fn new(head_dim: usize, max_positions: usize, theta: f64) -> Self {
        let half = head_dim / 2;
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for position in 0..max_positions {
            let angle = |i: usize| position as f64 * theta.powf(-2.0 * i as f64 / head_dim as f64);
            cos.extend((0..2 * half).map(|i| angle(i % half).cos() as f32));
            sin.extend((0..2 * half).map(|i| {
                let sine = angle(i % half).sin() as f32;
                if i < half { -sine } else { sine }
            }));
        }
        Self { cos: Arc::new(cos), sin: Arc::new(sin), head_dim }
    }

    /// The number of positions.
    pub fn len(&self) -> usize {
        self.cos.len() / self.head_dim
    }

    /// Whether the table has no positions.
    pub fn is_empty(&self) -> bool {
        self.cos.is_empty()
    }

    /// Rows for `positions: [B * T]`, all of them below [`RopeTable::len`].
    pub(crate) fn rotation(&self, positions: &[usize], [b, t]: [usize; 2], device: &Device) -> Rotation {
        let rows = |table: &[f32]| {
            let mut data = Vec::with_capacity(positions.len() * self.head_dim);
            for &position in positions {
                data.extend_from_slice(&table[position * self.head_dim..(position + 1) * self.head_dim]);
            }
            Tensor::from_data(TensorData::new(data, [b, t, 1, self.head_dim]), device)
        };
        Rotation { cos: rows(&self.cos), sin: rows(&self.sin) }
    }
}

impl Rotation {
    /// Rotates every head of `x: [B, T, heads, D]`.
    pub(crate) fn apply(&self, x: Tensor<4>) -> Tensor<4> {
        let half = x.dims()[3] / 2;
        let first = x.clone().narrow(3, 0, half);
        let second = x.clone().narrow(3, half, half);
        x * self.cos.clone() + Tensor::cat(vec![second, first], 3) * self.sin.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::params::{normal, to_host};

    fn dot(q_position: usize, k_position: usize) -> f32 {
        let device = Device::flex();
        let table = RopeTable::new(8, 64, 100.0);
        let vector = |name: &str, position: usize| {
            let x = Tensor::<2>::from_data(normal([1, 8], 1.0, 5, name), &device).reshape([1, 1, 1, 8]);
            to_host(table.rotation(&[position], [1, 1], &device).apply(x))
        };
        vector("q", q_position).iter().zip(vector("k", k_position)).map(|(a, b)| a * b).sum()
    }

    #[test]
    fn products_depend_on_relative_position_only() {
        assert!((dot(3, 1) - dot(40, 38)).abs() < 1e-5);
        assert!((dot(9, 9) - dot(0, 0)).abs() < 1e-5);
        assert!((dot(3, 1) - dot(1, 3)).abs() > 1e-2, "direction matters");
        assert!((dot(3, 1) - dot(4, 1)).abs() > 1e-2, "distance matters");
    }

    #[test]
    fn position_zero_does_not_turn_and_turning_keeps_length() {
        let device = Device::flex();
        let table = RopeTable::new(8, 64, 100.0);
        let x = Tensor::<2>::from_data(normal([1, 8], 1.0, 5, "x"), &device).reshape([1, 1, 1, 8]);
        let turned = |position| to_host(table.rotation(&[position], [1, 1], &device).apply(x.clone()));
        assert_eq!(turned(0), to_host(x.clone()));
        let norm = |v: Vec<f32>| v.iter().map(|x| x * x).sum::<f32>();
        assert!((norm(turned(17)) - norm(turned(0))).abs() < 1e-5);
    }
}
