//! The loss as an operation of burn: a scalar whose backward step returns precomputed gradients.

use crate::custom_op::{Derivative, Graph, record};
use burn::backend::autodiff::ops::NodeGuard;
use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Flex, Scalar};
use burn::tensor::{Tensor, TensorData};

/// Records `value` as a function of `parents`, with `gradients` as its derivative; `None` for an untracked parent.
///
/// Every gradient has the dtype of its parent, because burn adds gradients of one tensor without checking dtypes.
pub(crate) fn scalar<const N: usize>(
    graph: Graph,
    value: f64,
    parents: [NodeGuard; N],
    gradients: [Option<FlexTensor>; N],
) -> Tensor<1> {
    let value = FlexTensor::from_data(TensorData::from([value as f32]));
    record(graph, value, parents, HandOut(gradients))
}

/// The derivative of the loss: each tensor's gradient times the gradient of the scalar.
#[derive(Clone, Debug)]
struct HandOut<const N: usize>([Option<FlexTensor>; N]);

impl<const N: usize> Derivative<N> for HandOut<N> {
    fn gradients(self, upstream: FlexTensor, _: [bool; N]) -> [Option<FlexTensor>; N] {
        let factor: f64 = upstream.into_data().iter::<f64>().sum();
        self.0.map(|gradient| gradient.map(|gradient| scaled(gradient, factor)))
    }
}

fn scaled(gradient: FlexTensor, factor: f64) -> FlexTensor {
    // In the usual case, `loss.backward()`, the buffer is returned without a copy.
    if factor == 1.0 { gradient } else { Flex::float_mul_scalar(gradient, Scalar::from(factor)) }
}
