//! Sums of gradients on the host.

use crate::decoder::{Decoder, ParameterVisitor, Which, to_host, visit_parameters};
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
                let gradient = value.grad_remove(&mut self.gradients).map(to_host);
                if let Some(sum) = self.sum.get_mut(self.index) {
                    let both = sum.data.iter_mut().zip(gradient.iter().flatten());
                    both.for_each(|(sum, g)| *sum += g);
                } else {
                    let shape = value.dims().to_vec();
                    let data = gradient.unwrap_or_else(|| vec![0.0; shape.iter().product()]);
                    self.sum.push(NamedTensor { name: name.to_owned(), shape, data });
                }
                self.index += 1;
            }
        }
        visit_parameters(model, Which::Trained, &mut Collect { sum: &mut self.parameters, gradients, index: 0 });
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
