//! Operations shared by all layers.

use super::{Compute, Decoder, ParameterValues, Role};
use grpo_stablehlo::{DotDimensions, Dtype, GatherDimensions, Reducer, Unary, Value};

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

impl Decoder {
    /// Returns `x weight^T + bias` `[..., O]` in f32 for `x` `[..., I]`, the weight `[O, I]` of this role and `bias` `[O]`. The product is
    /// summed in f32 but written in the compute dtype, and so is its cotangent, which halves the memory traffic.
    #[track_caller]
    pub(crate) fn project(&self, weights: &ParameterValues, x: &Value, role: Role, bias: Option<&Value>) -> Value {
        let product = self.product(weights, x, role, self.compute.dtype()).convert(Dtype::F32);
        match bias {
            Some(bias) => &product + bias.convert(Dtype::F32).along_last(&product),
            None => product,
        }
    }

    /// Returns `x weight^T` `[..., O]`, summed in f32, of dtype `result`, for `x` `[..., I]` and the weight `[O, I]` of this role.
    #[track_caller]
    pub(crate) fn product(&self, weights: &ParameterValues, x: &Value, role: Role, result: Dtype) -> Value {
        let (x, weight) = (x.convert(self.compute.dtype()), weights[role].convert(self.compute.dtype()));
        let dimensions = DotDimensions::contract(x.shape().len() - 1, weights.summed(role));
        x.dot_general(&weight, dimensions, result, self.compute.precision())
    }

    /// Computes RMSNorm (arXiv 1910.07467) over the last dimension, in f32: `x` `[..., N]`, `weight` `[N]`, plus 1 if norms are centred at 0.
    #[track_caller]
    pub(crate) fn norm(&self, x: &Value, weight: &Value) -> Value {
        self.norm_over(x, weight, x.shape().len() - 1)
    }

    /// Computes [`Decoder::norm`] over the given dimension.
    #[track_caller]
    pub(crate) fn norm_over(&self, x: &Value, weight: &Value, dimension: usize) -> Value {
        let x = self.unweighted_norm(x, dimension);
        let weight = weight.convert(Dtype::F32);
        let weight = if self.config.zero_centered_norms { &weight + weight.like(1.0) } else { weight };
        let weight = weight.broadcast_in_dim(x.shape(), &[dimension]);
        x * weight
    }

    /// Computes RMSNorm over the given dimension, in f32, without a weight.
    #[track_caller]
    pub(crate) fn unweighted_norm(&self, x: &Value, dimension: usize) -> Value {
        let x = x.convert(Dtype::F32);
        let squares = (&x * &x).reduce(Reducer::Add, &[dimension]);
        let mean = &squares * squares.like(1.0 / x.shape()[dimension] as f64);
        let scale = (&mean + mean.like(self.config.rms_norm_eps)).unary(Unary::Rsqrt);
        let others: Vec<usize> = (0..x.shape().len()).filter(|d| *d != dimension).collect();
        &x * scale.broadcast_in_dim(x.shape(), &others)
    }
}
