//! Dequantises parts of quantised matrices for products.

use super::stored::{Part, StoredWeight};
use crate::arch::{IsaToken, MulAdd, simd_dispatch};
use grpo_core::error::{Error, Result};
use std::ops::Range;

/// A matrix `[out, in]` of quantised values. A value is an integer, or a value of a table, times the scale of its row or block.
#[derive(Clone, Copy, Debug)]
pub enum Quantized<'a> {
    /// 8-bit integers with a scale for each row.
    Int8 {
        /// The integers in two's complement `[out, in]`.
        codes: &'a [u8],
        /// A scale per row, `[out]`.
        scales: &'a [f32],
    },
    /// 4-bit indices of a table, with a scale for each block of consecutive values of the row-major matrix.
    Int4 {
        /// Two indices per byte, in row-major order, the first of them in the upper half.
        codes: &'a [u8],
        /// A scale per block.
        scales: &'a [f32],
        /// The values of the indices.
        table: &'a [f32; 16],
        /// The number of values of a block, which is even.
        block: usize,
    },
}

impl<'a> StoredWeight<'a> {
    /// Makes a weight of quantised matrices, each with its number of rows (outputs). Products dequantise the parts that they use, so that
    /// results are bit-identical to results with the dequantised values.
    ///
    /// ```
    /// use grpo_backend_cpu::layers::{Add, Layers, Quantized, StoredWeight};
    ///
    /// let matrix = Quantized::Int8 { codes: &[2, -3_i8 as u8], scales: &[0.5] }; // [1, 2]
    /// let weight = StoredWeight::quantized(&[(matrix, 1)], 2)?;
    /// assert_eq!(Layers::new().linear_stored(&[4.0, 1.0], &weight, Add::Nothing, 1)?, [2.5]);
    /// # Ok::<(), grpo_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] if codes or scales do not fit the number of rows.
    pub fn quantized(matrices: &[(Quantized<'a>, usize)], input: usize) -> Result<Self> {
        let shape = |what: &'static str, expected: String, found: usize| {
            Err(Error::shape("StoredWeight::quantized", what, expected, found.to_string()))
        };
        let (mut output, mut parts) = (0, Vec::new());
        for (matrix, rows) in matrices {
            let count = rows * input;
            let (codes, scales, expected) = match matrix {
                Quantized::Int8 { codes, scales } => (codes, scales, [count, *rows]),
                Quantized::Int4 { block, .. } if *block == 0 || !block.is_multiple_of(2) => {
                    return shape("the block", "an even number of values".to_owned(), *block);
                }
                Quantized::Int4 { codes, scales, block, .. } => {
                    (codes, scales, [count.div_ceil(2), count.div_ceil(*block)])
                }
            };
            if codes.len() != expected[0] {
                return shape("codes", format!("{} bytes", expected[0]), codes.len());
            }
            if scales.len() != expected[1] {
                return shape("scales", format!("{} values", expected[1]), scales.len());
            }
            parts.push((output, Part::Quantized(*matrix, *rows)));
            output += rows;
        }
        Ok(Self { parts, input, output })
    }
}

impl Quantized<'_> {
    /// Appends the values `columns` of a row of `input` values to `to`.
    pub(super) fn append(self, isa: IsaToken, row: usize, columns: Range<usize>, input: usize, to: &mut Vec<f32>) {
        let first = to.len();
        to.resize(first + columns.len(), 0.0);
        let (to, at) = (&mut to[first..], row * input + columns.start);
        match self {
            Self::Int8 { codes, scales } => int8(isa, &codes[at..at + columns.len()], scales[row], to),
            Self::Int4 { codes, scales, table, block } => int4(isa, codes, scales, table, block, at, to),
        }
    }
}

simd_dispatch! {
    /// Multiplies integers by their scale.
    fn int8(codes: &[u8], scale: f32, to: &mut [f32]) = int8_body
}

#[inline(always)]
fn int8_body<M: MulAdd>(codes: &[u8], scale: f32, to: &mut [f32]) {
    to.iter_mut().zip(codes).for_each(|(to, code)| *to = f32::from(*code as i8) * scale);
}

simd_dispatch! {
    /// Looks up the values from index `at` on, and multiplies them by the scales of their blocks.
    fn int4(codes: &[u8], scales: &[f32], table: &[f32; 16], block: usize, at: usize, to: &mut [f32]) = int4_body
}

#[inline(always)]
fn int4_body<M: MulAdd>(
    codes: &[u8],
    scales: &[f32],
    table: &[f32; 16],
    block: usize,
    mut at: usize,
    mut to: &mut [f32],
) {
    while !to.is_empty() {
        let (in_block, scale) = (at % block, scales[at / block]);
        let count = to.len().min(block - in_block);
        let (now, rest) = to.split_at_mut(count);
        let mut now = now;
        if !at.is_multiple_of(2) {
            let (first, others) = now.split_at_mut(1);
            first[0] = table[usize::from(codes[at / 2] & 15)] * scale;
            now = others;
        }
        let mut pairs = now.chunks_exact_mut(2);
        for (pair, code) in pairs.by_ref().zip(&codes[at.div_ceil(2)..]) {
            pair[0] = table[usize::from(code >> 4)] * scale;
            pair[1] = table[usize::from(code & 15)] * scale;
        }
        if let [last] = pairs.into_remainder() {
            *last = table[usize::from(codes[(at + count - 1) / 2] >> 4)] * scale;
        }
        (at, to) = (at + count, rest);
    }
}
