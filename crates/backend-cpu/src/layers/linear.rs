//! Linear layers: y = x W + b.

use super::product::{Operand, PackedRhs, Rhs, multiply, multiply_packed, pack, pack_coded, pack_halves};
use super::{Layers, fits};
use crate::arch::{IsaToken, MulAdd, simd_dispatch};
use crate::gemm::{CodedPanels, Gemm, KAxis, Panels};
use crate::pages::{Aligned, output as output_of, zeros};
use crate::threads::slices::*;
use grpo_core::error::Result;

/// The term that a linear layer adds to its product.
#[derive(Clone, Copy, Debug)]
pub enum Add<'a> {
    /// Nothing.
    Nothing,
    /// A bias `[out]` to each row.
    Rows(&'a [f32]),
    /// The residual stream `[N, out]`.
    Residual(&'a [f32]),
}

/// A weight `[in, out]` in the packed layout of products. It is for many small products with one weight: packing would
/// take longer than each product.
#[derive(Clone, Debug)]
pub struct PackedWeight {
    entries: Entries,
    /// The products that it is packed for.
    gemm: Gemm,
    dims: [usize; 2],
}

#[derive(Clone, Debug)]
enum Entries {
    Words(Aligned<u32>),
    /// Words of bf16 values, in half the memory.
    Halves(Aligned<u16>),
    /// bf16 values in about 12 bits each.
    Coded(CodedPanels),
}

impl Entries {
    fn panels(&self) -> Panels<'_> {
        match self {
            Self::Words(words) => Panels::Words(words),
            Self::Halves(halves) => Panels::Halves(halves),
            Self::Coded(panels) => Panels::Coded(panels),
        }
    }
}

impl PackedWeight {
    /// Returns `[in, out]`.
    pub fn dims(&self) -> [usize; 2] {
        self.dims
    }

    /// Returns the bytes of the packed weight.
    pub fn bytes(&self) -> usize {
        self.entries.panels().bytes()
    }
}

impl Layers {
    /// Packs a weight `[in, out]` for [`Layers::linear_packed`]. A large weight whose values are all bf16 values, as after widening a bf16
    /// model, takes 12 to 16 bits per value, with bit-identical products.
    ///
    /// # Errors
    /// [`grpo_core::Error::Shape`] if the slice has another length.
    pub fn pack_weight(&self, weight: &[f32], [input, output]: [usize; 2]) -> Result<PackedWeight> {
        fits("pack_weight", "weight", weight.len(), &[input, output])?;
        let rhs = Operand::new(weight, output, KAxis::Rows);
        Ok(self.packed(&rhs, [input, output], || are_bf16(self.gemm.isa(), weight)))
    }

    /// Packs the transpose of a head `[out, in]`.
    ///
    /// # Errors
    /// As [`Layers::pack_weight`].
    pub fn pack_transposed(&self, head: &[f32], [output, input]: [usize; 2]) -> Result<PackedWeight> {
        fits("pack_transposed", "head", head.len(), &[output, input])?;
        let rhs = Operand::new(head, input, KAxis::Columns);
        Ok(self.packed(&rhs, [input, output], || are_bf16(self.gemm.isa(), head)))
    }

    /// Packs a weight. A large weight is packed narrow if products round its values to bf16, or if `is_exact` returns `true`: all of them are bf16
    /// values.
    pub(super) fn packed(&self, rhs: &impl Rhs, dims: [usize; 2], is_exact: impl FnOnce() -> bool) -> PackedWeight {
        if self.is_large(dims) && (self.linear.rounds() || is_exact()) {
            return self.packed_narrow(rhs, dims);
        }
        self.packed_words(rhs, dims)
    }

    /// Packs a weight of bf16 values in 12 bits per value if possible, otherwise in 16 bits.
    pub(super) fn packed_narrow(&self, rhs: &impl Rhs, dims: [usize; 2]) -> PackedWeight {
        let coded = if self.linear.codes(dims[0]) { pack_coded(self.linear, rhs) } else { None };
        match coded {
            Some(panels) => PackedWeight { entries: Entries::Coded(panels), gemm: self.linear, dims },
            None if self.linear.packs_f32() => self.packed_halves(rhs, dims),
            None => self.packed_words(rhs, dims),
        }
    }

    /// Packs a weight as words.
    pub(super) fn packed_words(&self, rhs: &impl Rhs, dims: [usize; 2]) -> PackedWeight {
        let gemm = self.linear;
        let mut words = zeros(gemm.rhs_words(dims[1], dims[0]));
        pack(gemm, rhs, &mut words);
        PackedWeight { entries: Entries::Words(words), gemm, dims }
    }

    /// Packs a weight of bf16 values as the upper halves of words.
    pub(super) fn packed_halves(&self, rhs: &impl Rhs, dims: [usize; 2]) -> PackedWeight {
        let gemm = self.linear;
        let mut halves = zeros(gemm.rhs_words(dims[1], dims[0]));
        pack_halves(gemm, rhs, &mut halves);
        PackedWeight { entries: Entries::Halves(halves), gemm, dims }
    }

    /// Computes y `[N, out]` of x `[N, in]` and a weight `[in, out]`; `dims` are `[N, in, out]`.
    ///
    /// # Errors
    /// [`grpo_core::Error::Shape`] if a slice does not match the dimensions.
    pub fn linear(&self, x: &[f32], weight: &[f32], add: Add<'_>, dims: [usize; 3]) -> Result<Vec<f32>> {
        let [n, input, output] = dims;
        fits("linear", "x", x.len(), &[n, input])?;
        fits("linear", "weight", weight.len(), &[input, output])?;
        let mut y = start(add, n, output)?;
        let (lhs, rhs) = (Operand::new(x, input, KAxis::Columns), Operand::new(weight, output, KAxis::Rows));
        multiply(self.linear, &lhs, &rhs, &mut y, !matches!(add, Add::Nothing));
        Ok(y)
    }

    /// Like [`Layers::linear`], with a packed weight and bit-identical results. The dtype of the operands is that of the [`Layers`] that packed
    /// the weight.
    ///
    /// # Errors
    /// As [`Layers::linear`].
    pub fn linear_packed(&self, x: &[f32], weight: &PackedWeight, add: Add<'_>, n: usize) -> Result<Vec<f32>> {
        self.linear_packed_in(Vec::new(), x, weight, add, n)
    }

    /// Like [`Layers::linear_packed`], but with [`Add::Nothing`] y `[N, out]` is written into `memory`, such as an earlier result, if its capacity
    /// suffices. This saves the allocation and the zeros of a new vector. The contents of `memory` are not read.
    ///
    /// # Errors
    /// As [`Layers::linear`].
    pub fn linear_packed_in(
        &self,
        memory: Vec<f32>,
        x: &[f32],
        weight: &PackedWeight,
        add: Add<'_>,
        n: usize,
    ) -> Result<Vec<f32>> {
        let [input, output] = weight.dims;
        fits("linear_packed", "x", x.len(), &[n, input])?;
        let mut y = match add {
            // The product overwrites every element if it has a term.
            Add::Nothing if input > 0 => with_length(memory, n * output),
            _ => start(add, n, output)?,
        };
        let lhs = Operand::new(x, input, KAxis::Columns);
        let rhs = PackedRhs { panels: weight.entries.panels(), columns: output };
        multiply_packed(weight.gemm, &lhs, rhs, &mut y, !matches!(add, Add::Nothing));
        Ok(y)
    }

    /// Computes dL/dx = dy W^T, `[N, in]`, of dy `[N, out]`; `dims` are `[N, in, out]`.
    ///
    /// # Errors
    /// As [`Layers::linear`].
    pub fn linear_dx(&self, weight: &[f32], dy: &[f32], dims: [usize; 3]) -> Result<Vec<f32>> {
        let [n, input, output] = dims;
        fits("linear_dx", "weight", weight.len(), &[input, output])?;
        fits("linear_dx", "dy", dy.len(), &[n, output])?;
        let mut dx = output_of(n * input);
        let (lhs, rhs) = (Operand::new(dy, output, KAxis::Columns), Operand::new(weight, output, KAxis::Columns));
        multiply(self.linear, &lhs, &rhs, &mut dx, false);
        Ok(dx)
    }

    /// Computes dL/dW = x^T dy, `[in, out]`, of x `[N, in]` and dy `[N, out]`.
    ///
    /// # Errors
    /// As [`Layers::linear`].
    pub fn linear_dweight(&self, x: &[f32], dy: &[f32], dims: [usize; 3]) -> Result<Vec<f32>> {
        let [n, input, output] = dims;
        fits("linear_dweight", "x", x.len(), &[n, input])?;
        fits("linear_dweight", "dy", dy.len(), &[n, output])?;
        let mut dweight = output_of(input * output);
        let (lhs, rhs) = (Operand::new(x, input, KAxis::Rows), Operand::new(dy, output, KAxis::Rows));
        multiply(self.linear, &lhs, &rhs, &mut dweight, false);
        Ok(dweight)
    }

    /// Computes dL/db `[out]`: the sum of the rows of dy `[N, out]`.
    ///
    /// # Errors
    /// As [`Layers::linear`].
    pub fn linear_dbias(&self, dy: &[f32], [n, output]: [usize; 2]) -> Result<Vec<f32>> {
        fits("linear_dbias", "dy", dy.len(), &[n, output])?;
        let mut dbias = vec![0.0; output];
        for row in dy.chunks_exact(output.max(1)) {
            add_to(self.gemm.isa(), row, &mut dbias);
        }
        Ok(dbias)
    }
}

/// Returns `true` if all values are bf16 values: the lower 16 bits of every word are zero. Stops soon after the first other value.
pub(super) fn are_bf16(isa: IsaToken, values: &[f32]) -> bool {
    /// The values of a task.
    const TASK: usize = 1 << 18;
    /// The values that are checked together.
    const RUN: usize = 1 << 12;
    let (first, _) = values.split_at(values.len().min(RUN));
    let all = |values: &[f32]| values.chunks(RUN).all(|run| lower_bits(isa, run) == 0);
    all(first) && values.par_chunks(TASK).all(all)
}

simd_dispatch! {
    /// Returns the bits that are set in the lower half of any word.
    fn lower_bits(values: &[f32]) -> u32 = lower_bits_body
}

#[inline(always)]
fn lower_bits_body<M: MulAdd>(values: &[f32]) -> u32 {
    values.iter().fold(0, |bits, value| bits | value.to_bits()) & 0xffff
}

/// Returns `memory` with a length and unspecified contents, or new memory if it is too small.
pub(super) fn with_length(mut memory: Vec<f32>, length: usize) -> Vec<f32> {
    if memory.capacity() < length {
        return output_of(length);
    }
    memory.resize(length, 0.0);
    memory
}

/// Returns the initial value of the product's output.
pub(super) fn start(add: Add<'_>, n: usize, output: usize) -> Result<Vec<f32>> {
    match add {
        Add::Nothing => Ok(output_of(n * output)),
        Add::Residual(residual) => {
            fits("linear", "residual", residual.len(), &[n, output])?;
            Ok(residual.to_vec())
        }
        Add::Rows(bias) => {
            fits("linear", "bias", bias.len(), &[output])?;
            Ok(bias.repeat(n))
        }
    }
}

simd_dispatch! {
    /// Computes to += from.
    pub(super) fn add_to(from: &[f32], to: &mut [f32]) = add_to_body
}

#[inline(always)]
fn add_to_body<M: MulAdd>(from: &[f32], to: &mut [f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += from;
    }
}
