//! The weights of layers, embedding and head: parameters in memory, or frozen matrices, memory-mapped or quantised.

use super::host::{read, storage};
use burn::backend::Flex;
use burn::backend::flex::{FlexTensor, Layout};
use burn::module::{Module, Param};
use burn::tensor::{AllocationProperty, Bytes, DType, Shape, Tensor};
use grpo_backend_cpu::layers::{Quantized, StoredWeight};
use grpo_burn::custom_op::elements;
use grpo_core::TensorRef;
use grpo_models::{Dtype, Quantization, QuantizedMatrix, WeightTensor};
use grpo_policy::{Error, Result};
use std::sync::Arc;

/// A matrix of the model.
#[derive(Module, Debug)]
pub enum Weight {
    /// In memory, f32: `[in, out]` for a linear layer, `[V, H]` for embedding and head.
    Parameter(Param<Tensor<2>>),
    /// Memory-mapped or quantised; never trained.
    Stored(Stored),
}

/// The beginning of burn's name of an enum in a module's path; its variants are not part of a parameter's name.
pub(super) const CONTAINER: &str = "Enum:";
/// Burn's name of the variant without a parameter.
pub(super) const STORED: &str = "Stored";

impl Weight {
    /// Returns `[in, out]` of a linear layer.
    pub fn dims(&self) -> [usize; 2] {
        match self {
            Self::Parameter(parameter) => parameter.dims(),
            Self::Stored(stored) => stored.dims(),
        }
    }

    /// Copies the weight `[in, out]` of a linear layer to f32.
    pub(super) fn to_vec(&self) -> Result<Vec<f32>> {
        match self {
            Self::Parameter(parameter) => Ok(read(&storage(parameter.val())?)?.to_vec()),
            Self::Stored(stored) => stored.to_vec(),
        }
    }
}

/// Frozen matrices `[out, in]` whose outputs are concatenated in one layer, for example queries, keys and values. Clones share their memory. An
/// embedding or a head `[V, H]` is a single such matrix.
#[derive(Module, Debug)]
pub struct Stored {
    #[module(skip)]
    parts: Parts,
}

#[derive(Clone, Debug)]
enum Parts {
    /// Memory-mapped, f32 or bf16.
    Mapped(Arc<[FlexTensor]>),
    /// In memory, in 8 or 4 bits per value.
    Quantized(Arc<[QuantizedMatrix]>),
}

impl Stored {
    /// Creates a view of mapped tensors; `None` if the kernels cannot read them in place, because they are f16 or not aligned.
    pub(super) fn new(tensors: &[WeightTensor<'_>]) -> Option<Self> {
        let parts = tensors.iter().map(part).collect::<Option<Arc<[_]>>>()?;
        Some(Self { parts: Parts::Mapped(parts) })
    }

    /// Quantises tensors.
    pub(super) fn quantized(tensors: &[WeightTensor<'_>], quantization: Quantization) -> Result<Self> {
        let parts = tensors.iter().map(|tensor| Ok(tensor.quantized(quantization)?));
        Ok(Self { parts: Parts::Quantized(parts.collect::<Result<_>>()?) })
    }

    /// Returns `true` if the matrices are quantised.
    pub(super) fn is_quantized(&self) -> bool {
        matches!(self.parts, Parts::Quantized(_))
    }

    /// Returns the memory-mapped matrices; none if they are quantised.
    fn mapped(&self) -> &[FlexTensor] {
        match &self.parts {
            Parts::Mapped(parts) => parts,
            Parts::Quantized(_) => &[],
        }
    }

    /// Returns the weight of each expert, with `outputs` outputs. Experts are never quantised.
    pub(super) fn of_experts(&self, outputs: usize) -> Arc<[Self]> {
        let rows = |part: &FlexTensor| part.layout().shape()[0];
        let (mut experts, mut parts, mut count) = (Vec::new(), Vec::new(), 0);
        for part in self.mapped() {
            parts.push(part.clone());
            count += rows(part);
            if count >= outputs {
                experts.push(Self { parts: Parts::Mapped(std::mem::take(&mut parts).into()) });
                count = 0;
            }
        }
        experts.into()
    }

    /// Returns the matrices as an argument of the kernels.
    pub(super) fn view(&self) -> Result<StoredWeight<'_>> {
        match &self.parts {
            Parts::Mapped(_) => Ok(StoredWeight::new(&self.elements().collect::<Result<Vec<_>>>()?, self.input())?),
            Parts::Quantized(parts) => {
                let parts: Vec<_> = parts.iter().map(|part| (quantized(part), part.shape()[0])).collect();
                Ok(StoredWeight::quantized(&parts, self.input())?)
            }
        }
    }

    /// Returns `[in, out]`.
    pub(super) fn dims(&self) -> [usize; 2] {
        let output = match &self.parts {
            Parts::Mapped(parts) => parts.iter().map(|part| part.layout().shape()[0]).sum(),
            Parts::Quantized(parts) => parts.iter().map(|part| part.shape()[0]).sum(),
        };
        [self.input(), output]
    }

    fn input(&self) -> usize {
        match &self.parts {
            Parts::Mapped(parts) => parts.first().map_or(0, |part| part.layout().shape()[1]),
            Parts::Quantized(parts) => parts.first().map_or(0, |part| part.shape()[1]),
        }
    }

    /// Iterates over the memory-mapped tensors in the order of their outputs, `[out, in]` each.
    pub(super) fn tensors(&self) -> impl Iterator<Item = Tensor<2>> {
        self.mapped().iter().map(|part| Tensor::from_primitive::<Flex>(part.clone()))
    }

    /// Iterates over the values of each memory-mapped tensor.
    pub(super) fn elements(&self) -> impl Iterator<Item = Result<TensorRef<'_>>> {
        self.mapped().iter().map(|part| elements("weight", part).map_err(Error::other))
    }

    /// Returns the rows `rows` of an embedding in f32, concatenated.
    pub(super) fn rows(&self, rows: &[u32]) -> Result<Vec<f32>> {
        let width = self.input();
        let mut values = Vec::with_capacity(rows.len() * width);
        let Some(part) = self.elements().next().transpose()? else { return Ok(values) };
        for row in rows {
            let at = *row as usize * width..(*row as usize + 1) * width;
            match part {
                TensorRef::F32(part) => values.extend_from_slice(&part[at]),
                TensorRef::Bf16(part) => values.extend(part[at].iter().map(|x| x.to_f32())),
                TensorRef::Device(_) => {}
            }
        }
        Ok(values)
    }

    /// Copies the weight `[in, out]` to f32.
    pub(super) fn to_vec(&self) -> Result<Vec<f32>> {
        let [input, output] = self.dims();
        let mut values = vec![0.0; input * output];
        let mut first = 0;
        let mut put = |part: Vec<f32>| {
            for (row, part) in part.chunks_exact(input.max(1)).enumerate() {
                let column = values[first + row..].iter_mut().step_by(output);
                column.zip(part).for_each(|(to, value)| *to = *value);
            }
            first += part.len() / input.max(1);
        };
        match &self.parts {
            Parts::Mapped(_) => {
                for part in self.elements() {
                    put(widened(part?));
                }
            }
            Parts::Quantized(parts) => parts.iter().for_each(|part| put(part.dequantized())),
        }
        Ok(values)
    }
}

/// Returns a matrix as an argument of the kernels.
fn quantized(matrix: &QuantizedMatrix) -> Quantized<'_> {
    let (codes, scales) = (matrix.codes(), matrix.scales());
    match matrix.quantization() {
        Quantization::Int8 => Quantized::Int8 { codes, scales },
        Quantization::Nf4 => {
            let (table, block) = (&Quantization::NF4_VALUES, Quantization::NF4_BLOCK);
            Quantized::Int4 { codes, scales, table, block }
        }
    }
}

/// Converts the values to f32.
pub(super) fn widened(values: TensorRef<'_>) -> Vec<f32> {
    match values {
        TensorRef::F32(values) => values.to_vec(),
        TensorRef::Bf16(values) => values.iter().map(|x| x.to_f32()).collect(),
        // Mapped tensors are never on a device.
        TensorRef::Device(_) => Vec::new(),
    }
}

/// Creates a burn tensor on the mapped memory.
fn part(tensor: &WeightTensor<'_>) -> Option<FlexTensor> {
    // safetensors files are little-endian.
    let dtype = match tensor.dtype() {
        Dtype::F32 if cfg!(target_endian = "little") => DType::F32,
        Dtype::Bf16 if cfg!(target_endian = "little") => DType::BF16,
        _ => return None,
    };
    let shape: [usize; 2] = tensor.shape().try_into().ok()?;
    let bytes = Bytes::from_shared(tensor.shared_bytes(), AllocationProperty::File);
    let part = FlexTensor::new(bytes, Layout::contiguous(Shape::from(shape)), dtype);
    elements("weight", &part).is_ok().then_some(part)
}
