//! Cases of the testkit as tensors of candle.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Shape, Tensor, Var};
use grpo_backend_cpu::CpuBackend;
use grpo_candle::GrpoLoss;
use grpo_core::{Dtype, HeadLayout, Implementation, LossConfig};
use grpo_testkit::Case;

/// Trained tensors of a policy.
pub(crate) struct Leaves {
    pub(crate) hidden: Var,
    pub(crate) lm_head: Var,
    pub(crate) bias: Var,
}

impl Leaves {
    /// Copies the policy of a case that has a bias. Masked rows are 0 instead of NaN, which plain candle would multiply.
    pub(crate) fn new(case: &Case) -> Self {
        let hidden: Vec<f32> = case.hidden.iter().map(|x| if x.is_nan() { 0.0 } else { *x }).collect();
        let head = match case.layout {
            HeadLayout::VocabHidden => [case.v, case.h],
            HeadLayout::HiddenVocab => [case.h, case.v],
        };
        let bias = case.bias.as_ref().expect("a case with a bias");
        let var = |values: &[f32], shape: &[usize]| {
            Var::from_tensor(&tensor(values, shape, case.dtype())).expect("a variable")
        };
        Self {
            hidden: var(&hidden, &[case.tokens(), case.h]),
            lm_head: var(&case.lm_head, &head),
            bias: var(bias, &[case.v]),
        }
    }
}

pub(crate) fn tensor(values: &[f32], shape: impl Into<Shape>, dtype: Dtype) -> Tensor {
    let dtype = match dtype {
        Dtype::F32 => DType::F32,
        Dtype::Bf16 => DType::BF16,
    };
    Tensor::from_slice(values, shape.into(), &Device::Cpu).and_then(|t| t.to_dtype(dtype)).expect("a tensor")
}

pub(crate) fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().and_then(|t| t.to_dtype(DType::F32)?.to_vec1()).expect("numbers")
}

pub(crate) fn gradient(gradients: &GradStore, leaf: &Tensor) -> Vec<f32> {
    values(gradients.get(leaf).expect("a gradient"))
}

/// Creates the loss under test on this CPU.
pub(crate) fn grpo(config: &LossConfig, implementation: Implementation) -> GrpoLoss {
    laid_out(config, implementation, HeadLayout::default())
}

/// Creates the loss under test for heads of `layout`.
pub(crate) fn laid_out(config: &LossConfig, implementation: Implementation, layout: HeadLayout) -> GrpoLoss {
    let builder = GrpoLoss::builder(config.clone()).implementation(implementation).head_layout(layout);
    builder.build(&CpuBackend::new()).expect("a legal configuration")
}

/// Fails if the largest difference exceeds `tolerance` of the largest expected entry, which must not be close to zero.
#[track_caller]
pub(crate) fn assert_close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    let largest = expected.iter().fold(0.0f32, |m, e| m.max(e.abs()));
    assert!(largest > 1e-4, "{what}: the expected values are all but zero ({largest:e})");
    let difference = found.iter().zip(expected).fold(0.0f32, |m, (f, e)| {
        assert!(f.is_finite(), "{what}: {f} is not finite");
        m.max((f - e).abs())
    });
    println!("{what}: largest difference {:.2e} of the largest entry {largest:.2e}", difference / largest);
    assert!(difference / largest <= tolerance, "{what}: {:e} exceeds {tolerance:e}", difference / largest);
}
