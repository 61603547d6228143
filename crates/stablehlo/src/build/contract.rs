//! Dot products and reductions.

use super::{Builder, Value};
use crate::graph::{DotDimensions, Kind, Precision, Reducer};
use crate::types::{Dtype, TensorType};

impl Value {
    /// Multiplies and sums over `dimensions.contract`. The result has the batch dimensions, then the other dimensions
    /// of the left operand, then the other dimensions of the right operand. `dtype` is the dtype of the result; a wider
    /// dtype than the operands' keeps the precision of the accumulator.
    #[track_caller]
    pub fn dot_general(&self, other: &Self, dimensions: DotDimensions, dtype: Dtype, precision: Precision) -> Self {
        let check = dot_type(self.ty(), other.ty(), &dimensions, dtype);
        self.then(Kind::DotGeneral(dimensions, precision), &[other], check)
    }

    /// Reduces over `dimensions` and removes them.
    #[track_caller]
    pub fn reduce(&self, reducer: Reducer, dimensions: &[usize]) -> Self {
        self.builder().reduce(&[(self, reducer)], dimensions).swap_remove(0)
    }
}

impl Builder {
    /// Reduces several values of one shape over `dimensions` in a single pass.
    #[track_caller]
    pub fn reduce(&self, operands: &[(&Value, Reducer)], dimensions: &[usize]) -> Vec<Value> {
        let inits: Vec<Value> = operands.iter().map(|(v, r)| self.scalar(r.identity(v.dtype()), v.dtype())).collect();
        let shape = operands.first().map_or(&[][..], |(v, _)| v.shape());
        let check =
            operands.iter().map(|(v, r)| combines(*r, v.ty()).and(reduced(v.ty(), shape, dimensions))).collect();
        let check = if operands.is_empty() { Err("no operands".into()) } else { check };
        let kind =
            Kind::Reduce { reducers: operands.iter().map(|(_, r)| *r).collect(), dimensions: dimensions.to_vec() };
        let values: Vec<&Value> = operands.iter().map(|(v, _)| *v).chain(&inits).collect();
        self.emit_all(kind, &values, vec![], check, || operands.iter().map(|(v, _)| v.ty().clone()).collect())
    }
}

/// Checks that `reducer` supports the dtype of `ty`.
pub(super) fn combines(reducer: Reducer, ty: &TensorType) -> Result<(), String> {
    if reducer.fits(ty.dtype) { Ok(()) } else { Err(format!("{reducer:?} of {ty}")) }
}

fn reduced(ty: &TensorType, shape: &[usize], dimensions: &[usize]) -> Result<TensorType, String> {
    if ty.shape != shape {
        return Err(format!("operands of one shape expected, got {shape:?} and {:?}", ty.shape));
    }
    distinct(dimensions, ty)?;
    let kept = (0..ty.rank()).filter(|d| !dimensions.contains(d)).map(|d| ty.shape[d]).collect::<Vec<_>>();
    Ok(TensorType::new(ty.dtype, kept))
}

/// Checks that `dimensions` are distinct dimensions of `ty`.
pub(super) fn distinct(dimensions: &[usize], ty: &TensorType) -> Result<(), String> {
    let legal = dimensions.iter().enumerate().all(|(i, d)| *d < ty.rank() && !dimensions[..i].contains(d));
    if legal { Ok(()) } else { Err(format!("distinct dimensions of {ty} expected, got {dimensions:?}")) }
}

fn dot_type(a: &TensorType, b: &TensorType, d: &DotDimensions, dtype: Dtype) -> Result<TensorType, String> {
    if a.dtype != b.dtype {
        return Err(format!("operands of one dtype expected, got {a} and {b}"));
    }
    if a.dtype.is_float() != dtype.is_float() || dtype.bytes() < a.dtype.bytes() {
        return Err(format!("a result at least as wide as {} expected, got {dtype}", a.dtype));
    }
    let left: Vec<usize> = d.batch.0.iter().chain(&d.contract.0).copied().collect();
    let right: Vec<usize> = d.batch.1.iter().chain(&d.contract.1).copied().collect();
    distinct(&left, a)?;
    distinct(&right, b)?;
    if d.batch.0.len() != d.batch.1.len() || left.len() != right.len() {
        return Err(format!("as many dimensions on the left as on the right expected, got {d:?}"));
    }
    if let Some((l, r)) = left.iter().zip(&right).find(|(l, r)| a.shape[**l] != b.shape[**r]) {
        return Err(format!("dimension {l} of {a} and {r} of {b} should have one size"));
    }
    let rest = |ty: &TensorType, used: &[usize]| {
        (0..ty.rank()).filter(|d| !used.contains(d)).map(|d| ty.shape[d]).collect::<Vec<_>>()
    };
    let mut shape: Vec<usize> = d.batch.0.iter().map(|d| a.shape[*d]).collect();
    shape.extend(rest(a, &left));
    shape.extend(rest(b, &right));
    Ok(TensorType::new(dtype, shape))
}
