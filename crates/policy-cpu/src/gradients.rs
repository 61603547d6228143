//! Gradient accumulators on the CPU.

use crate::decoder::{Decoder, EMBED_TOKENS, RowGradients, Which, visit_parameters};
use burn::tensor::Gradients;
use grpo_models::NamedTensor;
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
    pub fn add(&mut self, model: &Decoder, gradients: Gradients) {
        self.add_with(model, gradients, None);
    }

    /// Like [`GradientSum::add`], with the gradient of the rows of the embedding.
    pub(crate) fn add_with(&mut self, model: &Decoder, mut gradients: Gradients, embedded: Option<&RowGradients>) {
        let mut index = 0;
        visit_parameters(model, Which::Trained, |name, parameter| {
            let Some(parameter) = parameter else { return };
            let mut gradient = parameter.gradient(&mut gradients);
            // Rows are added to the gradient of a tied head first, and then to the sum: the order in which autodiff adds gradients of one leaf.
            let rows = embedded.filter(|_| name == EMBED_TOKENS);
            if let (Some(rows), Some(gradient)) = (rows, &mut gradient) {
                rows.add_to(gradient);
            }
            let rows = rows.filter(|_| gradient.is_none());
            match self.parameters.get_mut(index) {
                Some(sum) => {
                    add(&mut sum.data, gradient.as_deref().unwrap_or_default());
                    rows.into_iter().for_each(|rows| rows.add_to(&mut sum.data));
                }
                None => {
                    let shape = parameter.shape();
                    let mut data = gradient.unwrap_or_else(|| vec![0.0; shape.iter().product()]);
                    rows.into_iter().for_each(|rows| rows.add_to(&mut data));
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

/// Computes sum += gradient, if the gradient is not empty.
fn add(sum: &mut [f32], gradient: &[f32]) {
    let chunks = sum.par_chunks_mut(CHUNK).zip(gradient.par_chunks(CHUNK));
    chunks.for_each(|(sum, gradient)| sum.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g));
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
