//! Conversion of burn tensors to the host slices that the loss reads and writes.

use crate::error::{Error, Result};
use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Bytes, DType, Element, Tensor, bf16};
use bytemuck::Pod;
use grpo_core::{Dtype, HeadLayout, TensorRef};

/// Returns the dtype of a tensor, if the loss supports it.
pub(crate) fn dtype<const D: usize>(name: &'static str, tensor: &Tensor<D>) -> Result<Dtype> {
    match tensor.dtype() {
        DType::F32 => Ok(Dtype::F32),
        DType::BF16 => Ok(Dtype::Bf16),
        found => Err(Error::Dtype { tensor: name, expected: "f32 or bf16", found }),
    }
}

/// Refuses a tensor whose dtype differs from the hidden states' dtype.
pub(crate) fn same_dtype<const D: usize>(name: &'static str, tensor: &Tensor<D>, expected: Dtype) -> Result<()> {
    if dtype(name, tensor)? == expected {
        return Ok(());
    }
    Err(Error::Dtype { tensor: name, expected: expected.name(), found: tensor.dtype() })
}

/// Returns row-major storage: the tensor itself if it is row-major, else a copy.
pub(crate) fn row_major(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() }
}

/// An LM head with the layout of its storage.
pub(crate) struct Head {
    pub(crate) storage: FlexTensor,
    /// The layout of the storage.
    pub(crate) layout: HeadLayout,
    /// `true` if the storage is the transpose of the given tensor.
    transposed: bool,
}

impl Head {
    /// Creates a head. A transposed view, such as a transposed tied embedding, is read in place with the other layout.
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

    /// Converts the gradient to a tensor with the shape of the given head.
    pub(crate) fn gradient(&self, values: Vec<f32>) -> FlexTensor {
        let gradient = adopt(values, &self.storage);
        if !self.transposed {
            return gradient;
        }
        let turned = gradient.layout().transpose(0, 1);
        gradient.with_layout(turned)
    }
}

/// Returns the elements of a row-major tensor, f32 or bf16, without a copy.
///
/// # Errors
/// [`Error::Storage`] for another dtype, layout or alignment.
pub fn elements<'a>(name: &'static str, tensor: &'a FlexTensor) -> Result<TensorRef<'a>> {
    // `FlexTensor::as_slice` panics on misaligned storage, so this function casts the bytes itself.
    let range = tensor.layout().contiguous_offsets().map(|(from, to)| from..to);
    let found = range.and_then(|range| match tensor.dtype() {
        DType::F32 => cast(tensor.bytes())?.get(range).map(TensorRef::F32),
        DType::BF16 => cast(tensor.bytes())?.get(range).map(TensorRef::Bf16),
        _ => None,
    });
    found.ok_or(Error::Storage { tensor: name })
}

/// Returns the storage for writing, if it is not shared and the tensor covers all of it in row-major order.
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

/// Converts a gradient to a tensor with the shape and dtype of `like`.
pub(crate) fn adopt(values: Vec<f32>, like: &FlexTensor) -> FlexTensor {
    let bytes = match like.dtype() {
        DType::BF16 => Bytes::from_elems(values.into_iter().map(bf16::from_f32).collect::<Vec<_>>()),
        _ => Bytes::from_elems(values),
    };
    FlexTensor::new(bytes, Layout::contiguous(like.layout().shape().clone()), like.dtype())
}
