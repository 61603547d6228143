//! The two layers that everything else is made of.

use super::params::normal;
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor, TensorData};

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

    /// The layer applied to `x: [.., in]` -> `[.., out]`.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        burn::tensor::module::linear(x, self.weight.val(), self.bias.as_ref().map(Param::val))
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

    /// The norm of `x: [.., H]` -> `[.., H]`.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let rms = (x.clone().square().mean_dim(D - 1) + self.eps).sqrt();
        x / rms * self.weight.val().unsqueeze()
    }
}
