//! Values as they are handed over, and as they are looked at.

use grpo_core::{Dtype, TensorRef};
use half::bf16;
use std::ops::Deref;

/// Values of a dtype, to hand over; as a slice they are f32, which both dtypes fit into.
#[derive(Clone, Debug)]
pub struct Tensor {
    wide: Vec<f32>,
    /// The same in bf16, if that is the dtype.
    narrow: Option<Vec<bf16>>,
}

impl Tensor {
    /// `values`, rounded to `dtype`.
    pub fn new(values: Vec<f32>, dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self { wide: values, narrow: None },
            Dtype::Bf16 => {
                let narrow: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
                Self { wide: narrow.iter().map(|x| x.to_f32()).collect(), narrow: Some(narrow) }
            }
        }
    }

    /// The same with `change` made to the values, which are rounded again.
    pub fn with(&self, change: impl FnOnce(&mut [f32])) -> Self {
        let mut values = self.wide.clone();
        change(&mut values);
        Self::new(values, self.dtype())
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        if self.narrow.is_some() { Dtype::Bf16 } else { Dtype::F32 }
    }

    /// The values as an implementation wants them.
    pub fn as_ref(&self) -> TensorRef<'_> {
        match &self.narrow {
            None => TensorRef::F32(&self.wide),
            Some(narrow) => TensorRef::Bf16(narrow),
        }
    }

    /// The values as the oracle wants them.
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

/// `values` `[rows, columns]` as `[columns, rows]`.
pub fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..rows * columns).map(|i| values[i % rows * columns + i / rows]).collect()
}
