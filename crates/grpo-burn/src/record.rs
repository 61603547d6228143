//! The burn operation: a scalar whose backward step hands out gradients that exist already.

use crate::operand::Graph;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::NodeGuard;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Flex, Scalar};
use burn::tensor::{Tensor, TensorData};

/// Records `value` as a function of `parents`, with `gradients` as its derivative; `None` for an untracked parent.
///
/// Every gradient has the dtype of its parent: burn adds gradients of one tensor without looking at dtypes.
pub(crate) fn scalar<const N: usize>(
    graph: Graph,
    value: f64,
    parents: [NodeGuard; N],
    gradients: [Option<FlexTensor>; N],
) -> Tensor<1> {
    let value = FlexTensor::from_data(TensorData::from([value as f32]));
    // Compute-bound operations are never recomputed, so the strategy of the graph plays no part here.
    let output = match HandOut.prepare::<NoCheckpointing>(parents).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(gradients, value),
        OpsKind::UnTracked(prep) => prep.finish(value),
    };
    graph.tensor(output)
}

/// The backward step: each parent's gradient times the gradient of the scalar.
#[derive(Debug)]
struct HandOut;

impl<const N: usize> Backward<Flex, N> for HandOut {
    type State = [Option<FlexTensor>; N];

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let upstream = grads.consume::<Flex>(&ops.node).into_data();
        let factor: f64 = upstream.iter::<f64>().sum();
        for (parent, gradient) in ops.parents.into_iter().zip(ops.state) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                grads.register::<Flex>(parent.id, scaled(gradient, factor));
            }
        }
    }
}

fn scaled(gradient: FlexTensor, factor: f64) -> FlexTensor {
    // The usual case, `loss.backward()`, hands the buffer over untouched.
    if factor == 1.0 { gradient } else { Flex::float_mul_scalar(gradient, Scalar::from(factor)) }
}
