//! Values of tensors in host memory.

use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use grpo_burn::custom_op::{Operand, values};
use grpo_policy::{Error, Result};

/// Copies the values of a tensor to a list.
pub(crate) fn to_host<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    // All tensors of this crate are f32, so the conversion cannot fail.
    tensor.into_data().convert::<f32>().try_into_vec().unwrap_or_default()
}

/// Returns the row-major storage of a tensor, without a copy if it is already row-major.
pub(super) fn storage<const D: usize>(tensor: Tensor<D>) -> Result<FlexTensor> {
    Ok(Operand::new("weight", tensor).map_err(Error::other)?.row_major().storage)
}

/// Returns the values of a storage from [`storage`].
pub(super) fn read(storage: &FlexTensor) -> Result<&[f32]> {
    values("weight", storage).map_err(Error::other)
}
