//! Sums of gradients on the host.

use crate::decoder::{Decoder, ParameterVisitor, to_host, visit_parameters};
use burn::module::Param;
use burn::tensor::{Gradients, Tensor};
use models::NamedTensor;

/// The sum of the gradients of one optimizer step, parameter by parameter in the order of the decoder's fields.
#[derive(Clone, Debug, Default)]
pub struct GradientSum {
    pub(crate) parameters: Vec<NamedTensor>,
}

impl GradientSum {
    /// A sum without any gradient yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the gradients of one micro-batch. A parameter that the loss does not depend on adds nothing.
    pub fn add(&mut self, model: &Decoder, gradients: Gradients) {
        struct Collect<'a> {
            sum: &'a mut Vec<NamedTensor>,
            gradients: Gradients,
            index: usize,
        }
        impl ParameterVisitor for Collect<'_> {
            fn visit<const D: usize>(&mut self, name: &str, parameter: &Param<Tensor<D>>) {
                let value = parameter.val();
                if self.index == self.sum.len() {
                    let shape = value.dims().to_vec();
                    let zeros = vec![0.0; shape.iter().product()];
                    self.sum.push(NamedTensor { name: name.to_owned(), shape, data: zeros });
                }
                if let Some(gradient) = value.grad_remove(&mut self.gradients) {
                    for (sum, g) in self.sum[self.index].data.iter_mut().zip(to_host(gradient)) {
                        *sum += g;
                    }
                }
                self.index += 1;
            }
        }
        visit_parameters(model, &mut Collect { sum: &mut self.parameters, gradients, index: 0 });
    }

    /// Adds the sum of other micro-batches of the same model.
    pub fn merge(&mut self, other: Self) {
        if self.parameters.is_empty() {
            *self = other;
            return;
        }
        for (mine, theirs) in self.parameters.iter_mut().zip(other.parameters) {
            for (a, b) in mine.data.iter_mut().zip(theirs.data) {
                *a += b;
            }
        }
    }

    /// Whether no gradient was added yet.
    pub fn is_empty(&self) -> bool {
        self.parameters.is_empty()
    }

    /// The 2-norm over all parameters together.
    pub fn norm(&self) -> f64 {
        // f64, in a fixed order: the same bits on every run.
        self.parameters.iter().flat_map(|p| &p.data).map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt()
    }

    /// The gradients by parameter name.
    pub fn parameters(&self) -> &[NamedTensor] {
        &self.parameters
    }
}
