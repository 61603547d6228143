//! Element-wise operations on vectors and scalars. There is no implicit broadcast.

use super::build::{Value, representable};
use super::kernel::Kind;
use crate::build::elementwise::same;
use crate::graph::{Binary, Comparison, Reducer, Unary};
use crate::operators::{common_operators, named, operators};
use crate::types::{Dtype, TensorType};

impl Value {
    /// Applies an operation of one floating-point operand: one of those below.
    #[track_caller]
    fn unary(&self, operation: Unary) -> Self {
        self.of_floats(Kind::Unary(operation))
    }

    /// Computes 2^x, which takes one multiplication less than e^x.
    #[track_caller]
    pub fn exp2(&self) -> Self {
        self.of_floats(Kind::Exp2)
    }

    #[track_caller]
    fn of_floats(&self, kind: Kind) -> Self {
        let ty = self.ty();
        let check = if ty.dtype.is_float() { Ok(ty.clone()) } else { Err(format!("not defined for {ty}")) };
        self.then(kind, &[], check)
    }

    /// Applies an operation of two operands of one type: one of those below.
    #[track_caller]
    fn binary(&self, operation: Binary, other: &Self) -> Self {
        let ty = self.ty();
        let logical = matches!(operation, Binary::And | Binary::Or);
        let legal = if logical { !ty.dtype.is_float() } else { ty.dtype != Dtype::Pred };
        let check = same(ty, other.ty()).and(if legal { Ok(ty.clone()) } else { Err(format!("not defined for {ty}")) });
        self.then(Kind::Binary(operation), &[other], check)
    }

    /// Compares element by element and returns predicates. No comparison holds with NaN: `Ne`, which would, exists in
    /// Mosaic for integers only.
    #[track_caller]
    pub fn compare(&self, direction: Comparison, other: &Self) -> Self {
        let legal = self.dtype() == Dtype::I32 || (self.dtype().is_float() && direction != Comparison::Ne);
        let legal = if legal { Ok(()) } else { Err(format!("{direction:?} is not defined for {}", self.ty())) };
        let check = same(self.ty(), other.ty()).and(legal).map(|()| self.ty().with_dtype(Dtype::Pred));
        self.then(Kind::Compare(direction), &[other], check)
    }

    /// Chooses between the elements of `on_true` and `on_false`; `self` is a predicate of the same shape.
    #[track_caller]
    pub fn select(&self, on_true: &Self, on_false: &Self) -> Self {
        let (p, ty) = (self.ty(), on_true.ty());
        let check = if *p == ty.with_dtype(Dtype::Pred) {
            same(ty, on_false.ty()).map(|()| Some(ty.clone()))
        } else {
            Err(format!("a predicate of the shape of {ty} expected, got {p}"))
        };
        self.builder().emit(Kind::Select, &[self, on_true, on_false], &[], check, ty.clone())
    }

    /// Converts to another dtype. Adds no operation if the dtype is already right.
    #[track_caller]
    pub fn convert(&self, dtype: Dtype) -> Self {
        if dtype == self.dtype() {
            return self.clone();
        }
        let legal = matches!(
            (self.dtype(), dtype),
            (Dtype::Bf16, Dtype::F32)
                | (Dtype::F32, Dtype::Bf16 | Dtype::I32)
                | (Dtype::I32, Dtype::F32)
                | (Dtype::Pred, Dtype::I32)
        );
        let check = if legal {
            Ok(self.ty().with_dtype(dtype))
        } else {
            Err(format!("no conversion of {} to {dtype}", self.ty()))
        };
        self.then(Kind::Convert, &[], check)
    }

    /// Repeats a scalar, or dimensions of size 1, to `shape`. Adds no operation if the shape is already right.
    #[track_caller]
    pub fn broadcast(&self, shape: &[usize]) -> Self {
        if self.shape() == shape {
            return self.clone();
        }
        let fits = self.shape().iter().zip(shape).all(|(from, to)| from == to || *from == 1);
        let ty = TensorType::new(self.dtype(), shape);
        let check = if self.shape().is_empty() || (fits && self.shape().len() == shape.len()) {
            representable(&ty).map(|()| ty)
        } else {
            Err(format!("{} to {ty}", self.ty()))
        };
        self.then(Kind::Broadcast, &[], check)
    }

    /// Reduces f32 entries along `dimension`, which stays with size 1, to their sum or maximum.
    #[track_caller]
    pub fn reduce(&self, reducer: Reducer, dimension: usize) -> Self {
        let mut ty = self.ty().clone();
        let check = match ty.shape.get_mut(dimension) {
            Some(_) if !matches!(reducer, Reducer::Add | Reducer::Max) => Err(format!("{reducer:?} of {ty}")),
            Some(size) if self.dtype() == Dtype::F32 => {
                *size = 1;
                Ok(ty)
            }
            _ => Err(format!("dimension {dimension} of {}, which should be of f32", self.ty())),
        };
        self.then(Kind::Reduce(reducer, dimension), &[], check)
    }

    /// Changes the shape and keeps the elements in row-major order.
    #[track_caller]
    pub fn reshape(&self, shape: &[usize]) -> Self {
        let ty = TensorType::new(self.dtype(), shape);
        let vectors = !shape.is_empty() && !self.shape().is_empty();
        let check = representable(&ty).and_then(|()| {
            let fits = vectors && ty.elements() == self.ty().elements();
            if fits { Ok(ty) } else { Err(format!("{} to {ty}", self.ty())) }
        });
        self.then(Kind::Reshape, &[], check)
    }

    /// Transposes a matrix.
    #[track_caller]
    pub fn transpose(&self) -> Self {
        let check = match self.shape() {
            [rows, columns] => Ok(TensorType::new(self.dtype(), [*columns, *rows])),
            _ => Err(format!("a matrix expected, got {}", self.ty())),
        };
        self.then(Kind::Transpose, &[], check)
    }

    /// Slices a part of `shape` that begins at `start`.
    #[track_caller]
    pub fn slice(&self, start: &[usize], shape: &[usize]) -> Self {
        let ranks = start.len() == self.shape().len() && shape.len() == start.len() && !shape.is_empty();
        let inside =
            start.iter().zip(shape).zip(self.shape()).all(|((s, n), size)| *n > 0 && n <= size && *s <= size - n);
        let check = if ranks && inside {
            Ok(TensorType::new(self.dtype(), shape))
        } else {
            Err(format!("{shape:?} at {start:?} of {}", self.ty()))
        };
        self.then(Kind::Slice(start.to_vec()), &[], check)
    }
}

common_operators!();
