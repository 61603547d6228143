//! Tensors of a checkpoint as safetensors files.

use crate::error::{Error, Result};
use models::NamedTensor;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

/// The tensors as the bytes of a safetensors file, in f32.
pub(super) fn to_safetensors(tensors: &[NamedTensor]) -> Result<Vec<u8>> {
    let refused = |e: safetensors::SafeTensorError| Error::Text(format!("safetensors: {e}"));
    let bytes: Vec<Vec<u8>> =
        tensors.iter().map(|t| t.data.iter().flat_map(|value| value.to_le_bytes()).collect()).collect();
    let mut views = Vec::with_capacity(tensors.len());
    for (tensor, bytes) in tensors.iter().zip(&bytes) {
        let view = TensorView::new(Dtype::F32, tensor.shape.clone(), bytes).map_err(refused)?;
        views.push((tensor.name.as_str(), view));
    }
    safetensors::serialize(views, None).map_err(refused)
}

/// The tensors of a safetensors file, sorted by name.
///
/// # Errors
/// A text that says what is wrong with the file.
pub(super) fn parse_tensors(bytes: &[u8]) -> Result<Vec<NamedTensor>, String> {
    let file = SafeTensors::deserialize(bytes).map_err(|e| format!("it is not a safetensors file: {e}"))?;
    let mut views: Vec<_> = file.iter().collect();
    views.sort_unstable_by_key(|(name, _)| *name);
    views
        .into_iter()
        .map(|(name, view)| {
            if view.dtype() != Dtype::F32 {
                return Err(format!("tensor `{name}` is {:?}, expected F32", view.dtype()));
            }
            let data = view.data().as_chunks::<4>().0.iter().map(|chunk| f32::from_le_bytes(*chunk)).collect();
            Ok(NamedTensor { name: name.to_owned(), shape: view.shape().to_vec(), data })
        })
        .collect()
}
