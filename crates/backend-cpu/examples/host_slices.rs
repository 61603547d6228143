//! The example of the README.

use backend_cpu::CpuBackend;
use grpo_core::*;

fn main() -> Result<()> {
    let (n, h, v) = (4, 8, 32); // tokens, hidden size, vocabulary
    let hidden = vec![0.1_f32; n * h]; // [N, H], from your model
    let lm_head = vec![0.02_f32; v * h]; // [V, H], yours
    let batch = TokenBatch::packed(vec![3, 7, 1, 0], vec![0, 2, 4])? // targets of two sequences, laid end to end
        .with_advantages(Advantages::PerSequence(vec![1.0, -0.5]))?
        .with_old_logp(vec![-3.4; n])?;

    let mut plan = CpuBackend::new().plan(&PlanRequest {
        loss: LossConfig::from_json(r#"{"loss_type": "dapo", "epsilon_high": 0.28}"#)?,
        implementation: Implementation::Fused,
        tiling: Tiling::default(), // 128 MiB of workspace
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

    let (mut dhidden, mut dlm_head) = (vec![0.0; n * h], vec![0.0; v * h]); // gradients are added to these
    let policy = PolicyInput::Hidden { hidden: (&hidden).into(), lm_head: (&lm_head).into(), bias: None };
    let grads =
        GradsMut { hidden: Some((&mut dhidden).into()), lm_head: Some((&mut dlm_head).into()), ..GradsMut::default() };
    let out = plan.value_and_grad(policy, &batch, grads)?;
    out.check_finite(&batch)?; // names the token where the policy's output is not finite
    println!("loss {} entropy {:?}", out.loss, out.metrics.value("entropy"));
    Ok(())
}
