//! Linear layer and RMSNorm.

use super::autodiff_ops::{self, Addend};
use super::build::Builder;
use super::lora::LowRank;
use super::weight::Weight;
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use policy::Result;

/// A linear layer, `y = x W + b`.
#[derive(Module, Debug)]
pub struct Linear {
    /// Weight W `[in, out]`.
    pub weight: Weight,
    /// Bias b `[out]`.
    pub bias: Option<Param<Tensor<1>>>,
    /// Adapters of the matrices that are fused in this layer.
    pub adapters: Vec<LowRank>,
}

impl Linear {
    pub(crate) fn new(of: &mut Builder<'_>, name: &str, shape: [usize; 2], bias: bool) -> Result<Self> {
        let weight = of.weight(&format!("{name}.weight"), shape)?;
        let bias = if bias { Some(of.parameter(&format!("{name}.bias"), [shape[1]])?) } else { None };
        Ok(Self { weight, bias, adapters: Vec::new() })
    }

    /// Applies the layer to `x: [N, in]` -> `[N, out]`.
    ///
    /// # Errors
    /// [`policy::Error::Loss`] if x is not `[N, in]`.
    pub fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        let add = self.bias.as_ref().map_or(Addend::Nothing, |bias| Addend::Bias(bias.val()));
        self.run(x, add)
    }

    /// Returns `residual` plus the layer applied to `x: [N, in]`, both `[N, out]`; for layers without a bias.
    pub(crate) fn add_to(&self, residual: Tensor<2>, x: Tensor<2>) -> Result<Tensor<2>> {
        self.run(x, Addend::Residual(residual))
    }

    fn run(&self, x: Tensor<2>, add: Addend) -> Result<Tensor<2>> {
        let y = match &self.weight {
            Weight::Parameter(weight) => autodiff_ops::linear(x.clone(), weight.val(), add)?,
            Weight::Stored(weight) => autodiff_ops::linear_stored(x.clone(), weight, add)?,
        };
        self.adapters.iter().try_fold(y, |y, adapter| adapter.forward(x.clone(), y))
    }

    /// Returns the weight `[in, out]` with merged adapters.
    pub(crate) fn merged(&self) -> Result<Vec<f32>> {
        let mut weight = self.weight.to_vec()?;
        self.adapters.iter().try_for_each(|adapter| adapter.merge_into(&mut weight, self.weight.dims()[1]))?;
        Ok(weight)
    }
}

/// Root mean square normalisation, `y = x / sqrt(mean(x^2) + eps) * weight`.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// Factor `[H]` of each channel.
    pub weight: Param<Tensor<1>>,
    eps: f64,
}

impl RmsNorm {
    pub(crate) fn new(of: &mut Builder<'_>, name: &str, size: usize, eps: f64) -> Result<Self> {
        Ok(Self { weight: of.parameter(&format!("{name}.weight"), [size])?, eps })
    }

    /// Normalises `x: [N, H]` -> `[N, H]`.
    ///
    /// # Errors
    /// [`policy::Error::Loss`] if x is not `[N, H]`.
    pub fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        autodiff_ops::rms_norm(x, self.weight.val(), self.eps)
    }

    /// Returns the term added to the mean square.
    pub(crate) fn eps(&self) -> f64 {
        self.eps
    }
}
