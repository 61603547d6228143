//! Operations with two outputs.
//!
//! An operation of burn has one output, and burn adds the gradients of a tensor with two uses in one thread. Here, the second output is an operation
//! on the first one without a derivative of its own: its backward step runs before the first output's and leaves the gradient for it.
//!
//! ```text
//! x --> first --> ... --> loss
//!         \--> second ------^
//! ```

use super::{operand, reread};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use grpo_burn::custom_op::{Derivative, Graph, record, tensor};
use grpo_policy::Result;
use rayon::prelude::*;
use std::sync::{Arc, Mutex, PoisonError};

/// The gradient of an operation's second output, for the derivative of the first one.
#[derive(Clone, Debug, Default)]
pub(super) struct Second(Arc<Mutex<Option<FlexTensor>>>);

impl Second {
    /// Records `output` as the second output of the operation that has recorded `first`, whose derivative must take the gradient.
    ///
    /// The loss must depend on `first`: otherwise burn finds no gradient of `first` and panics in the backward pass.
    pub(super) fn output(&self, output: FlexTensor, first: &Tensor<2>) -> Result<Tensor<2>> {
        let mut graph = Graph::default();
        let first = operand(&mut graph, "the first output", first.clone())?;
        Ok(record(graph, output, [first.node], LeaveGrad(self.clone())))
    }

    /// Takes the gradient; `None` if the loss does not depend on the second output.
    pub(super) fn take(&self) -> Option<FlexTensor> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[derive(Clone, Debug)]
struct LeaveGrad(Second);

impl Derivative<1> for LeaveGrad {
    fn gradients(self, upstream: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(upstream);
        [None]
    }
}

/// Returns `x` for two uses. The loss must depend on the first one.
pub(crate) fn fork(x: Tensor<2>) -> Result<[Tensor<2>; 2]> {
    let mut graph = Graph::default();
    let storage = operand(&mut graph, "x", x.clone())?;
    if !storage.tracked {
        return Ok([x.clone(), x]);
    }
    let second = Second::default();
    let first = record(graph, storage.storage.clone(), [storage.node], ForkGrad(second.clone()));
    let other = second.output(storage.storage, &first)?;
    Ok([first, other])
}

#[derive(Clone, Debug)]
struct ForkGrad(Second);

impl Derivative<1> for ForkGrad {
    fn gradients(self, mut upstream: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let Some(second) = self.0.take() else { return [Some(upstream)] };
        if let Some(sum) = upstream.try_storage_mut::<f32>() {
            add(sum, reread(&second));
            return [Some(upstream)];
        }
        let mut sum = reread(&upstream).to_vec();
        add(&mut sum, reread(&second));
        let dims: [usize; 2] = upstream.layout().shape().dims();
        [Some(tensor(sum, dims))]
    }
}

/// Number of elements per parallel task: fewer are added faster than a thread wakes up.
pub(super) const CHUNK: usize = 1 << 17;

/// Computes to += from.
pub(super) fn add(to: &mut [f32], from: &[f32]) {
    let chunks = to.par_chunks_mut(CHUNK).zip(from.par_chunks(CHUNK));
    chunks.for_each(|(to, from)| to.iter_mut().zip(from).for_each(|(to, from)| *to += from));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::to_host;
    use burn::tensor::{Device, TensorData};

    #[test]
    fn gradients_of_two_uses_are_added() {
        let device = Device::flex().autodiff();
        let x = Tensor::<2>::from_data(TensorData::new(vec![1f32, -2.0, 3.0, 0.5], [2, 2]), &device).require_grad();
        let [first, second] = fork(x.clone()).unwrap();
        let gradients = (first.mul_scalar(3.0) + second.clone() * second).sum().backward();
        assert_eq!(to_host(x.grad(&gradients).unwrap()), [5.0, -1.0, 9.0, 4.0]);
    }

    #[test]
    fn a_second_use_without_a_loss_has_no_gradient() {
        let device = Device::flex().autodiff();
        let x = Tensor::<2>::from_data(TensorData::new(vec![1f32, -2.0], [1, 2]), &device).require_grad();
        let [first, _] = fork(x.clone()).unwrap();
        assert_eq!(to_host(x.grad(&first.mul_scalar(3.0).sum().backward()).unwrap()), [3.0; 2]);
        let constant = Tensor::from_data(TensorData::new(vec![1f32], [1, 1]), &device);
        assert!(fork(constant).unwrap().iter().all(|tensor| !tensor.is_tracked()));
    }
}
