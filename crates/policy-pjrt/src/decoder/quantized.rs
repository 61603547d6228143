//! Quantised matrices of layers ([`Quantization`]) as parameters of programs.
//!
//! A device holds the codes of a matrix `[out, in]` as words of 32 bits, and its scales in f32. A word has the codes of 4 (int8) or 8 (nf4)
//! neighbouring rows in one column: unpacking adds a dimension before the columns, so that columns keep their layout and their sharding. The loop
//! over layers dequantises the matrices of one layer at a time, and shards the result like the matrix.

#[cfg(doc)]
use super::Axis;
use super::{Decoder, Format, Matrix, Parameter, Role, parameters};
use grpo_models::{ModelConfig, Quantization, QuantizedMatrix, Result};
use grpo_stablehlo::{Binary, Dtype, TensorType, Value};
use std::ops::Range;

/// Returns the bits of a code, and the number of codes of a word.
fn bits(quantization: Quantization) -> (usize, usize) {
    match quantization {
        Quantization::Int8 => (8, 4),
        Quantization::Nf4 => (4, 8),
    }
}

/// Returns [`parameters`] with quantised matrices of layers, if `quantization` is set: the parameter of a matrix has its codes, and
/// [`Role::Scales`] follows it. Both are sharded like the matrix, except dimensions that their mesh axes do not divide ([`Axis::Packed`]): each
/// device has all of these, so every mesh of the model is one of its quantised matrices.
///
/// # Shapes
/// Of the matrices `[out, in]` of L layers: int8 codes `[L, out / 4, in]` and scales `[L, out]`; nf4 codes `[L, out / 8, in]` and scales
/// `[L, out, in / 64]`.
pub fn quantized_parameters(config: &ModelConfig, quantization: Option<Quantization>) -> Vec<Parameter> {
    let table = parameters(config);
    let Some(quantization) = quantization else { return table };
    let quantized = |parameter: Parameter| match Matrix::of(parameter.role).filter(|_| parameter.is_stacked()) {
        Some(matrix) => {
            let [layers, output, input] = [0, 1, 2].map(|dimension| parameter.shape[dimension]);
            let [stack, rows, columns] = [0, 1, 2].map(|dimension| parameter.axes[dimension]);
            let (shape, axes) = match quantization {
                Quantization::Int8 => (vec![layers, output], vec![stack, rows]),
                Quantization::Nf4 => {
                    let blocks = input / Quantization::NF4_BLOCK;
                    (vec![layers, output, blocks], vec![stack, rows, columns.packed(blocks)])
                }
            };
            let words = output / bits(quantization).1;
            let scales = Parameter {
                role: Role::Scales(matrix),
                shape,
                axes,
                format: Format::Scales(quantization),
                path: format!("{}.scales", parameter.path),
                ..parameter.clone()
            };
            let codes = Parameter {
                shape: vec![layers, words, input],
                axes: vec![stack, rows.packed(words), columns],
                format: Format::Codes(quantization),
                path: format!("{}.{}", parameter.path, quantization.name()),
                ..parameter
            };
            vec![codes, scales]
        }
        None => vec![parameter],
    };
    table.into_iter().flat_map(quantized).collect()
}

/// Checks that a device can hold the quantised matrices of a model.
///
/// # Errors
/// [`grpo_models::Error::Config`] with the key `policy.quantization` for a model with experts, for a matrix whose rows are not a multiple of 8 (nf4) or
/// 4 (int8), and in nf4 for one whose columns are not a multiple of 64.
pub fn check_quantization(config: &ModelConfig, quantization: Quantization) -> Result<()> {
    quantization.check(config)?;
    let (_, rows) = bits(quantization);
    let columns = if quantization == Quantization::Nf4 { Quantization::NF4_BLOCK } else { 1 };
    for layer in 0..config.num_hidden_layers {
        let matrices = config.layer_matrices(layer);
        let wrong = matrices.iter().find(|of| !of.output.is_multiple_of(rows) || !of.input.is_multiple_of(columns));
        if let Some(matrix) = wrong {
            let (name, [output, input]) = (matrix.name, [matrix.output, matrix.input]);
            return Err(grpo_models::Error::Config {
                key: "policy.quantization",
                expected: format!("matrices with a multiple of {rows} rows and of {columns} columns on a PJRT device"),
                found: format!(
                    "{} for the matrix model.layers.{layer}.{name} [{output}, {input}]",
                    quantization.name()
                ),
            });
        }
    }
    Ok(())
}

/// Returns the words of the codes of a matrix. The lowest bits of a word are of its first row.
pub(crate) fn words(matrix: &QuantizedMatrix) -> Vec<u32> {
    let ([rows, columns], (bits, count)) = (matrix.shape(), bits(matrix.quantization()));
    let codes = matrix.codes();
    let mut words = vec![0_u32; rows / count * columns];
    for (first, words) in words.chunks_exact_mut(columns.max(1)).enumerate() {
        for lane in 0..count {
            let start = (first * count + lane) * columns;
            for (at, word) in (start..).zip(&mut *words) {
                let code = match matrix.quantization() {
                    Quantization::Int8 => codes[at],
                    Quantization::Nf4 if at % 2 == 0 => codes[at / 2] >> 4,
                    Quantization::Nf4 => codes[at / 2] & 15,
                };
                *word |= u32::from(code) << (bits * lane);
            }
        }
    }
    words
}

impl Decoder {
    /// Quantises the matrices of layers, which are then frozen ([`quantized_parameters`]).
    #[must_use]
    pub fn with_quantization(self, quantization: Option<Quantization>) -> Self {
        Self { quantization, ..self }
    }

    /// Returns the format of quantised matrices of layers, if they are quantised.
    pub fn quantization(&self) -> Option<Quantization> {
        self.quantization
    }

    /// Returns the matrix `[out, in]` of a layer in the compute dtype, given its words and scales.
    pub(super) fn dequantized(&self, quantization: Quantization, words: &Value, scales: &Value) -> Value {
        let ([rows, columns], (bits, count)) = ([words.shape()[0], words.shape()[1]], bits(quantization));
        let ty = TensorType::new(Dtype::U32, [rows, count, columns]);
        let lane = words.builder().iota(1, ty.clone());
        // The code of each row at the upper end of its word.
        let shift = (lane.like(count as i64 - 1) - &lane) * lane.like(bits as i64);
        let codes = words.broadcast_in_dim(&ty.shape, &[0, 2]).shift_left(&shift);
        let shape = [rows * count, columns];
        let (values, scales) = match quantization {
            Quantization::Int8 => {
                let codes = codes.bitcast_convert(Dtype::I32);
                let values = codes.shift_right_arithmetic(&codes.like(24)).convert(Dtype::F32);
                (values, scales.broadcast_in_dim(&shape, &[0]))
            }
            Quantization::Nf4 => {
                let codes = codes.binary(Binary::ShiftRightLogical, &codes.like(28));
                let blocks = [shape[0], columns / Quantization::NF4_BLOCK, Quantization::NF4_BLOCK];
                (value_of(&codes, 0..16), scales.broadcast_in_dim(&blocks, &[0, 1]).reshape(&shape))
            }
        };
        (values.reshape(&shape) * scales).convert(self.compute.dtype())
    }
}

/// Returns the NF4 values of codes in a range, by bisection: accelerators have no fast look-up in a table.
fn value_of(codes: &Value, range: Range<usize>) -> Value {
    if range.len() == 1 {
        let value = f64::from(Quantization::NF4_VALUES[range.start]);
        return codes.builder().splat(value, codes.ty().with_dtype(Dtype::F32));
    }
    let middle = (range.start + range.end) / 2;
    let is_upper = codes.ge(&codes.like(middle as i64));
    is_upper.select(&value_of(codes, middle..range.end), &value_of(codes, range.start..middle))
}
