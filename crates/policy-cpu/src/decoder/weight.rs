//! The weights of layers, embedding and head: parameters in memory, or memory-mapped matrices.

use super::params::{read, storage};
use backend_cpu::layers::StoredWeight;
use burn::backend::Flex;
use burn::backend::flex::{FlexTensor, Layout};
use burn::module::{Module, Param};
use burn::tensor::{AllocationProperty, Bytes, DType, Shape, Tensor};
use grpo_burn::custom_op::elements;
use grpo_core::TensorRef;
use models::{Dtype, WeightTensor};
use policy::{Error, Result};
use std::sync::Arc;

/// A matrix of the model.
#[derive(Module, Debug)]
pub enum Weight {
    /// In memory, f32: `[in, out]` for a linear layer, `[V, H]` for embedding and head.
    Parameter(Param<Tensor<2>>),
    /// Memory-mapped; never trained.
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

/// Memory-mapped matrices `[out, in]`, f32 or bf16, whose outputs are concatenated in one layer, for example queries, keys and values.
/// Clones share the mapping. An embedding or a head `[V, H]` is a single such matrix.
#[derive(Module, Debug)]
pub struct Stored {
    #[module(skip)]
    parts: Arc<[FlexTensor]>,
}

impl Stored {
    /// Creates a view of mapped tensors; `None` if the kernels cannot read them in place, because they are f16 or not aligned.
    pub(super) fn new(tensors: &[WeightTensor<'_>]) -> Option<Self> {
        let parts = tensors.iter().map(part).collect::<Option<Arc<[_]>>>()?;
        Some(Self { parts })
    }

    /// Returns the weight of each expert, with `outputs` outputs.
    pub(super) fn of_experts(&self, outputs: usize) -> Arc<[Self]> {
        let rows = |part: &FlexTensor| part.layout().shape()[0];
        let (mut experts, mut parts, mut count) = (Vec::new(), Vec::new(), 0);
        for part in &*self.parts {
            parts.push(part.clone());
            count += rows(part);
            if count >= outputs {
                experts.push(Self { parts: std::mem::take(&mut parts).into() });
                count = 0;
            }
        }
        experts.into()
    }

    /// Returns the matrices as an argument of the kernels.
    pub(super) fn view(&self) -> Result<StoredWeight<'_>> {
        let parts = self.parts.iter().map(|part| elements("weight", part).map_err(Error::other));
        Ok(StoredWeight::new(&parts.collect::<Result<Vec<_>>>()?, self.input())?)
    }

    /// Returns `[in, out]`.
    pub(super) fn dims(&self) -> [usize; 2] {
        [self.input(), self.parts.iter().map(|part| part.layout().shape()[0]).sum()]
    }

    fn input(&self) -> usize {
        self.parts.first().map_or(0, |part| part.layout().shape()[1])
    }

    /// Iterates over the tensors in the order of their outputs, `[out, in]` each.
    pub(super) fn tensors(&self) -> impl Iterator<Item = Tensor<2>> {
        self.parts.iter().map(|part| Tensor::from_primitive::<Flex>(part.clone()))
    }

    /// Iterates over the values of each tensor.
    pub(super) fn elements(&self) -> impl Iterator<Item = Result<TensorRef<'_>>> {
        self.parts.iter().map(|part| elements("weight", part).map_err(Error::other))
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
        for part in self.elements() {
            let part = widened(part?);
            for (row, part) in part.chunks_exact(input.max(1)).enumerate() {
                let column = values[first + row..].iter_mut().step_by(output);
                column.zip(part).for_each(|(to, value)| *to = *value);
            }
            first += part.len() / input.max(1);
        }
        Ok(values)
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
