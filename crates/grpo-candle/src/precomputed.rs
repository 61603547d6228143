//! The node of a loss in candle's graph.

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CustomOp3, DType, Device, Layout, Result, Shape, Tensor};

/// The arguments of a loss with their gradients; `None` if there is no such argument or gradient.
#[derive(Clone, Debug)]
pub(crate) struct Gradients(pub(crate) [Option<(Tensor, Option<Tensor>)>; 3]);

impl Gradients {
    /// Makes the scalar `value` with these gradients.
    pub(crate) fn scalar(&self, value: f64) -> Result<Tensor> {
        let absent = Tensor::zeros((), DType::F32, &Device::Cpu)?;
        let [first, second, third] =
            self.0.each_ref().map(|argument| argument.as_ref().map_or(&absent, |(tensor, _)| tensor));
        let gradients = self.0.clone().map(|argument| argument.and_then(|(_, gradient)| gradient));
        first.apply_op3(second, third, Precomputed { value: value as f32, gradients })
    }

    /// Differentiates the graph of the arguments. Gradients of variables do not pass through the graph.
    pub(crate) fn backward(&self) -> Result<GradStore> {
        let mut graph = self.clone();
        let mut variables = Vec::new();
        for (tensor, gradient) in graph.0.iter_mut().flatten().filter(|(tensor, _)| tensor.is_variable()) {
            variables.extend(gradient.take().map(|gradient| (tensor.clone(), gradient)));
        }
        // The value does not matter for the gradients.
        let mut store = graph.scalar(0.0)?.backward()?;
        for (variable, gradient) in variables {
            // The graph has a gradient if the variable is also an embedding, or both hidden states and head.
            let sum = match store.remove(&variable) {
                Some(other) => (other + gradient)?,
                None => gradient,
            };
            store.insert(&variable, sum);
        }
        Ok(store)
    }
}

/// A scalar whose value and gradients with respect to its arguments are known.
struct Precomputed {
    value: f32,
    gradients: [Option<Tensor>; 3],
}

impl CustomOp3 for Precomputed {
    fn name(&self) -> &'static str {
        "grpo-loss"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![self.value]), Shape::from(())))
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        upstream: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let factor = f64::from(upstream.to_scalar::<f32>()?);
        let scaled = |gradient: &Option<Tensor>| match gradient {
            Some(gradient) if factor != 1.0 => gradient.affine(factor, 0.0).map(Some),
            gradient => Ok(gradient.clone()),
        };
        let [first, second, third] = &self.gradients;
        Ok((scaled(first)?, scaled(second)?, scaled(third)?))
    }
}
