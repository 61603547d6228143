//! Initial values of a decoder's parameters: random, or read from stored tensors.

use super::params::normal;
use super::weight::{Stored, Weight};
use burn::module::Param;
use burn::tensor::{Device, Tensor, TensorData};
use models::ModelConfig;
use policy::Result;
use rng::uniform_weights;

/// Distribution of the initial values of a parameter that is not stored.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Initial {
    /// Independent normal values with mean 0.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// Independent uniform values with mean 0.
    Uniform {
        /// Largest magnitude.
        bound: f64,
    },
    /// A constant.
    Constant(f32),
}

/// A source of parameter values.
pub(crate) trait Source {
    /// Returns the values of the parameter `name` in row-major order; their number matches `shape`.
    ///
    /// # Errors
    /// Errors of reading stored tensors.
    fn values(&mut self, name: &str, shape: &[usize], initial: Initial) -> Result<Vec<f32>>;

    /// Returns the stored matrix `name`, to be used in place, or `None` if its values must be copied.
    ///
    /// # Errors
    /// Errors of reading stored tensors.
    fn stored(&mut self, name: &str, shape: [usize; 2]) -> Result<Option<Stored>> {
        let _ = (name, shape);
        Ok(None)
    }
}

/// Random values that depend on a seed and the parameter's name only.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seed(pub(crate) u64);

impl Source for Seed {
    fn values(&mut self, name: &str, shape: &[usize], initial: Initial) -> Result<Vec<f32>> {
        let count = shape.iter().product();
        Ok(match initial {
            Initial::Normal { std } => normal(count, std, self.0, name),
            Initial::Uniform { bound } => uniform_weights(count, bound, self.0, name),
            Initial::Constant(value) => vec![value; count],
        })
    }
}

/// Inputs of the constructors of layers.
pub(crate) struct Builder<'a> {
    pub(crate) config: &'a ModelConfig,
    pub(crate) device: &'a Device,
    pub(crate) source: &'a mut dyn Source,
}

impl Builder<'_> {
    /// Creates the parameter with this path.
    pub(crate) fn parameter<const D: usize>(
        &mut self,
        name: &str,
        shape: [usize; D],
        initial: Initial,
    ) -> Result<Param<Tensor<D>>> {
        let values = self.source.values(name, &shape, initial)?;
        Ok(Param::from_data(TensorData::new(values, shape), self.device))
    }

    /// Creates the matrix with this path.
    pub(crate) fn weight(&mut self, name: &str, shape: [usize; 2], initial: Initial) -> Result<Weight> {
        Ok(match self.source.stored(name, shape)? {
            Some(stored) => Weight::Stored(stored),
            None => Weight::Parameter(self.parameter(name, shape, initial)?),
        })
    }
}
