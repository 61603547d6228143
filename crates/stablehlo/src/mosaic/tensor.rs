//! Tensors of [`super::interpret`].

use super::build::representable;
use crate::error::{Error, Result};
use crate::types::{Dtype, TensorType};
use std::panic::Location;

/// A dense tensor, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub(super) ty: TensorType,
    pub(super) data: Data,
}

/// The elements of a tensor, row-major.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// Elements of f32 or bf16, rounded to their dtype.
    Float(Vec<f32>),
    /// Elements of i32.
    Int(Vec<i32>),
    /// Elements that are predicates.
    Pred(Vec<bool>),
}

/// The value of undefined integers: never a valid index.
pub(super) const POISON: i32 = -0x5A5A_5A5B;

impl Tensor {
    /// Makes a tensor of f32 or bf16 and rounds the numbers to it.
    ///
    /// # Errors
    /// Returns an error if the dtype is another one, or the number of elements does not match the shape.
    #[track_caller]
    pub fn floats(dtype: Dtype, shape: impl Into<Vec<usize>>, numbers: impl IntoIterator<Item = f32>) -> Result<Self> {
        let numbers = numbers.into_iter().map(|x| round(x, dtype)).collect();
        Self { ty: TensorType::new(dtype, shape), data: Data::Float(numbers) }.checked()
    }

    /// Makes a tensor of i32.
    ///
    /// # Errors
    /// Returns an error if the number of elements does not match the shape.
    #[track_caller]
    pub fn ints(shape: impl Into<Vec<usize>>, numbers: impl IntoIterator<Item = i32>) -> Result<Self> {
        Self { ty: TensorType::new(Dtype::I32, shape), data: Data::Int(numbers.into_iter().collect()) }.checked()
    }

    #[track_caller]
    fn checked(self) -> Result<Self> {
        let (count, legal) = match &self.data {
            Data::Float(x) => (x.len(), matches!(self.ty.dtype, Dtype::F32 | Dtype::Bf16)),
            Data::Int(x) => (x.len(), true),
            Data::Pred(x) => (x.len(), true),
        };
        if legal && representable(&self.ty).is_ok() && count == self.ty.elements() {
            return Ok(self);
        }
        let reason = format!("{count} numbers of f32, bf16 or i32 for {}", self.ty);
        Err(Error::Operation { operation: "mosaic::Tensor", reason, at: Location::caller() })
    }

    /// Returns the dtype and shape of the tensor.
    pub fn ty(&self) -> &TensorType {
        &self.ty
    }

    /// Returns the elements of the tensor, row-major.
    pub fn data(&self) -> &Data {
        &self.data
    }

    /// Returns the elements of the tensor as f32.
    pub fn to_floats(&self) -> Vec<f32> {
        match &self.data {
            Data::Float(x) => x.clone(),
            Data::Int(x) => x.iter().map(|x| *x as f32).collect(),
            Data::Pred(x) => x.iter().map(|x| f32::from(u8::from(*x))).collect(),
        }
    }

    /// Returns undefined memory: NaN, or [`POISON`].
    pub(super) fn poison(ty: TensorType) -> Self {
        let n = ty.elements();
        let data = match ty.dtype {
            Dtype::Pred => Data::Pred(vec![true; n]),
            dtype if dtype.is_float() => Data::Float(vec![f32::NAN; n]),
            _ => Data::Int(vec![POISON; n]),
        };
        Self { ty, data }
    }

    /// Copies a box of `size` from `source` at `from` to `self` at `to`. The box must be inside of both, which must
    /// have one dtype and rank.
    pub(super) fn copy(&mut self, to: &[usize], source: &Self, from: &[usize], size: &[usize]) {
        match (&mut self.data, &source.data) {
            (Data::Float(t), Data::Float(s)) => copy(t, &self.ty.shape, to, s, &source.ty.shape, from, size),
            (Data::Int(t), Data::Int(s)) => copy(t, &self.ty.shape, to, s, &source.ty.shape, from, size),
            (Data::Pred(t), Data::Pred(s)) => copy(t, &self.ty.shape, to, s, &source.ty.shape, from, size),
            _ => {}
        }
    }
}

fn copy<T: Copy>(
    target: &mut [T],
    shape: &[usize],
    to: &[usize],
    source: &[T],
    source_shape: &[usize],
    from: &[usize],
    size: &[usize],
) {
    let ([rows, shape @ ..], [source_rows, source_shape @ ..]) = (shape, source_shape) else {
        target.copy_from_slice(source);
        return;
    };
    let ([to, to_rest @ ..], [from, from_rest @ ..], [size, size_rest @ ..]) = (to, from, size) else { return };
    if *rows == 0 || *source_rows == 0 {
        return;
    }
    if shape.is_empty() {
        target[*to..to + size].copy_from_slice(&source[*from..from + size]);
        return;
    }
    let (stride, source_stride) = (target.len() / rows, source.len() / source_rows);
    for i in 0..*size {
        let target = &mut target[(to + i) * stride..][..stride];
        let source = &source[(from + i) * source_stride..][..source_stride];
        copy(target, shape, to_rest, source, source_shape, from_rest, size_rest);
    }
}

/// Rounds `x` to the nearest number of `dtype`.
pub(super) fn round(x: f32, dtype: Dtype) -> f32 {
    if dtype == Dtype::Bf16 { half::bf16::from_f32(x).to_f32() } else { x }
}
