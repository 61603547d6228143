//! LoRA (arXiv 2106.09685): a matrix W acts as W + s B A, and only A and B are trained.

use super::autodiff_ops;
use super::build::Builder;
use super::host::{read, storage};
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use grpo_backend_cpu::layers::Layers;
use grpo_models::{AdaptedMatrix, LoraConfig};
use grpo_policy::Result;

/// The adapter of a matrix, in the layout of PEFT.
#[derive(Module, Debug)]
pub struct LowRank {
    /// A `[r, in]`, or `[E r, in]` of all experts.
    pub a: Param<Tensor<2>>,
    /// B `[out, r]`, or `[out, r E]` of all experts.
    pub b: Param<Tensor<2>>,
    /// The scaling s of B A.
    pub(super) scale: f64,
    /// First of the matrix's columns in the layer's output; a layer may fuse several matrices.
    pub(super) first: usize,
}

impl LowRank {
    pub(crate) fn new(
        of: &mut Builder<'_>,
        name: &str,
        lora: &LoraConfig,
        matrix: &AdaptedMatrix,
        first: usize,
    ) -> Result<Self> {
        Ok(Self {
            a: of.parameter(&format!("{name}.a"), [matrix.rank(lora.r), matrix.input])?,
            b: of.parameter(&format!("{name}.b"), [matrix.output, matrix.rank(lora.r)])?,
            scale: lora.scaling(),
            first,
        })
    }

    /// Returns `y: [N, out]` plus s x A^T B^T in the adapter's columns, for `x: [N, in]`.
    pub(crate) fn forward(&self, x: Tensor<2>, y: Tensor<2>) -> Result<Tensor<2>> {
        autodiff_ops::low_rank(x, y, self.a.val(), self.b.val(), self.scale as f32, self.first)
    }

    /// Returns a head `[V, H]` plus s B A.
    pub(crate) fn adapted_head(&self, head: Tensor<2>) -> Result<Tensor<2>> {
        autodiff_ops::adapted_head(head, self.a.val(), self.b.val(), self.scale as f32)
    }

    /// Adds s A^T B^T to the adapter's columns of a weight `[in, columns]`.
    pub(crate) fn merge_into(&self, weight: &mut [f32], columns: usize) -> Result<()> {
        let ([rank, input], [output, _]) = (self.a.dims(), self.b.dims());
        let (a, b) = (storage(self.a.val())?, storage(self.b.val())?);
        let a = read(&a)?;
        let scale = self.scale as f32;
        let turned: Vec<f32> = (0..input * rank).map(|at| scale * a[at % rank * input + at / rank]).collect();
        let product = Layers::new().linear_dx(read(&b)?, &turned, [input, output, rank])?;
        for (row, product) in weight.chunks_exact_mut(columns).zip(product.chunks_exact(output)) {
            row[self.first..self.first + output].iter_mut().zip(product).for_each(|(w, x)| *w += x);
        }
        Ok(())
    }
}
