//! Products with weights, and norms.

use super::layer_ops::Broadcast;
use super::{Decoder, ParameterValues, Role};
use grpo_stablehlo::{DotDimensions, Dtype, Reducer, Unary, Value};

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
