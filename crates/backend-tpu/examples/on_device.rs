//! Runs three optimizer steps. Hidden states, head and gradients stay on the device.
//!
//!     cargo run --release -- plugin install cpu
//!     cargo run --release -p grpo-backend-tpu --example on_device

use grpo_backend_tpu::plugins::Kind;
use grpo_backend_tpu::program::Role;
use grpo_backend_tpu::{PjrtBackend, PjrtTensor};
use grpo_core::*;

fn main() -> Result<()> {
    let (n, h, v) = (64, 32, 1000); // tokens, hidden size, vocabulary
    let spread = |i: usize| (i * 7919 % 1000) as f32 / 1000.0 - 0.5;
    let hidden: Vec<f32> = (0..n * h).map(spread).collect(); // [N, H]
    let lm_head: Vec<f32> = (0..v * h).map(spread).collect(); // [V, H]
    let targets = (0..n).map(|i| (i * 31 % v) as i64).collect();
    let batch =
        TokenBatch::packed(targets, vec![0, 24, n])?.with_advantages(Advantages::PerSequence(vec![1.0, -0.5]))?;

    let backend = PjrtBackend::open(Kind::Cpu, None)?;
    let mut plan = backend.plan_on_device(&PlanRequest {
        loss: LossConfig::default().into(),
        implementation: Implementation::Fused,
        tiling: Tiling::default(),
        max_tokens: n,
        policy: PolicySpec::Hidden {
            hidden: h,
            vocab: v,
            dtype: Dtype::F32,
            layout: HeadLayout::VocabHidden,
            bias: false,
        },
        gradients: GradientSpec::default(),
    })?;

    let hidden = plan.upload(Role::Hidden, n, (&hidden).into())?;
    let lm_head = plan.upload(Role::LmHead, n, (&lm_head).into())?;
    let mut dhidden = plan.zeros(Role::GradHidden, n)?;
    let mut dlm_head = plan.zeros(Role::GradLmHead, n)?;
    for step in 0..3 {
        let grads = Grads::new(&mut dhidden, &mut dlm_head); // gradients are added in place
        let out = plan.value_and_grad_on_device(PolicyInput::head(&hidden, &lm_head), &batch, grads)?;
        println!("step {step}: loss {:.4}, {}", out.loss, norm("dlm_head", &dlm_head)?);
    }
    Ok(())
}

fn norm(name: &str, tensor: &PjrtTensor) -> Result<String> {
    let square: f64 = tensor.to_host()?.iter().map(|x| f64::from(x * x)).sum();
    Ok(format!("|{name}| {:.4}", square.sqrt()))
}
