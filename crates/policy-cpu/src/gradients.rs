//! Gradient accumulators on the CPU.

use crate::decoder::{Decoder, Which, visit_parameters};
use burn::tensor::Gradients;
use models::NamedTensor;
use rayon::prelude::*;

/// Number of elements per parallel task.
const CHUNK: usize = 1 << 15;

/// The accumulated gradients of one optimizer step, per parameter in the order of the decoder's fields.
#[derive(Clone, Debug, Default)]
pub struct GradientSum {
    pub(crate) parameters: Vec<NamedTensor>,
}

impl GradientSum {
    /// Creates an empty accumulator.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the gradients of one micro-batch. Parameters that the loss does not depend on are unchanged.
    pub fn add(&mut self, model: &Decoder, mut gradients: Gradients) {
        let mut index = 0;
        visit_parameters(model, Which::Trained, |name, parameter| {
            let Some(parameter) = parameter else { return };
            let gradient = parameter.gradient(&mut gradients);
            match self.parameters.get_mut(index) {
                Some(sum) => {
                    sum.data.iter_mut().zip(gradient.iter().flatten()).for_each(|(sum, g)| *sum += g);
                }
                None => {
                    let shape = parameter.shape();
                    let data = gradient.unwrap_or_else(|| vec![0.0; shape.iter().product()]);
                    self.parameters.push(NamedTensor { name: name.to_owned(), shape, data });
                }
            }
            index += 1;
        });
    }

    /// Returns `true` if no gradient was added.
    pub fn is_empty(&self) -> bool {
        self.parameters.is_empty()
    }

    /// Returns the 2-norm of all parameters together.
    pub fn norm(&self) -> f64 {
        // f64 sums in a fixed order: bit-identical for any number of threads.
        let of_parameter = |p: &NamedTensor| {
            let of_chunks: Vec<f64> = p.data.par_chunks(CHUNK).map(sum_of_squares).collect();
            of_chunks.iter().sum::<f64>()
        };
        self.parameters.iter().map(of_parameter).sum::<f64>().sqrt()
    }

    /// Returns the gradients by parameter name.
    pub fn parameters(&self) -> &[NamedTensor] {
        &self.parameters
    }
}

/// Returns the sum of squares, in eight independent sums for instruction-level parallelism.
fn sum_of_squares(values: &[f32]) -> f64 {
    let square = |value: &f32| f64::from(*value).powi(2);
    let mut sums = [0.0; 8];
    let (eights, rest) = values.as_chunks::<8>();
    for eight in eights {
        sums.iter_mut().zip(eight).for_each(|(sum, value)| *sum += square(value));
    }
    sums.iter().sum::<f64>() + rest.iter().map(square).sum::<f64>()
}
