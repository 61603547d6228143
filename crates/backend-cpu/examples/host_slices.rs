//! The example of docs/embed.md.

use backend_cpu::CpuBackend;
use grpo_core::{Grads, GrpoLoss, LossConfig, Result, TokenBatch};

fn main() -> Result<()> {
    let (n, h, v) = (4, 8, 32); // tokens, hidden size, vocabulary
    let hidden = vec![0.1_f32; n * h]; // [N, H], from your model
    let lm_head = vec![0.02_f32; v * h]; // [V, H], yours
    let config = LossConfig::dapo().epsilon_high(0.28);
    let loss = GrpoLoss::builder(config).head(h, v).max_tokens(n).build(&CpuBackend::new())?;

    let batch = TokenBatch::packed(vec![3, 7, 1, 0], vec![0, 2, 4])? // targets of two packed sequences
        .with_advantages(vec![1.0, -0.5])?
        .with_old_logp(vec![-3.4; n])?;
    let (mut dhidden, mut dlm_head) = (vec![0.0; n * h], vec![0.0; v * h]); // accumulators of gradients
    let out = loss.step(&hidden, &lm_head, &batch, Grads::new(&mut dhidden, &mut dlm_head))?;
    out.check_finite(&batch)?; // names the token where the policy's output is not finite
    println!("loss {} entropy {:?}", out.loss, out.metrics.value("entropy"));
    Ok(())
}
