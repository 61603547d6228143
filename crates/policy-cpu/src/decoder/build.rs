//! Construction of a decoder's parameters from tensors.

use super::weight::{Stored, Weight};
use burn::module::Param;
use burn::tensor::{Device, Tensor, TensorData};
use grpo_models::ModelConfig;
use grpo_policy::Result;

/// A source of parameter values.
pub(crate) trait Source {
    /// Returns the values of the parameter `name` in row-major order; their number matches `shape`.
    fn values(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>>;

    /// Returns the frozen matrix `name`, in place or quantised, or `None` if its values must be copied.
    fn stored(&mut self, name: &str, shape: [usize; 2]) -> Result<Option<Stored>> {
        let _ = (name, shape);
        Ok(None)
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
    pub(crate) fn parameter<const D: usize>(&mut self, name: &str, shape: [usize; D]) -> Result<Param<Tensor<D>>> {
        let values = self.source.values(name, &shape)?;
        Ok(Param::from_data(TensorData::new(values, shape), self.device))
    }

    /// Creates the matrix with this path.
    pub(crate) fn weight(&mut self, name: &str, shape: [usize; 2]) -> Result<Weight> {
        Ok(match self.source.stored(name, shape)? {
            Some(stored) => Weight::Stored(stored),
            None => Weight::Parameter(self.parameter(name, shape)?),
        })
    }
}
