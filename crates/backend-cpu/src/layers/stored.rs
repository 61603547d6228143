//! Linear layers whose weight lies as files of models have it, and is not copied: products pack what they need of it.

use super::linear::{Add, PackedWeight, start};
use super::product::{Operand, Rhs, multiply};
use super::{Layers, fits};
use crate::arch::caches::second_cache;
use crate::gemm::{KAxis, Rows};
use crate::host::Slice;
use grpo_core::TensorRef;
use grpo_core::error::{Error, Result};
use std::ops::Range;

/// A weight of a linear layer as Hugging Face stores it: matrices `[out, in]`, f32 or bf16, whose outputs stand side by side, such as
/// those of queries, keys and values. Values are widened exactly where they are packed: results are, to the bit, those of the same values
/// in f32 as one weight `[in, out]`.
///
/// ```
/// use backend_cpu::layers::{Add, Layers, StoredWeight};
///
/// let (layers, query, key) = (Layers::new(), [3.0_f32, 5.0], [4.0_f32, 6.0]); // two matrices [1, 2]
/// let weight = StoredWeight::new(&[(&query).into(), (&key).into()], 2)?;
/// assert_eq!(layers.linear_stored(&[1.0, 2.0], &weight, Add::Nothing, 1)?, [13.0, 16.0]);
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct StoredWeight<'a> {
    /// The matrices, each with the first of its outputs.
    parts: Vec<(usize, Slice<'a>)>,
    input: usize,
    output: usize,
}

impl<'a> StoredWeight<'a> {
    /// The matrices `parts`, each `[out, input]`.
    ///
    /// # Errors
    /// [`Error::Shape`] when a slice is not a number of whole rows, [`Error::Unsupported`] for one on a device.
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
            Ok((output - length / input, values))
        };
        let parts = parts.iter().map(part).collect::<Result<Vec<_>>>()?;
        Ok(Self { parts, input, output })
    }

    /// `[in, out]`.
    pub fn dims(&self) -> [usize; 2] {
        [self.input, self.output]
    }

    /// Whether [`Layers::pack_stored`] keeps it in bf16.
    pub fn packs_narrow(&self) -> bool {
        let is_narrow = self.parts.iter().all(|(_, part)| matches!(part, Slice::Bf16(_)));
        is_narrow && Layers::packs_narrow(self.input * self.output)
    }

    /// `columns` of the rows `rows` of all matrices, one below the other, in f32.
    fn gathered(&self, rows: &Range<usize>, columns: &Range<usize>) -> Vec<f32> {
        let mut values = Vec::with_capacity(rows.len() * columns.len());
        for (first, part) in &self.parts {
            let end = first + len(*part) / self.input;
            for row in rows.start.max(*first)..rows.end.min(end).max(rows.start.max(*first)) {
                let at = (row - first) * self.input;
                let at = at + columns.start..at + columns.end;
                // By value, so that a third case is known not to be.
                let part = *part;
                match part {
                    Slice::F32(part) => values.extend_from_slice(&part[at]),
                    Slice::Bf16(part) => values.extend(part[at].iter().map(|x| x.to_f32())),
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
struct Stacked<'a> {
    of: &'a StoredWeight<'a>,
    along: KAxis,
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

    /// In place where the rows are of one matrix; the few that two share are gathered.
    fn with<T>(&self, outer: Range<usize>, k: Range<usize>, f: impl FnOnce(Rows<'_>) -> T) -> T {
        let (rows, columns) = match self.along {
            KAxis::Rows => (k, outer),
            KAxis::Columns => (outer, k),
        };
        let of = self.of;
        let first_of = of.parts.iter().rev().find(|(first, _)| *first <= rows.start);
        if let Some((first, part)) = first_of
            && rows.end <= first + len(*part) / of.input
        {
            return f(Rows::new(*part, of.input, rows.start - first..rows.end - first, columns));
        }
        let (count, width) = (rows.len(), columns.len());
        f(Rows::new(Slice::F32(&of.gathered(&rows, &columns)), width, 0..count, 0..width))
    }
}

impl Layers {
    /// Whether a weight in bf16 of so many values stays in bf16 when it is packed.
    pub fn packs_narrow(values: usize) -> bool {
        values.saturating_mul(size_of::<f32>()) > second_cache()
    }

    /// Packs a stored weight for [`Layers::linear_packed`]. A head `[V, H]` is such a weight, of H inputs. A large one in bf16 stays in
    /// bf16, half of what has to come from memory for every product; a small one is widened once.
    pub fn pack_stored(&self, weight: &StoredWeight<'_>) -> PackedWeight {
        self.pack_stored_as(weight, weight.packs_narrow())
    }

    /// [`Layers::pack_stored`] in bf16, which the values are then, or widened.
    pub(super) fn pack_stored_as(&self, weight: &StoredWeight<'_>, is_narrow: bool) -> PackedWeight {
        let rhs = Stacked { of: weight, along: KAxis::Columns };
        if is_narrow { self.packed_halves(&rhs, weight.dims()) } else { self.packed(&rhs, weight.dims()) }
    }

    /// [`Layers::linear`] of x `[N, in]`, with `n` = N, and a stored weight.
    ///
    /// # Errors
    /// As [`Layers::linear`].
    pub fn linear_stored(&self, x: &[f32], weight: &StoredWeight<'_>, add: Add<'_>, n: usize) -> Result<Vec<f32>> {
        let [input, output] = weight.dims();
        fits("linear_stored", "x", x.len(), &[n, input])?;
        let mut y = start(add, n, output)?;
        let (lhs, rhs) = (Operand::new(x, input, KAxis::Columns), Stacked { of: weight, along: KAxis::Columns });
        multiply(self.gemm, &lhs, &rhs, &mut y, !matches!(add, Add::Nothing));
        Ok(y)
    }

    /// [`Layers::linear_dx`] of dy `[N, out]`, with `n` = N, and a stored weight.
    ///
    /// # Errors
    /// As [`Layers::linear`].
    pub fn linear_stored_dx(&self, weight: &StoredWeight<'_>, dy: &[f32], n: usize) -> Result<Vec<f32>> {
        let [input, output] = weight.dims();
        fits("linear_stored_dx", "dy", dy.len(), &[n, output])?;
        let mut dx = vec![0.0; n * input];
        let (lhs, rhs) = (Operand::new(dy, output, KAxis::Columns), Stacked { of: weight, along: KAxis::Rows });
        multiply(self.gemm, &lhs, &rhs, &mut dx, false);
        Ok(dx)
    }
}
