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

    /// Returns the maximum along `dimension` and its index, in one pass. Both have the shape of this value without the
    /// dimension; the index is i32: the smallest one among equal elements, or the index of the first NaN if there is
    /// one. The maximum is NaN if there is a NaN. The element at the returned index gets the whole cotangent.
    ///
    /// ```
    /// use grpo_stablehlo::{Array, Builder, Dtype, TensorType};
    ///
    /// let f = Builder::new();
    /// let logits = f.argument("logits", TensorType::new(Dtype::F32, [2, 3]));
    /// let (largest, ids) = logits.largest(1);
    /// let module = f.finish("greedy", &[("largest", &largest), ("ids", &ids)])?;
    ///
    /// let results = module.interpret(&[Array::floats(Dtype::F32, [2, 3], [0.5, 2.0, 2.0, 1.0, -1.0, 0.0])?])?;
    /// assert_eq!((results[0].to_floats(), results[1].to_ints()), (vec![2.0, 1.0], vec![1, 0]));
    /// # Ok::<(), grpo_stablehlo::Error>(())
    /// ```
    #[track_caller]
    pub fn largest(&self, dimension: usize) -> (Self, Self) {
        let (f, kind) = (self.builder(), Kind::ArgMax { dimension });
        let ty = self.ty();
        let check = match ty.shape.get(dimension) {
            None | Some(0) => Err(format!("a dimension with elements expected, got dimension {dimension} of {ty}")),
            Some(size) if i32::try_from(*size).is_err() => Err(format!("indices of i32 expected, got {ty}")),
            Some(_) => reduced(ty, &[dimension]).map(|ty| vec![ty.clone(), ty.with_dtype(Dtype::I32)]),
        };
        let types = || [ty.dtype, Dtype::I32].map(TensorType::scalar).to_vec();
        let operands = match check {
            Ok(_) => {
                let (index, first) = (f.iota(dimension, ty.with_dtype(Dtype::I32)), Reducer::Max.identity(ty.dtype));
                vec![self.clone(), index, f.scalar(first, ty.dtype), f.scalar(i64::from(i32::MAX), Dtype::I32)]
            }
            Err(_) => vec![self.clone()],
        };
        let mut results = f.emit_all(kind, &operands.iter().collect::<Vec<_>>(), vec![], check, types).into_iter();
        let (Some(largest), Some(index)) = (results.next(), results.next()) else { unreachable!("two results") };
        (largest, index)
    }
}

impl Builder {
    /// Reduces several values of one shape over `dimensions` in a single pass.
    #[track_caller]
    pub fn reduce(&self, operands: &[(&Value, Reducer)], dimensions: &[usize]) -> Vec<Value> {
        let inits: Vec<Value> = operands.iter().map(|(v, r)| self.scalar(r.identity(v.dtype()), v.dtype())).collect();
        let shape = operands.first().map_or(&[][..], |(v, _)| v.shape());
        let check = operands.iter().map(|(v, r)| {
            combines(*r, v.ty())?;
            if v.shape() != shape {
                return Err(format!("operands of one shape expected, got {shape:?} and {:?}", v.shape()));
            }
            reduced(v.ty(), dimensions)
        });
        let check = if operands.is_empty() { Err("no operands".into()) } else { check.collect() };
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

fn reduced(ty: &TensorType, dimensions: &[usize]) -> Result<TensorType, String> {
    distinct(dimensions, ty)?;
    Ok(TensorType::new(ty.dtype, sizes_except(ty, dimensions)))
}

/// Returns the sizes of all other dimensions.
fn sizes_except(ty: &TensorType, dimensions: &[usize]) -> Vec<usize> {
    (0..ty.rank()).filter(|d| !dimensions.contains(d)).map(|d| ty.shape[d]).collect()
}

/// Checks that `dimensions` are distinct dimensions of `ty`.
pub(crate) fn distinct(dimensions: &[usize], ty: &TensorType) -> Result<(), String> {
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
    let mut shape: Vec<usize> = d.batch.0.iter().map(|d| a.shape[*d]).collect();
    shape.extend(sizes_except(a, &left));
    shape.extend(sizes_except(b, &right));
    Ok(TensorType::new(dtype, shape))
}
