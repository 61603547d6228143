//! Linear layers whose weight is used as model files store it, without a copy: products pack the parts that they use.

use super::linear::{Add, PackedWeight, are_bf16, start};
use super::product::{Operand, Rhs, multiply};
use super::quantized::Quantized;
use super::{Layers, fits};
use crate::arch::IsaToken;
use crate::arch::caches::second_cache;
use crate::gemm::{KAxis, Rows};
use crate::host::Slice;
use crate::pages::output as output_of;
use grpo_core::TensorRef;
use grpo_core::error::{Error, Result};
use std::ops::Range;

/// A weight of a linear layer in Hugging Face's layout: matrices `[out, in]`, f32 or bf16, whose outputs are
/// concatenated, such as queries, keys and values. Values are widened exactly during packing: results are bit-identical
/// to those of the same values as one f32 weight `[in, out]`. [`StoredWeight::quantized`] makes one of 8 or 4 bits per value.
///
/// ```
/// use grpo_backend_cpu::layers::{Add, Layers, StoredWeight};
///
/// let (layers, query, key) = (Layers::new(), [3.0_f32, 5.0], [4.0_f32, 6.0]); // two matrices [1, 2]
/// let weight = StoredWeight::new(&[(&query).into(), (&key).into()], 2)?;
/// assert_eq!(layers.linear_stored(&[1.0, 2.0], &weight, Add::Nothing, 1)?, [13.0, 16.0]);
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct StoredWeight<'a> {
    /// The matrices, each with the index of its first output.
    pub(super) parts: Vec<(usize, Part<'a>)>,
    pub(super) input: usize,
    pub(super) output: usize,
}

/// A matrix of a weight.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part<'a> {
    Values(Slice<'a>),
    /// A quantised matrix and the number of its rows.
    Quantized(Quantized<'a>, usize),
}

impl Part<'_> {
    /// Returns the number of rows of `input` values.
    fn rows(&self, input: usize) -> usize {
        match self {
            Self::Values(values) => len(*values) / input,
            Self::Quantized(_, rows) => *rows,
        }
    }
}

impl<'a> StoredWeight<'a> {
    /// Makes a weight of the matrices `parts`, each `[out, input]`.
    ///
    /// # Errors
    /// [`Error::Shape`] if a slice is not a whole number of rows, [`Error::Unsupported`] for a tensor on a device.
    pub fn new(parts: &[TensorRef<'a>], input: usize) -> Result<Self> {
        let mut output = 0;
        let part = |tensor: &TensorRef<'a>| {
            let values = tensor.on_host().ok_or_else(crate::host::on_device)?;
            let length = len(values);
            if input == 0 || !length.is_multiple_of(input) {
                let expected = format!("[out, {input}]");
                return Err(Error::shape("StoredWeight::new", "a matrix", expected, format!("{length} values")));
            }
            output += length / input;
            Ok((output - length / input, Part::Values(values)))
        };
        let parts = parts.iter().map(part).collect::<Result<Vec<_>>>()?;
        Ok(Self { parts, input, output })
    }

    /// Returns `[in, out]`.
    pub fn dims(&self) -> [usize; 2] {
        [self.input, self.output]
    }

    /// Returns `true` if it is stored in bf16 and so large that [`Layers::pack_stored`] keeps it in bf16.
    pub fn packs_narrow(&self) -> bool {
        let is_narrow = self.parts.iter().all(|(_, part)| matches!(part, Part::Values(Slice::Bf16(_))));
        is_narrow && Layers::packs_narrow(self.input * self.output)
    }

    /// Copies `columns` of the rows `rows` of the concatenated matrices, in f32.
    fn gathered(&self, isa: IsaToken, rows: &Range<usize>, columns: &Range<usize>) -> Vec<f32> {
        let mut values = Vec::with_capacity(rows.len() * columns.len());
        for (first, part) in &self.parts {
            let end = first + part.rows(self.input);
            for row in rows.start.max(*first)..rows.end.min(end).max(rows.start.max(*first)) {
                let at = (row - first) * self.input;
                let at = at + columns.start..at + columns.end;
                // Matched by value, so that the compiler knows that there is no device variant.
                let part = *part;
                match part {
                    Part::Values(Slice::F32(part)) => values.extend_from_slice(&part[at]),
                    Part::Values(Slice::Bf16(part)) => values.extend(part[at].iter().map(|x| x.to_f32())),
                    Part::Quantized(part, _) => {
                        part.append(isa, row - first, columns.clone(), self.input, &mut values);
                    }
                }
            }
        }
        values
    }
}

fn len(values: Slice<'_>) -> usize {
    match values {
        Slice::F32(values) => values.len(),
        Slice::Bf16(values) => values.len(),
    }
}

/// The rows of a stored weight as the rhs of a product, with K along an axis.
pub(super) struct Stacked<'a> {
    of: &'a StoredWeight<'a>,
    along: KAxis,
    /// The instruction set of dequantisation.
    isa: IsaToken,
}

impl Rhs for Stacked<'_> {
    fn dims(&self) -> (usize, usize) {
        match self.along {
            KAxis::Rows => (self.of.input, self.of.output),
            KAxis::Columns => (self.of.output, self.of.input),
        }
    }

    fn along(&self) -> KAxis {
        self.along
    }

    /// Uses rows in place if they are in one matrix; rows of two matrices are copied, and quantised ones dequantised.
    fn with<T>(&self, outer: Range<usize>, k: Range<usize>, f: impl FnOnce(Rows<'_>) -> T) -> T {
        let (rows, columns) = match self.along {
            KAxis::Rows => (k, outer),
            KAxis::Columns => (outer, k),
        };
        let of = self.of;
        let first_of = of.parts.iter().rev().find(|(first, _)| *first <= rows.start);
        if let Some((first, Part::Values(part))) = first_of
            && rows.end <= first + len(*part) / of.input
        {
            return f(Rows::new(*part, of.input, rows.start - first..rows.end - first, columns));
        }
        let (count, width) = (rows.len(), columns.len());
        f(Rows::new(Slice::F32(&of.gathered(self.isa, &rows, &columns)), width, 0..count, 0..width))
    }
}

impl Layers {
    pub(super) fn stacked<'a>(&self, of: &'a StoredWeight<'a>, along: KAxis) -> Stacked<'a> {
        Stacked { of, along, isa: self.gemm.isa() }
    }

    /// Returns `true` if a bf16 weight of that many values stays in bf16 when packed.
    pub fn packs_narrow(values: usize) -> bool {
        values.saturating_mul(size_of::<f32>()) > second_cache()
    }

    /// Packs a stored weight for [`Layers::linear_packed`]; for example a head `[V, H]`, with H inputs. A large weight
    /// of bf16 values, in bf16 or f32, is packed in 12 or 16 bits per value, which saves memory traffic of every product; a
    /// small one is widened once.
    pub fn pack_stored(&self, weight: &StoredWeight<'_>) -> PackedWeight {
        let is_exact = |(_, part): &(usize, Part<'_>)| {
            // Matched by value, so that the compiler knows that there is no device variant.
            let part = *part;
            match part {
                Part::Values(Slice::F32(values)) => are_bf16(self.gemm.isa(), values),
                Part::Values(Slice::Bf16(_)) => true,
                Part::Quantized(..) => false,
            }
        };
        self.packed(&self.stacked(weight, KAxis::Columns), weight.dims(), || weight.parts.iter().all(is_exact))
    }

    /// Like [`Layers::linear`] of x `[N, in]`, with `n` = N and a stored weight.
    ///
    /// # Errors
    /// As [`Layers::linear`].
    pub fn linear_stored(&self, x: &[f32], weight: &StoredWeight<'_>, add: Add<'_>, n: usize) -> Result<Vec<f32>> {
        let [input, output] = weight.dims();
        fits("linear_stored", "x", x.len(), &[n, input])?;
        let mut y = start(add, n, output)?;
        let (lhs, rhs) = (Operand::new(x, input, KAxis::Columns), self.stacked(weight, KAxis::Columns));
        multiply(self.linear, &lhs, &rhs, &mut y, !matches!(add, Add::Nothing));
        Ok(y)
    }

    /// Like [`Layers::linear_dx`] of dy `[N, out]`, with `n` = N and a stored weight.
    ///
    /// # Errors
    /// As [`Layers::linear`].
    pub fn linear_stored_dx(&self, weight: &StoredWeight<'_>, dy: &[f32], n: usize) -> Result<Vec<f32>> {
        let [input, output] = weight.dims();
        fits("linear_stored_dx", "dy", dy.len(), &[n, output])?;
        let mut dx = output_of(n * input);
        let (lhs, rhs) = (Operand::new(dy, output, KAxis::Columns), self.stacked(weight, KAxis::Rows));
        multiply(self.linear, &lhs, &rhs, &mut dx, false);
        Ok(dx)
    }
}
