//! Tensors of candle as slices of the host's memory.

use crate::error::{Error, Result};
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use grpo_core::half::{bf16, slice::HalfFloatSliceExt, vec::HalfBitsVecExt};
use grpo_core::{Dtype, HeadLayout, Tensor as Values, TensorMut, TensorRef};
use std::convert::Infallible;
use std::ops::Deref;

/// A checked argument: on the CPU, row-major.
#[derive(Debug)]
pub(crate) struct Operand {
    name: &'static str,
    /// The argument as passed, which is the node of the graph.
    pub(crate) node: Tensor,
    /// The same elements in row-major order, without a node.
    rows: Tensor,
    /// `true` if `rows` is the transposed argument.
    is_transposed: bool,
}

impl Operand {
    /// Checks `tensor`; copies it only if it is not row-major.
    pub(crate) fn new(name: &'static str, tensor: &Tensor) -> Result<Self> {
        check_device(name, tensor)?;
        Ok(Self { name, node: tensor.clone(), rows: tensor.detach().contiguous()?, is_transposed: false })
    }

    /// Checks an LM head. A transposed view is read in place, in the other layout.
    pub(crate) fn head(tensor: &Tensor, layout: HeadLayout) -> Result<(Self, HeadLayout)> {
        let name = "lm_head";
        check_device(name, tensor)?;
        let transposed = tensor.detach().t()?;
        if tensor.is_contiguous() || !transposed.is_contiguous() {
            return Ok((Self::new(name, tensor)?, layout));
        }
        let other = match layout {
            HeadLayout::VocabHidden => HeadLayout::HiddenVocab,
            HeadLayout::HiddenVocab => HeadLayout::VocabHidden,
        };
        Ok((Self { name, node: tensor.clone(), rows: transposed, is_transposed: true }, other))
    }

    /// Returns `true` if candle tracks the gradient of the argument.
    pub(crate) fn is_tracked(&self) -> bool {
        self.node.track_op()
    }

    /// Locks the storage for reading.
    pub(crate) fn lock(&self) -> Locked<impl Deref<Target = Storage>> {
        let (storage, layout) = self.rows.storage_and_layout();
        Locked { name: self.name, storage, start: layout.start_offset(), len: layout.shape().elem_count() }
    }

    /// Calls `f` with a copy of the elements, which it overwrites with their gradient; returns its result and the gradient.
    pub(crate) fn overwrite<T>(&self, f: impl FnOnce(TensorMut<'_>) -> grpo_core::Result<T>) -> Result<(T, Tensor)> {
        let mut copy = match self.lock().slice::<Infallible>()? {
            TensorRef::F32(values) => Values::F32(values.to_vec()),
            TensorRef::Bf16(values) => Values::Bf16(values.to_vec()),
        };
        let result = f(copy.as_mut())?;
        let gradient = match copy {
            Values::F32(values) => Tensor::from_vec(values, self.node.shape(), &Device::Cpu)?,
            Values::Bf16(values) => Tensor::from_vec(values, self.node.shape(), &Device::Cpu)?,
        };
        Ok((result, gradient))
    }

    /// Returns the argument and its gradient, made from values in the order of the slice. The dtype is the argument's.
    pub(crate) fn with_gradient(self, values: Option<Vec<f32>>) -> Result<(Tensor, Option<Tensor>)> {
        let Self { node, rows, is_transposed, .. } = self;
        let gradient = |values: Vec<f32>| {
            let gradient = match node.dtype() {
                DType::BF16 => Tensor::from_vec(narrow(values), rows.shape(), &Device::Cpu)?,
                _ => Tensor::from_vec(values, rows.shape(), &Device::Cpu)?,
            };
            let gradient = if is_transposed { gradient.t()? } else { gradient };
            gradient.reshape(node.shape())
        };
        let gradient = values.map(gradient).transpose()?;
        Ok((node, gradient))
    }
}

/// The storage of an argument during a call.
pub(crate) struct Locked<S> {
    name: &'static str,
    storage: S,
    start: usize,
    len: usize,
}

impl<S: Deref<Target = Storage>> Locked<S> {
    /// Returns the elements.
    pub(crate) fn slice<D>(&self) -> Result<TensorRef<'_, D>> {
        let range = self.start..self.start + self.len;
        match &*self.storage {
            Storage::Cpu(CpuStorage::F32(values)) => Ok(TensorRef::F32(&values[range])),
            Storage::Cpu(CpuStorage::BF16(values)) => Ok(TensorRef::Bf16(&values[range])),
            other => Err(Error::Dtype { tensor: self.name, expected: "F32 or BF16", found: other.dtype() }),
        }
    }
}

/// Rounds to bf16. Returns the memory of `values` to the system meanwhile, so that the peak is not the sum of both.
fn narrow(mut values: Vec<f32>) -> Vec<bf16> {
    const BLOCK: usize = 4 << 20;
    // Zeros of an integer are pages that the system provides at the first write.
    let mut narrow = vec![0u16; values.len()].reinterpret_into::<bf16>();
    while !values.is_empty() {
        let start = (values.len() - 1) / BLOCK * BLOCK;
        narrow[start..values.len()].convert_from_f32_slice(&values[start..]);
        values.truncate(start);
        values.shrink_to_fit();
    }
    narrow
}

fn check_device(name: &'static str, tensor: &Tensor) -> Result<()> {
    match tensor.device() {
        Device::Cpu => Ok(()),
        device => Err(Error::NotOnCpu { tensor: name, device: device.location() }),
    }
}

/// Returns the dtype of a tensor.
pub(crate) fn dtype(name: &'static str, tensor: &Tensor) -> Result<Dtype> {
    match tensor.dtype() {
        DType::F32 => Ok(Dtype::F32),
        DType::BF16 => Ok(Dtype::Bf16),
        found => Err(Error::Dtype { tensor: name, expected: "F32 or BF16", found }),
    }
}

/// Checks that a tensor has the dtype of the hidden states.
pub(crate) fn same_dtype(name: &'static str, tensor: &Tensor, expected: Dtype) -> Result<()> {
    let word = match expected {
        Dtype::F32 => "F32, as hidden",
        Dtype::Bf16 => "BF16, as hidden",
    };
    match dtype(name, tensor)? == expected {
        true => Ok(()),
        false => Err(Error::Dtype { tensor: name, expected: word, found: tensor.dtype() }),
    }
}

/// Returns the last dimension of `[N, C]` or `[B, T, C]`. The product of the other dimensions must be the number of tokens.
pub(crate) fn columns(name: &'static str, tensor: &Tensor, tokens: usize) -> Result<usize> {
    match tensor.dims().split_last() {
        Some((columns, leading @ [_, ..])) if leading.iter().product::<usize>() == tokens => Ok(*columns),
        _ => Err(Error::Shape {
            tensor: name,
            expected: format!("[N, C] or [B, T, C] with N = B x T = {tokens}, the tokens of the batch"),
            found: tensor.dims().to_vec(),
        }),
    }
}

/// Returns V of a head for hidden states of `hidden` columns.
pub(crate) fn vocabulary(lm_head: &Tensor, hidden: usize, layout: HeadLayout) -> Result<usize> {
    match (lm_head.dims(), layout) {
        (&[vocab, size], HeadLayout::VocabHidden) | (&[size, vocab], HeadLayout::HiddenVocab) if size == hidden => {
            Ok(vocab)
        }
        (dims, _) => Err(Error::Shape {
            tensor: "lm_head",
            expected: format!(
                "{} with H = {hidden}, as hidden has (the layout is GrpoLossBuilder::head_layout's)",
                if layout == HeadLayout::VocabHidden { "[V, H]" } else { "[H, V]" }
            ),
            found: dims.to_vec(),
        }),
    }
}
