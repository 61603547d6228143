//! Quantised matrices, by the rules of bitsandbytes.

use crate::config::ModelConfig;
use crate::error::{Result, check};
use crate::weights::WeightTensor;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// The number of blocks of values that are read at a time.
const BLOCKS: usize = 256;
/// The number of values of about as many rows.
const VALUES: usize = BLOCKS * Quantization::NF4_BLOCK;

/// The format of the frozen matrices of layers beneath LoRA adapters, as bitsandbytes quantises the `nn.Linear` modules of a model. Embedding,
/// head, norms, biases and convolutions are not quantised. Products dequantise the matrices to the dtype of their operands.
///
/// ```
/// use grpo_models::{Quantization, QuantizedMatrix};
///
/// let matrix = QuantizedMatrix::new(Quantization::Int8, &[0.5, -1.0, 0.25, 2.0], [2, 2]);
/// assert_eq!(matrix.codes(), [64, (-127_i8) as u8, 16, 127]);
/// assert_eq!(matrix.scales(), [1.0 / 127.0, 2.0 / 127.0]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Quantization {
    /// 8 bits per weight: integers from -127 to 127, and an f32 scale for each row (output), which is the largest magnitude of the row divided by
    /// 127. Only weights are quantised: activations have no 8-bit products and no outliers as in LLM.int8() (arXiv 2208.07339).
    Int8,
    /// 4 bits per weight: the nearest of the 16 values of NF4 (arXiv 2305.14314), and an f32 scale for each block of 64 consecutive values of the
    /// row-major matrix, which is their largest magnitude. Scales are not quantised ("double quantisation" is off).
    Nf4,
}

impl Quantization {
    /// The number of values of a block of NF4.
    pub const NF4_BLOCK: usize = 64;

    /// The values of NF4, ascending. A code is an index.
    pub const NF4_VALUES: [f32; 16] = [
        -1.0,
        -0.696_192_8,
        -0.525_073_05,
        -0.394_917_5,
        -0.284_441_38,
        -0.184_773_43,
        -0.091_050_036,
        0.0,
        0.079_580_3,
        0.160_930_2,
        0.246_112_3,
        0.337_915_24,
        0.440_709_83,
        0.562_617,
        0.722_956_84,
        1.0,
    ];

    /// Returns the name in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Nf4 => "nf4",
        }
    }

    /// Checks that the matrices of a model can be quantised.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for a model with experts, whose matrices bitsandbytes does not quantise either.
    pub fn check(self, config: &ModelConfig) -> Result<()> {
        let expected = "null for a model with a mixture of experts (num_experts), whose experts cannot be quantised";
        check(config.experts.is_none(), "policy.quantization", expected, self.name())
    }

    /// Returns the bytes of a matrix of this many rows and columns, with its scales.
    pub fn bytes(self, [rows, columns]: [usize; 2]) -> u64 {
        let (codes, scales) = self.lengths([rows, columns]);
        (codes as u64).saturating_add((scales as u64).saturating_mul(size_of::<f32>() as u64))
    }

    /// Returns the number of values of all quantised matrices of a model, and their bytes.
    pub fn memory(self, config: &ModelConfig) -> QuantizedMemory {
        let matrices = (0..config.num_hidden_layers).flat_map(|layer| config.layer_matrices(layer));
        let start = QuantizedMemory { quantization: self, values: 0, bytes: 0 };
        matrices.fold(start, |sum, matrix| QuantizedMemory {
            values: sum.values.saturating_add((matrix.output as u64).saturating_mul(matrix.input as u64)),
            bytes: sum.bytes.saturating_add(self.bytes([matrix.output, matrix.input])),
            ..sum
        })
    }

    /// Returns the number of bytes of codes, and the number of scales.
    fn lengths(self, [rows, columns]: [usize; 2]) -> (usize, usize) {
        let values = rows.saturating_mul(columns);
        match self {
            Self::Int8 => (values, rows),
            Self::Nf4 => (values.div_ceil(2), values.div_ceil(Self::NF4_BLOCK)),
        }
    }
}

/// The quantised matrices of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantizedMemory {
    /// Their format.
    pub quantization: Quantization,
    /// The number of their values.
    pub values: u64,
    /// The bytes of codes and scales.
    pub bytes: u64,
}

/// A matrix `[out, in]` of quantised values.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizedMatrix {
    quantization: Quantization,
    shape: [usize; 2],
    codes: Vec<u8>,
    scales: Vec<f32>,
}

impl QuantizedMatrix {
    /// Quantises row-major values.
    ///
    /// # Panics
    /// If `shape` has another number of values.
    pub fn new(quantization: Quantization, values: &[f32], shape: [usize; 2]) -> Self {
        assert_eq!(values.len(), shape[0] * shape[1], "values of a matrix {shape:?}");
        let copy = |start: usize, out: &mut [f32]| {
            out.copy_from_slice(&values[start..start + out.len()]);
            Ok(())
        };
        Self::read(quantization, shape, copy).expect("slices can be copied")
    }

    /// Quantises the matrix whose values from a flat index on `read` copies. A few rows or blocks are read at a time, by all threads.
    fn read(
        quantization: Quantization,
        shape @ [rows, columns]: [usize; 2],
        read: impl Fn(usize, &mut [f32]) -> Result<()> + Sync,
    ) -> Result<Self> {
        let (codes, scales) = quantization.lengths(shape);
        let (mut codes, mut scales) = (vec![0_u8; codes], vec![0.0_f32; scales]);
        match quantization {
            Quantization::Int8 => {
                let count = (VALUES / columns.max(1)).max(1);
                let parts = codes.par_chunks_mut((count * columns).max(1)).zip(scales.par_chunks_mut(count));
                parts.enumerate().try_for_each(|(part, (codes, scales))| {
                    let mut values = vec![0.0; codes.len()];
                    read(part * count * columns, &mut values)?;
                    let of_rows = values.chunks_exact(columns).zip(codes.chunks_exact_mut(columns));
                    of_rows.zip(scales).for_each(|((values, codes), scale)| *scale = int8(values, codes));
                    Ok::<_, crate::Error>(())
                })?;
            }
            Quantization::Nf4 => {
                let parts = codes.par_chunks_mut(VALUES / 2).zip(scales.par_chunks_mut(BLOCKS));
                parts.enumerate().try_for_each(|(part, (codes, scales))| {
                    let mut values = vec![0.0; (2 * codes.len()).min(rows * columns - part * VALUES)];
                    read(part * VALUES, &mut values)?;
                    let block = Quantization::NF4_BLOCK;
                    let blocks = values.chunks(block).zip(codes.chunks_mut(block / 2));
                    blocks.zip(scales).for_each(|((values, codes), scale)| *scale = nf4(values, codes));
                    Ok::<_, crate::Error>(())
                })?;
            }
        }
        Ok(Self { quantization, shape, codes, scales })
    }

    /// Returns the format.
    pub fn quantization(&self) -> Quantization {
        self.quantization
    }

    /// Returns `[out, in]`.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Returns the codes in row-major order: int8 values in two's complement, or two indices of [`Quantization::NF4_VALUES`] per byte, the first
    /// of them in the upper half. If the number of values is odd, the lower half of the last byte is the index of 0.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// Returns the scales: one per row, or one per block of NF4.
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// Returns the values that products use, row-major.
    pub fn dequantized(&self) -> Vec<f32> {
        let scaled = |at: usize, value: f32, block: usize| value * self.scales[at / block];
        match self.quantization {
            Quantization::Int8 => {
                let codes = self.codes.iter().enumerate();
                codes.map(|(at, code)| scaled(at, f32::from(*code as i8), self.shape[1])).collect()
            }
            Quantization::Nf4 => {
                let values = self.codes.iter().flat_map(|code| [code >> 4, code & 15]);
                let values = values.map(|code| Quantization::NF4_VALUES[usize::from(code)]).enumerate();
                let count = self.shape[0] * self.shape[1];
                values.take(count).map(|(at, value)| scaled(at, value, Quantization::NF4_BLOCK)).collect()
            }
        }
    }
}

impl WeightTensor<'_> {
    /// Quantises a matrix. Its pages of the mapped file are then released, so that they do not count as memory of this process.
    ///
    /// # Errors
    /// [`crate::Error::Length`] if the tensor is not a matrix.
    pub fn quantized(&self, quantization: Quantization) -> Result<QuantizedMatrix> {
        let shape = self.shape().try_into().map_err(|_| crate::Error::Length {
            name: self.name().to_owned(),
            expected: "a matrix to quantise".to_owned(),
            found: self.len(),
        })?;
        let matrix = QuantizedMatrix::read(quantization, shape, |start, out| self.read(start, out))?;
        self.release();
        Ok(matrix)
    }
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |largest, value| value.abs().max(largest))
}

/// Quantises a row, and returns its scale.
fn int8(values: &[f32], codes: &mut [u8]) -> f32 {
    let largest = largest(values);
    let factor = 127.0 / largest;
    // Rows of zeros, or of values near the smallest f32, whose factor is infinite, have codes of 0.
    if factor.is_finite() {
        let code = |value: &f32| (value * factor).round_ties_even() as i8 as u8;
        codes.iter_mut().zip(values).for_each(|(to, value)| *to = code(value));
    }
    largest / 127.0
}

/// Quantises a block, and returns its scale. Of two equally near values, the lower one is taken.
fn nf4(values: &[f32], codes: &mut [u8]) -> f32 {
    let largest = largest(values);
    // Blocks of zeros, or of values near the smallest f32, whose factor is infinite, have codes of 0.
    let factor = Some(1.0 / largest).filter(|factor| factor.is_finite()).unwrap_or(0.0);
    let (lower, upper) = (&Quantization::NF4_VALUES[..15], &Quantization::NF4_VALUES[1..]);
    let code = |value: &f32| {
        let value = value * factor;
        lower.iter().zip(upper).map(|(low, high)| u8::from(value > (low + high) / 2.0)).sum::<u8>()
    };
    for (to, pair) in codes.iter_mut().zip(values.chunks(2)) {
        *to = (code(&pair[0]) << 4) | code(pair.get(1).unwrap_or(&0.0));
    }
    largest
}
