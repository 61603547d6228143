//! Operations that move elements.

use super::contract::{combines, distinct};
use super::{Builder, Value};
use crate::graph::{GatherDimensions, Kind, Reducer, ScatterDimensions};
use crate::types::{Dtype, TensorType};

impl Value {
    /// Repeats along new or size-1 dimensions: dimension i becomes dimension `dimensions[i]` of a value of `shape`.
    #[track_caller]
    pub fn broadcast_in_dim(&self, shape: &[usize], dimensions: &[usize]) -> Self {
        let ty = self.ty();
        let fits = dimensions.len() == ty.rank()
            && dimensions.windows(2).all(|w| w[0] < w[1])
            && dimensions.iter().zip(&ty.shape).all(|(d, size)| *d < shape.len() && (*size == 1 || *size == shape[*d]));
        let check = if fits {
            Ok(TensorType::new(ty.dtype, shape))
        } else {
            Err(format!("{ty} does not fit into {shape:?} at dimensions {dimensions:?}"))
        };
        self.then(Kind::BroadcastInDim { dimensions: dimensions.to_vec() }, &[], check)
    }

    /// Changes the shape and keeps the elements in row-major order. Adds no operation if the shape is already right.
    #[track_caller]
    pub fn reshape(&self, shape: &[usize]) -> Self {
        if shape == self.shape() {
            return self.clone();
        }
        let result = TensorType::new(self.dtype(), shape);
        let check = if result.elements() == self.ty().elements() {
            Ok(result)
        } else {
            Err(format!("{} has not as many elements as {shape:?}", self.ty()))
        };
        self.then(Kind::Reshape, &[], check)
    }

    /// Permutes dimensions: dimension i of the result is dimension `permutation[i]`.
    #[track_caller]
    pub fn transpose(&self, permutation: &[usize]) -> Self {
        let ty = self.ty();
        let check = if permutation.len() == ty.rank() {
            distinct(permutation, ty)
                .map(|()| TensorType::new(ty.dtype, permutation.iter().map(|d| ty.shape[*d]).collect::<Vec<_>>()))
        } else {
            Err(format!("{} dimensions expected, got {permutation:?}", ty.rank()))
        };
        self.then(Kind::Transpose { permutation: permutation.to_vec() }, &[], check)
    }

    /// Slices each dimension from `start` to before `limit`.
    #[track_caller]
    pub fn slice(&self, start: &[usize], limit: &[usize]) -> Self {
        let ty = self.ty();
        let legal = [start.len(), limit.len()] == [ty.rank(); 2]
            && (0..ty.rank()).all(|d| start[d] <= limit[d] && limit[d] <= ty.shape[d]);
        let check = if legal {
            Ok(TensorType::new(ty.dtype, limit.iter().zip(start).map(|(to, from)| to - from).collect::<Vec<_>>()))
        } else {
            Err(format!("a window of {ty} expected, got {start:?}..{limit:?}"))
        };
        self.then(Kind::Slice { start: start.to_vec(), limit: limit.to_vec() }, &[], check)
    }

    /// Slices a window of `sizes` that begins at `starts`, scalars of one integer dtype. The start is clamped so that
    /// the window fits.
    #[track_caller]
    pub fn dynamic_slice(&self, starts: &[&Self], sizes: &[usize]) -> Self {
        let ty = self.ty();
        let check = if sizes.len() == ty.rank() && sizes.iter().zip(&ty.shape).all(|(s, size)| s <= size) {
            indices(starts, ty).map(|()| TensorType::new(ty.dtype, sizes))
        } else {
            Err(format!("a window of {ty} expected, got sizes {sizes:?}"))
        };
        self.then(Kind::DynamicSlice { sizes: sizes.to_vec() }, starts, check)
    }

    /// Replaces the window that begins at `starts` by `update`. The start is clamped so that the window fits.
    #[track_caller]
    pub fn dynamic_update_slice(&self, update: &Self, starts: &[&Self]) -> Self {
        let (ty, u) = (self.ty(), update.ty());
        let fits = u.dtype == ty.dtype && u.rank() == ty.rank() && u.shape.iter().zip(&ty.shape).all(|(u, s)| u <= s);
        let check = if fits {
            indices(starts, ty).map(|()| ty.clone())
        } else {
            Err(format!("a window of {ty} expected, got {u}"))
        };
        let others: Vec<&Self> = std::iter::once(update).chain(starts.iter().copied()).collect();
        self.then(Kind::DynamicUpdateSlice, &others, check)
    }

    /// Adds copies of `value`, a scalar, before and after each dimension.
    #[track_caller]
    pub fn pad(&self, value: &Self, low: &[usize], high: &[usize]) -> Self {
        let ty = self.ty();
        let check = if value.ty() != &TensorType::scalar(ty.dtype) {
            Err(format!("a scalar {} to pad with expected, got {}", ty.dtype, value.ty()))
        } else if [low.len(), high.len()] != [ty.rank(); 2] {
            Err(format!("{} sizes each expected, got {low:?} and {high:?}", ty.rank()))
        } else {
            let size = |d: usize| ty.shape[d].checked_add(low[d])?.checked_add(high[d]);
            let sizes: Option<Vec<usize>> = (0..ty.rank()).map(size).collect();
            let sizes = sizes.ok_or_else(|| format!("{ty} with {low:?} and {high:?} around it has no size"));
            sizes.map(|sizes| TensorType::new(ty.dtype, sizes))
        };
        self.then(Kind::Pad { low: low.to_vec(), high: high.to_vec() }, &[value], check)
    }

    /// Gathers windows at `indices`. `shape` is the shape of the result; StableHLO infers it from the dimension
    /// numbers.
    #[track_caller]
    pub fn gather(&self, indices: &Self, dimensions: GatherDimensions, shape: &[usize]) -> Self {
        let ty = self.ty();
        let windows = dimensions.slice_sizes.len() == ty.rank()
            && dimensions.slice_sizes.iter().zip(&ty.shape).all(|(s, size)| s <= size);
        let check = if !indices.dtype().is_integer() {
            Err(format!("integer indices expected, got {}", indices.ty()))
        } else if !windows {
            Err(format!("a window of {ty} expected, got sizes {:?}", dimensions.slice_sizes))
        } else {
            Ok(TensorType::new(ty.dtype, shape))
        };
        self.then(Kind::Gather(dimensions), &[indices], check)
    }

    /// Combines `updates` into the value at `indices`.
    #[track_caller]
    pub fn scatter(&self, indices: &Self, updates: &Self, dimensions: ScatterDimensions, reducer: Reducer) -> Self {
        let ty = self.ty();
        let check = if !indices.dtype().is_integer() {
            Err(format!("integer indices expected, got {}", indices.ty()))
        } else if updates.dtype() != ty.dtype {
            Err(format!("updates of {} expected, got {}", ty.dtype, updates.ty()))
        } else {
            combines(reducer, ty).map(|()| ty.clone())
        };
        self.then(Kind::Scatter(dimensions, reducer), &[indices, updates], check)
    }
}

impl Builder {
    /// Concatenates values along `dimension`.
    #[track_caller]
    pub fn concatenate(&self, values: &[&Value], dimension: usize) -> Value {
        let fallback = values.first().map_or(TensorType::scalar(Dtype::F32), |v| v.ty().clone());
        self.emit(Kind::Concatenate { dimension }, values, concatenated(values, dimension), &fallback)
    }
}

fn concatenated(values: &[&Value], dimension: usize) -> Result<TensorType, String> {
    let Some(first) = values.first() else { return Err("no operands".into()) };
    let mut result = first.ty().clone();
    if dimension >= result.rank() {
        return Err(format!("dimension {dimension} of {result}"));
    }
    for value in &values[1..] {
        let ty = value.ty();
        let fits = ty.dtype == result.dtype
            && ty.rank() == result.rank()
            && (0..ty.rank()).all(|d| d == dimension || ty.shape[d] == result.shape[d]);
        if !fits {
            return Err(format!("{ty} does not continue {} along dimension {dimension}", first.ty()));
        }
        let size = result.shape[dimension].checked_add(ty.shape[dimension]);
        result.shape[dimension] =
            size.ok_or_else(|| format!("dimension {dimension} of {result} and {ty} overflows"))?;
    }
    Ok(result)
}

/// Checks that `starts` are integer scalars of one dtype, one per dimension.
fn indices(starts: &[&Value], ty: &TensorType) -> Result<(), String> {
    let legal = starts.len() == ty.rank()
        && starts.iter().all(|s| s.shape().is_empty() && s.dtype().is_integer() && s.dtype() == starts[0].dtype());
    if legal {
        Ok(())
    } else {
        let found: Vec<String> = starts.iter().map(|s| s.ty().to_string()).collect();
        Err(format!("one integer scalar per dimension of {ty} expected, got {}", found.join(", ")))
    }
}
