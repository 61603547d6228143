//! The matrices, biases and adapters of experts.
//!
//! Legend: E experts, r rank of an adapter.

use crate::layers::{Add, Layers, PackedWeight, StoredWeight, fits};
use grpo_core::error::{Error, Result};

/// The same matrix of all experts, such as gate and up, in one of three forms.
#[derive(Debug)]
pub struct ExpertWeights<'a> {
    /// The matrix of each expert.
    pub matrices: Vec<ExpertMatrix<'a>>,
    /// Biases `[E, out]`.
    pub biases: Option<&'a [f32]>,
    /// LoRA adapters of the matrices.
    pub adapter: Option<ExpertAdapter<'a>>,
    /// `[in, out]`.
    pub dims: [usize; 2],
}

/// The matrix of an expert.
#[derive(Debug)]
pub enum ExpertMatrix<'a> {
    /// `[in, out]`.
    Plain(&'a [f32]),
    /// In the layout of model files.
    Stored(StoredWeight<'a>),
    /// Packed for products.
    Packed(&'a PackedWeight),
}

impl ExpertWeights<'_> {
    pub(super) fn product(&self, layers: &Layers, expert: usize, x: &[f32], n: usize) -> Result<Vec<f32>> {
        let [input, output] = self.dims;
        let bias = self.bias(expert);
        let add = bias.map_or(Add::Nothing, Add::Rows);
        let mut y = match &self.matrices[expert] {
            ExpertMatrix::Plain(weight) => layers.linear(x, weight, add, [n, input, output]),
            ExpertMatrix::Stored(weight) => layers.linear_stored(x, weight, add, n),
            ExpertMatrix::Packed(weight) => layers.linear_packed(x, weight, add, n),
        }?;
        if let Some(adapter) = &self.adapter {
            adapter.add_to(&mut y, expert, x, self.dims)?;
        }
        Ok(y)
    }

    pub(super) fn dx(&self, layers: &Layers, expert: usize, dy: &[f32], n: usize) -> Result<Vec<f32>> {
        let [input, output] = self.dims;
        let mut dx = match &self.matrices[expert] {
            ExpertMatrix::Plain(weight) => layers.linear_dx(weight, dy, [n, input, output]),
            ExpertMatrix::Stored(weight) => layers.linear_stored_dx(weight, dy, n),
            ExpertMatrix::Packed(_) => Err(Error::shape("experts_grad", "weights", "plain or stored", "packed")),
        }?;
        if let Some(adapter) = &self.adapter {
            adapter.add_dx_to(&mut dx, expert, dy, self.dims)?;
        }
        Ok(dx)
    }

    pub(super) fn bias(&self, expert: usize) -> Option<&[f32]> {
        self.biases.map(|biases| &biases[expert * self.dims[1]..(expert + 1) * self.dims[1]])
    }

    fn has_dims(&self, found: [usize; 2]) -> Result<()> {
        let expected = format!("{:?}", self.dims);
        if found == self.dims {
            Ok(())
        } else {
            Err(Error::shape("experts", "weights", expected, format!("{found:?}")))
        }
    }

    pub(super) fn check(&self, experts: usize) -> Result<()> {
        if self.matrices.len() != experts {
            let found = format!("{} matrices", self.matrices.len());
            return Err(Error::shape("experts", "weights", format!("{experts} matrices"), found));
        }
        for matrix in &self.matrices {
            match matrix {
                ExpertMatrix::Plain(weight) => fits("experts", "weights", weight.len(), &self.dims)?,
                ExpertMatrix::Stored(weight) => self.has_dims(weight.dims())?,
                ExpertMatrix::Packed(weight) => self.has_dims(weight.dims())?,
            }
        }
        if let Some(ExpertAdapter { a, b, rank, .. }) = self.adapter {
            fits("experts", "A of adapters", a.len(), &[experts, rank, self.dims[0]])?;
            fits("experts", "B of adapters", b.len(), &[experts, self.dims[1], rank])?;
        }
        match self.biases {
            Some(biases) => fits("experts", "biases", biases.len(), &[experts, self.dims[1]]),
            None => Ok(()),
        }
    }
}

/// LoRA adapters of the same matrix of all experts: an expert adds `scale` x A^T B^T to its output, in f32.
#[derive(Clone, Copy, Debug)]
pub struct ExpertAdapter<'a> {
    /// A `[E, r, in]`.
    pub a: &'a [f32],
    /// B `[E, out, r]`.
    pub b: &'a [f32],
    /// r, the rank of an expert's adapter.
    pub rank: usize,
    /// The scaling of B A.
    pub scale: f32,
}

/// The gradients of an [`ExpertAdapter`]; empty without an adapter.
#[derive(Clone, Debug, Default)]
pub struct ExpertAdapterGrad {
    /// dL/dA `[E, r, in]`.
    pub da: Vec<f32>,
    /// dL/dB `[E, out, r]`.
    pub db: Vec<f32>,
}

impl<'a> ExpertAdapter<'a> {
    /// Returns A `[r, in]` and B `[out, r]` of an expert.
    fn of(&self, expert: usize, [input, output]: [usize; 2]) -> [&'a [f32]; 2] {
        let (a, b) = (self.rank * input, output * self.rank);
        [&self.a[expert * a..(expert + 1) * a], &self.b[expert * b..(expert + 1) * b]]
    }

    /// Adds `scale` x A^T B^T to y `[n, out]`.
    fn add_to(&self, y: &mut [f32], expert: usize, x: &[f32], dims: [usize; 2]) -> Result<()> {
        let ([a, b], layers, [input, output]) = (self.of(expert, dims), Layers::new(), dims);
        let n = x.len() / input;
        let inner = layers.linear_dx(a, x, [n, self.rank, input])?;
        let outer = layers.linear_dx(b, &inner, [n, output, self.rank])?;
        y.iter_mut().zip(outer).for_each(|(y, added)| *y += self.scale * added);
        Ok(())
    }

    /// Adds `scale` dy B A to dx `[n, in]`.
    fn add_dx_to(&self, dx: &mut [f32], expert: usize, dy: &[f32], dims: [usize; 2]) -> Result<()> {
        let ([a, b], layers, [input, output]) = (self.of(expert, dims), Layers::new(), dims);
        let n = dy.len() / output;
        let inner = layers.linear(dy, b, Add::Nothing, [n, output, self.rank])?;
        let outer = layers.linear(&inner, a, Add::Nothing, [n, self.rank, input])?;
        dx.iter_mut().zip(outer).for_each(|(dx, added)| *dx += self.scale * added);
        Ok(())
    }

    /// Returns the gradients of an expert's A `[r, in]` and B `[out, r]` for x `[n, in]` and dL/dy `[n, out]`.
    pub(super) fn grad(&self, expert: usize, x: &[f32], dy: &[f32], dims: [usize; 2]) -> Result<ExpertAdapterGrad> {
        let ([a, b], layers, [input, output]) = (self.of(expert, dims), Layers::new(), dims);
        let n = x.len() / input;
        let scaled: Vec<f32> = dy.iter().map(|dy| self.scale * dy).collect();
        let dinner = layers.linear(&scaled, b, Add::Nothing, [n, output, self.rank])?;
        let inner = layers.linear_dx(a, x, [n, self.rank, input])?;
        Ok(ExpertAdapterGrad {
            da: layers.linear_dweight(&dinner, x, [n, self.rank, input])?,
            db: layers.linear_dweight(&scaled, &inner, [n, output, self.rank])?,
        })
    }
}
