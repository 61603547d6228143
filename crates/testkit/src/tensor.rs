//! Tensors of test cases.

use grpo_core::{Dtype, TensorRef};
use half::bf16;
use std::ops::Deref;

/// Values of a dtype for an implementation. They dereference to an f32 slice, which represents both dtypes exactly.
#[derive(Clone, Debug)]
pub struct Tensor {
    wide: Vec<f32>,
    /// The values in bf16, if that is the dtype.
    narrow: Option<Vec<bf16>>,
}

impl Tensor {
    /// Rounds `values` to `dtype`.
    pub fn new(values: Vec<f32>, dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self { wide: values, narrow: None },
            Dtype::Bf16 => {
                let narrow: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
                Self { wide: narrow.iter().map(|x| x.to_f32()).collect(), narrow: Some(narrow) }
            }
        }
    }

    /// Applies `change` to the values and rounds them again.
    pub fn with(&self, change: impl FnOnce(&mut [f32])) -> Self {
        let mut values = self.wide.clone();
        change(&mut values);
        Self::new(values, self.dtype())
    }

    /// Returns the element type.
    pub fn dtype(&self) -> Dtype {
        if self.narrow.is_some() { Dtype::Bf16 } else { Dtype::F32 }
    }

    /// Returns the values for an implementation.
    pub fn as_ref(&self) -> TensorRef<'_> {
        match &self.narrow {
            None => TensorRef::F32(&self.wide),
            Some(narrow) => TensorRef::Bf16(narrow),
        }
    }

    /// Returns the values in a tensor that an implementation can overwrite.
    pub fn to_owned(&self) -> grpo_core::Tensor {
        match &self.narrow {
            None => grpo_core::Tensor::F32(self.wide.clone()),
            Some(narrow) => grpo_core::Tensor::Bf16(narrow.clone()),
        }
    }

    /// Returns the values for the oracle.
    pub fn in_f64(&self) -> Vec<f64> {
        self.iter().copied().map(f64::from).collect()
    }
}

impl Deref for Tensor {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.wide
    }
}

/// Transposes `values` from `[rows, columns]` to `[columns, rows]`.
pub fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..rows * columns).map(|i| values[i % rows * columns + i / rows]).collect()
}
