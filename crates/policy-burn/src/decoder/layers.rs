//! The two layers that everything else is made of.

use super::build::{Builder, Initial};
use super::ops::{self, Addend};
use burn::module::{Module, Param};
use burn::tensor::Tensor;
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
    /// Normal weights of standard deviation `std` and zero bias, where the values are not stored ones.
    pub(crate) fn new(of: &mut Builder<'_>, name: &str, shape: [usize; 2], bias: bool, std: f64) -> Result<Self> {
        let weight = of.parameter(&format!("{name}.weight"), shape, Initial::Normal { std })?;
        let bias =
            if bias { Some(of.parameter(&format!("{name}.bias"), [shape[1]], Initial::Constant(0.0))?) } else { None };
        Ok(Self { weight, bias })
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
    pub(crate) fn new(of: &mut Builder<'_>, name: &str, size: usize, eps: f64) -> Result<Self> {
        Ok(Self { weight: of.parameter(&format!("{name}.weight"), [size], Initial::Constant(1.0))?, eps })
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
