//! Out of burn and back: tensors as host slices, graphs as node guards.

use crate::error::{Error, Result};
use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::backend::autodiff::ops::NodeGuard;
use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Flex};
use burn::tensor::{
    Bytes, DType, Element, GradientCheckpointingStrategy, PrimitiveConversionError, Shape, Tensor, bf16,
};
use bytemuck::Pod;
use grpo_core::{Dtype, HeadLayout, TensorRef};

type AutodiffTensor = FloatTensor<Autodiff<Flex>>;

/// The gradient-checkpointing strategy that all graphs of one call share.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Graph(Option<GradientCheckpointingStrategy>);

impl Graph {
    /// Takes the graph of one more tensor in; a tensor without autodiff is a constant and fits any graph.
    pub(crate) fn join<const D: usize>(self, name: &'static str, tensor: &Tensor<D>) -> Result<Self> {
        match (self.0, tensor.gradient_checkpointing_strategy()) {
            (Some(ours), Some(theirs)) if ours != theirs => Err(Error::Checkpointing { tensor: name }),
            (ours, theirs) => Ok(Self(ours.or(theirs))),
        }
    }

    /// A tensor of this graph.
    pub(crate) fn tensor(self, primitive: AutodiffTensor) -> Tensor<1> {
        match self.0.unwrap_or_default() {
            GradientCheckpointingStrategy::Disabled => Tensor::from_primitive::<Autodiff<Flex>>(primitive),
            GradientCheckpointingStrategy::Balanced => {
                Tensor::from_primitive::<Autodiff<Flex, BalancedCheckpointing>>(primitive)
            }
        }
    }
}

/// A tensor taken apart: storage, place in the graph, and whether the graph wants its gradient.
pub(crate) struct Operand {
    pub(crate) storage: FlexTensor,
    pub(crate) node: NodeGuard,
    pub(crate) tracked: bool,
}

impl Operand {
    /// Takes a tensor of any rank apart without copying it.
    pub(crate) fn new<const D: usize>(name: &'static str, tensor: Tensor<D>) -> Result<Self> {
        let tracked = tensor.is_autodiff() && tensor.is_tracked();
        let primitive = match tensor.gradient_checkpointing_strategy() {
            None => tensor.try_into_primitive::<Flex>().map(AutodiffTensor::new),
            Some(GradientCheckpointingStrategy::Disabled) => tensor.try_into_primitive::<Autodiff<Flex>>(),
            Some(GradientCheckpointingStrategy::Balanced) => {
                tensor.try_into_primitive::<Autodiff<Flex, BalancedCheckpointing>>()
            }
        };
        let (storage, node) = primitive.map_err(|e| not_flex(name, e))?.into_parts();
        Ok(Self { storage, node, tracked })
    }

    /// Stands in for an argument that was not given.
    pub(crate) fn absent() -> Self {
        let nothing = FlexTensor::zeros(Shape::from([1]), DType::F32);
        let (storage, node) = AutodiffTensor::new(nothing).into_parts();
        Self { storage, node, tracked: false }
    }
}

fn not_flex(tensor: &'static str, error: PrimitiveConversionError) -> Error {
    let (PrimitiveConversionError::BackendMismatch(reason) | PrimitiveConversionError::KindMismatch(reason)) = error;
    Error::NotFlex { tensor, reason }
}

/// The element type of a tensor, if the loss takes it.
pub(crate) fn dtype<const D: usize>(name: &'static str, tensor: &Tensor<D>) -> Result<Dtype> {
    match tensor.dtype() {
        DType::F32 => Ok(Dtype::F32),
        DType::BF16 => Ok(Dtype::Bf16),
        found => Err(Error::Dtype { tensor: name, expected: "f32 or bf16", found }),
    }
}

/// Refuses a tensor of another element type than the hidden states have.
pub(crate) fn same_dtype<const D: usize>(name: &'static str, tensor: &Tensor<D>, expected: Dtype) -> Result<()> {
    if dtype(name, tensor)? == expected {
        return Ok(());
    }
    Err(Error::Dtype { tensor: name, expected: expected.name(), found: tensor.dtype() })
}

/// Row-major storage: the tensor itself if it is that already, else a copy.
pub(crate) fn row_major(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() }
}

/// An LM head as its storage lies.
pub(crate) struct Head {
    pub(crate) storage: FlexTensor,
    /// The layout of the storage.
    pub(crate) layout: HeadLayout,
    /// Whether the storage is the transpose of the tensor that was given.
    transposed: bool,
}

impl Head {
    /// Reads a transposed view, such as a tied embedding that was turned, in place under the other layout.
    pub(crate) fn new(storage: FlexTensor, layout: HeadLayout) -> Self {
        let turned = storage.layout().transpose(0, 1);
        if storage.is_contiguous() || !turned.is_contiguous() {
            return Self { storage: row_major(storage), layout, transposed: false };
        }
        let layout = match layout {
            HeadLayout::VocabHidden => HeadLayout::HiddenVocab,
            HeadLayout::HiddenVocab => HeadLayout::VocabHidden,
        };
        Self { storage: storage.with_layout(turned), layout, transposed: true }
    }

    /// Adopts the gradient, shaped as the tensor that was given.
    pub(crate) fn gradient(&self, values: Vec<f32>) -> FlexTensor {
        let gradient = adopt(values, &self.storage);
        if !self.transposed {
            return gradient;
        }
        let turned = gradient.layout().transpose(0, 1);
        gradient.with_layout(turned)
    }
}

/// The elements of row-major storage.
pub(crate) fn slice<'a>(name: &'static str, tensor: &'a FlexTensor) -> Result<TensorRef<'a>> {
    // `FlexTensor::as_slice` panics on storage that is not aligned, so it is cast here.
    let elements = tensor.layout().contiguous_offsets().map(|(from, to)| from..to);
    let slice = elements.and_then(|range| match tensor.dtype() {
        DType::F32 => cast(tensor.bytes())?.get(range).map(TensorRef::F32),
        DType::BF16 => cast(tensor.bytes())?.get(range).map(TensorRef::Bf16),
        _ => None,
    });
    slice.ok_or(Error::Storage { tensor: name })
}

/// The storage to write, if nothing else holds it and the tensor is all of it in row-major order.
pub(crate) fn whole<E: Element + Pod>(tensor: &mut FlexTensor) -> Option<&mut [E]> {
    let elements = tensor.layout().num_elements();
    if E::dtype() != tensor.dtype()
        || !tensor.is_contiguous()
        || cast::<E>(tensor.bytes()).is_none_or(|all| all.len() != elements)
    {
        return None;
    }
    tensor.try_storage_mut()
}

fn cast<E: Pod>(bytes: &[u8]) -> Option<&[E]> {
    bytemuck::try_cast_slice(bytes).ok()
}

/// Adopts a gradient in shape and dtype of `like`.
pub(crate) fn adopt(values: Vec<f32>, like: &FlexTensor) -> FlexTensor {
    let bytes = match like.dtype() {
        DType::BF16 => Bytes::from_elems(values.into_iter().map(bf16::from_f32).collect::<Vec<_>>()),
        _ => Bytes::from_elems(values),
    };
    FlexTensor::new(bytes, Layout::contiguous(like.layout().shape().clone()), like.dtype())
}
