//! The node of a loss in candle's graph.

use candle_core::{CpuStorage, CustomOp3, DType, Device, Layout, Result, Shape, Tensor};

/// A scalar whose value and gradients with respect to its arguments are known.
struct Precomputed {
    value: f32,
    gradients: [Option<Tensor>; 3],
}

/// Makes the scalar `value` with `gradients` for `arguments`.
pub(crate) fn scalar(value: f64, arguments: [Option<&Tensor>; 3], gradients: [Option<Tensor>; 3]) -> Result<Tensor> {
    let absent = Tensor::zeros((), DType::F32, &Device::Cpu)?;
    let [first, second, third] = arguments.map(|argument| argument.unwrap_or(&absent));
    first.apply_op3(second, third, Precomputed { value: value as f32, gradients })
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
