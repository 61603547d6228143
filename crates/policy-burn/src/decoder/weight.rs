//! The weights of layers, embedding and head: parameters in memory, or matrices that stay in the files of a model.

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
    /// In memory, f32: `[in, out]` of a linear layer, `[V, H]` of embedding and head.
    Parameter(Param<Tensor<2>>),
    /// Where the files of the model are mapped; never trained.
    Stored(Stored),
}

/// What a module's path calls the alternatives of a weight; they are no part of a parameter's name.
pub(super) const CONTAINER: &str = "Enum:Weight";
/// The alternative that has no parameter.
pub(super) const STORED: &str = "Stored";

impl Weight {
    /// The parameter, if it is one.
    pub fn parameter(&self) -> Option<&Param<Tensor<2>>> {
        match self {
            Self::Parameter(parameter) => Some(parameter),
            Self::Stored(_) => None,
        }
    }

    /// `[in, out]` of a linear layer.
    pub fn dims(&self) -> [usize; 2] {
        match self {
            Self::Parameter(parameter) => parameter.dims(),
            Self::Stored(stored) => stored.dims(),
        }
    }

    /// The parameter of a decoder whose weights are in memory.
    #[cfg(test)]
    pub(crate) fn val(&self) -> Tensor<2> {
        self.parameter().expect("a parameter").val()
    }

    /// The weight `[in, out]` of a linear layer in f32.
    pub(super) fn to_vec(&self) -> Result<Vec<f32>> {
        match self {
            Self::Parameter(parameter) => Ok(read(&storage(parameter.val())?)?.to_vec()),
            Self::Stored(stored) => stored.to_vec(),
        }
    }
}

/// Matrices `[out, in]` in mapped files, f32 or bf16, whose outputs stand side by side in a layer: those of queries, keys and values are
/// one layer here. Copies share the mapping. An embedding or a head `[V, H]` is one such matrix.
#[derive(Module, Debug)]
pub struct Stored {
    #[module(skip)]
    parts: Arc<[FlexTensor]>,
}

impl Stored {
    /// The tensors where they lie; `None` where a product cannot read them there: those in f16, and those that begin at an odd place.
    pub(super) fn new(tensors: &[WeightTensor<'_>]) -> Option<Self> {
        let parts = tensors.iter().map(part).collect::<Option<Arc<[_]>>>()?;
        Some(Self { parts })
    }

    /// As products take them.
    pub(super) fn view(&self) -> Result<StoredWeight<'_>> {
        let parts = self.parts.iter().map(|part| elements("weight", part).map_err(Error::other));
        Ok(StoredWeight::new(&parts.collect::<Result<Vec<_>>>()?, self.input())?)
    }

    /// `[in, out]`.
    pub(super) fn dims(&self) -> [usize; 2] {
        [self.input(), self.parts.iter().map(|part| part.layout().shape()[0]).sum()]
    }

    fn input(&self) -> usize {
        self.parts.first().map_or(0, |part| part.layout().shape()[1])
    }

    /// The tensors in the order of their outputs, `[out, in]` each.
    pub(super) fn tensors(&self) -> impl Iterator<Item = Tensor<2>> {
        self.parts.iter().map(|part| Tensor::from_primitive::<Flex>(part.clone()))
    }

    /// Hands over the values of each tensor.
    pub(super) fn elements(&self) -> impl Iterator<Item = Result<TensorRef<'_>>> {
        self.parts.iter().map(|part| elements("weight", part).map_err(Error::other))
    }

    /// The rows `rows` of an embedding, end to end in f32.
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

    /// The weight `[in, out]` in f32.
    fn to_vec(&self) -> Result<Vec<f32>> {
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

/// The values in f32.
pub(super) fn widened(values: TensorRef<'_>) -> Vec<f32> {
    match values {
        TensorRef::F32(values) => values.to_vec(),
        TensorRef::Bf16(values) => values.iter().map(|x| x.to_f32()).collect(),
        // What is mapped lies on the host.
        TensorRef::Device(_) => Vec::new(),
    }
}

/// The tensor as one of burn's, over the mapping itself.
fn part(tensor: &WeightTensor<'_>) -> Option<FlexTensor> {
    // The numbers of a file are little-endian.
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
