//! How the parameters of a new decoder get their values: at random, or from stored tensors.

use super::params::normal;
use super::weight::{Stored, Weight};
use burn::module::Param;
use burn::tensor::{Device, Tensor, TensorData};
use models::ModelConfig;
use policy::Result;
use rng::uniform_weights;

/// The initial values of a parameter that is not stored anywhere.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Initial {
    /// Independent normal values around 0.
    Normal {
        /// Their standard deviation.
        std: f64,
    },
    /// Independent uniform values.
    Uniform {
        /// Their largest magnitude.
        bound: f64,
    },
    /// One value.
    Constant(f32),
}

/// Where the values of parameters come from.
pub(crate) trait Source {
    /// The values of the parameter `name` in row-major order, as many as `shape` says.
    ///
    /// # Errors
    /// Those of reading what is stored.
    fn values(&mut self, name: &str, shape: &[usize], initial: Initial) -> Result<Vec<f32>>;

    /// The matrix `name` where it is stored; `None` where its values are to be copied.
    ///
    /// # Errors
    /// Those of reading what is stored.
    fn stored(&mut self, name: &str, shape: [usize; 2]) -> Result<Option<Stored>> {
        let _ = (name, shape);
        Ok(None)
    }
}

/// Values that depend on a seed and on the parameter's name only.
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

/// What the layers of a decoder are made from.
pub(crate) struct Builder<'a> {
    pub(crate) config: &'a ModelConfig,
    pub(crate) device: &'a Device,
    pub(crate) source: &'a mut dyn Source,
}

impl Builder<'_> {
    /// The parameter with this path.
    pub(crate) fn parameter<const D: usize>(
        &mut self,
        name: &str,
        shape: [usize; D],
        initial: Initial,
    ) -> Result<Param<Tensor<D>>> {
        let values = self.source.values(name, &shape, initial)?;
        Ok(Param::from_data(TensorData::new(values, shape), self.device))
    }

    /// The matrix with this path.
    pub(crate) fn weight(&mut self, name: &str, shape: [usize; 2], initial: Initial) -> Result<Weight> {
        Ok(match self.source.stored(name, shape)? {
            Some(stored) => Weight::Stored(stored),
            None => Weight::Parameter(self.parameter(name, shape, initial)?),
        })
    }
}
