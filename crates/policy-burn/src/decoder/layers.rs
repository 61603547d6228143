//! The two layers that everything else is made of.

use super::ops::{self, Addend};
use super::params::normal;
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor, TensorData};
use policy::Result;

/// A linear layer, `y = x W + b`.
#[derive(Module, Debug)]
pub struct Linear {
    /// The weight W `[in, out]`.
    pub weight: Param<Tensor<2>>,
    /// The bias b `[out]`.
    pub bias: Option<Param<Tensor<1>>>,
}

impl Linear {
    /// Normal weights of standard deviation `std` from the stream of (`seed`, `name`), zero bias.
    pub(crate) fn new(
        [input, output]: [usize; 2],
        bias: bool,
        std: f64,
        seed: u64,
        name: &str,
        device: &Device,
    ) -> Self {
        let bias = bias.then(|| Param::from_data(TensorData::new(vec![0f32; output], [output]), device));
        Self { weight: Param::from_data(normal([input, output], std, seed, &format!("{name}.weight")), device), bias }
    }

    /// The layer applied to `x: [N, in]` -> `[N, out]`.
    ///
    /// # Errors
    /// [`policy::Error::Loss`] when x is not `[N, in]`.
    pub fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        let add = self.bias.as_ref().map_or(Addend::Nothing, |bias| Addend::Bias(bias.val()));
        ops::linear(x, self.weight.val(), add)
    }
}

/// Root mean square normalisation, `y = x / sqrt(mean(x^2) + eps) * weight`.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// The factor `[H]` of each channel.
    pub weight: Param<Tensor<1>>,
    eps: f64,
}

impl RmsNorm {
    pub(crate) fn new(size: usize, eps: f64, device: &Device) -> Self {
        Self { weight: Param::from_data(TensorData::new(vec![1f32; size], [size]), device), eps }
    }

    /// The norm of `x: [N, H]` -> `[N, H]`.
    ///
    /// # Errors
    /// [`policy::Error::Loss`] when x is not `[N, H]`.
    pub fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        ops::rms_norm(x, self.weight.val(), self.eps)
    }

    /// What is added to the mean square.
    pub(crate) fn eps(&self) -> f64 {
        self.eps
    }
}
