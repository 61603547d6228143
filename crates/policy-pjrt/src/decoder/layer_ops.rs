//! Operations shared by all layers.

use super::Compute;
use grpo_stablehlo::{Builder, DotDimensions, Dtype, GatherDimensions, TensorType, Value};

/// Broadcasts along leading or trailing dimensions.
pub(crate) trait Broadcast {
    /// Broadcasts the value, whose dimensions are the last ones of `like`, to the shape of `like`.
    fn along_last(&self, like: &Value) -> Value;
    /// Broadcasts the value, whose dimensions are the first ones of `like`, to the shape of `like`.
    fn along_first(&self, like: &Value) -> Value;
}

impl Broadcast for Value {
    #[track_caller]
    fn along_last(&self, like: &Value) -> Value {
        let (own, all) = (self.shape().len(), like.shape().len());
        self.broadcast_in_dim(like.shape(), &(all - own..all).collect::<Vec<_>>())
    }

    #[track_caller]
    fn along_first(&self, like: &Value) -> Value {
        self.broadcast_in_dim(like.shape(), &(0..self.shape().len()).collect::<Vec<_>>())
    }
}

/// The sizes of a value whose number of dimensions is known.
pub(crate) trait Dims {
    /// Returns the sizes of all dimensions.
    ///
    /// # Panics
    /// Panics if there are not N dimensions.
    fn dims<const N: usize>(&self) -> [usize; N];
}

impl Dims for Value {
    #[track_caller]
    fn dims<const N: usize>(&self) -> [usize; N] {
        match self.shape().try_into() {
            Ok(sizes) => sizes,
            Err(_) => unreachable!("operations of a layer know the number of dimensions, and {} is not {N}", self.ty()),
        }
    }
}

/// Computes a product with batch dimensions and one contracted dimension; the result is f32.
#[track_caller]
pub(crate) fn dot(
    left: &Value,
    right: &Value,
    batch: (&[usize], &[usize]),
    contract: (usize, usize),
    compute: Compute,
) -> Value {
    let dimensions =
        DotDimensions { batch: (batch.0.to_vec(), batch.1.to_vec()), contract: (vec![contract.0], vec![contract.1]) };
    left.dot_general(right, dimensions, Dtype::F32, compute.precision())
}

/// Returns a layer's slice `[...]` of `stack` `[L, ...]`; `number` is an i32 scalar.
#[track_caller]
pub(crate) fn layer_at(stack: &Value, number: &Value) -> Value {
    let mut sizes = stack.shape().to_vec();
    sizes[0] = 1;
    stack.dynamic_slice(&starts(stack, number).iter().collect::<Vec<_>>(), &sizes).reshape(&sizes[1..])
}

/// Replaces a layer's slice `[...]` of `stack` `[L, ...]`; `number` is an i32 scalar.
#[track_caller]
pub(crate) fn put_layer(stack: &Value, number: &Value, layer: &Value) -> Value {
    let layer = layer.reshape(&[&[1], layer.shape()].concat());
    stack.dynamic_update_slice(&layer, &starts(stack, number).iter().collect::<Vec<_>>())
}

/// Returns the start indices of a layer in `stack`.
fn starts(stack: &Value, number: &Value) -> Vec<Value> {
    let zeros = std::iter::repeat_n(number.like(0), stack.shape().len() - 1);
    std::iter::once(number.clone()).chain(zeros).collect()
}

/// Gathers the rows of `x` `[R, H]` at these indices `[...]`: `[..., H]`.
#[track_caller]
pub(crate) fn rows_at(x: &Value, indices: &Value) -> Value {
    let (rank, h) = (indices.shape().len(), x.shape()[1]);
    let dimensions = GatherDimensions {
        offset_dims: vec![rank],
        collapsed_slice_dims: vec![0],
        start_index_map: vec![0],
        index_vector_dim: rank,
        slice_sizes: vec![1, h],
        ..GatherDimensions::default()
    };
    x.gather(indices, dimensions, &[indices.shape(), &[h]].concat())
}

/// Returns `x` times `factor`, without an operation if it is 1.
pub(super) fn scaled(x: Value, factor: f64) -> Value {
    if factor == 1.0 { x } else { &x * x.like(factor) }
}

/// Returns the given columns of the last dimension.
pub(super) fn last_columns(x: &Value, columns: std::ops::Range<usize>) -> Value {
    let (mut start, mut limit) = (vec![0; x.shape().len()], x.shape().to_vec());
    let last = limit.len() - 1;
    (start[last], limit[last]) = (columns.start, columns.end);
    x.slice(&start, &limit)
}

/// Creates a tensor of zeros.
pub(crate) fn zeros(builder: &Builder, dtype: Dtype, shape: &[usize]) -> Value {
    let ty = TensorType::new(dtype, shape);
    match dtype {
        Dtype::Pred => builder.splat(false, ty),
        dtype if dtype.is_integer() => builder.splat(0, ty),
        _ => builder.splat(0.0, ty),
    }
}
