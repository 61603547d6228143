//! A custom candle model and training loop with the GRPO loss.
//!
//! The model sees one digit and predicts the next token; its reward is for counting up from the prompt, modulo 10.
//!
//!     cargo run --release -p grpo-candle --example digits

use candle_core::{D, DType, Device, Result, Tensor, Var};
use grpo_candle::GrpoLoss;
use grpo_core::{AdvantageConfig, Implementation, LossConfig, TokenBatch};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::sync::Arc;

const DIGITS: usize = 10;
const HIDDEN: usize = 32;
const LENGTH: usize = 4;
const GROUP: usize = 8;
const STEPS: usize = 30;
const LEARNING_RATE: f64 = 3.0;

struct Model {
    embedding: Var,
    mlp: Var,
    lm_head: Var,
}

impl Model {
    fn new(rng: &mut ChaCha8Rng) -> Result<Self> {
        let mut uniform = |rows: usize, columns: usize, scale: f32| {
            let values: Vec<f32> = (0..rows * columns).map(|_| rng.random_range(-scale..scale)).collect();
            Var::from_vec(values, (rows, columns), &Device::Cpu)
        };
        let scale = 1.0 / (HIDDEN as f32).sqrt();
        Ok(Self {
            embedding: uniform(DIGITS, HIDDEN, 1.0)?,
            mlp: uniform(HIDDEN, HIDDEN, scale)?,
            lm_head: uniform(DIGITS, HIDDEN, scale)?,
        })
    }

    /// Returns hidden states `[N, 32]` of tokens `[N]`, which the loss takes together with the head.
    fn hidden(&self, tokens: &[u32]) -> Result<Tensor> {
        let tokens = Tensor::new(tokens, &Device::Cpu)?;
        self.embedding.index_select(&tokens, 0)?.matmul(&self.mlp)?.gelu()
    }

    /// Returns the probabilities `[10, 10]` of the next digit.
    fn probabilities(&self) -> Result<Vec<Vec<f32>>> {
        let digits: Vec<u32> = (0..DIGITS as u32).collect();
        let logits = self.hidden(&digits)?.matmul(&self.lm_head.t()?)?;
        logits.broadcast_sub(&logits.log_sum_exp(D::Minus1)?.unsqueeze(1)?)?.exp()?.to_dtype(DType::F32)?.to_vec2()
    }
}

/// Trains from scratch and returns the mean rewards of the first and of the last step.
pub(crate) fn train(implementation: Implementation) -> std::result::Result<(f32, f32), Box<dyn std::error::Error>> {
    let backend = Arc::new(backend_cpu::CpuBackend::new());
    let grpo = GrpoLoss::new(backend, LossConfig::default())?.with_implementation(implementation);
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let model = Model::new(&mut rng)?;
    let (mut first, mut last) = (f32::NAN, f32::NAN);
    for step in 0..STEPS {
        // Rollout: the model conditions on one digit only, so ten rows of probabilities suffice for sampling.
        let table = model.probabilities()?;
        let (mut inputs, mut targets, mut rewards) = (vec![], vec![], vec![]);
        for sequence in 0..DIGITS * GROUP {
            let mut digit = sequence / GROUP;
            let mut right = 0;
            for _ in 0..LENGTH {
                let next = sample(&table[digit], rng.random());
                right += usize::from(next == (digit + 1) % DIGITS);
                inputs.push(digit as u32);
                targets.push(next as i64);
                digit = next;
            }
            rewards.push(right as f32 / LENGTH as f32);
        }
        let advantages = AdvantageConfig::default().advantages(&rewards, GROUP)?;
        let mut batch = TokenBatch::packed(targets, (0..=rewards.len()).map(|b| b * LENGTH).collect())?
            .with_advantages(advantages)?;

        // Two updates per rollout: the first computes the old log-probabilities against which the second is clipped.
        for _ in 0..2 {
            let output = grpo.loss(&model.hidden(&inputs)?, &model.lm_head, None, &batch)?;
            let gradients = output.backward()?;
            // Gradient descent, in place of one of candle-nn's optimizers: `Optimizer::step` takes the same gradients.
            for parameter in [&model.embedding, &model.mlp, &model.lm_head] {
                if let Some(gradient) = gradients.get(parameter) {
                    parameter.set(&(parameter.as_tensor() - (gradient * LEARNING_RATE)?)?)?;
                }
            }
            batch = if batch.old_logp().is_some() { batch } else { batch.with_old_logp(output.scores.logp)? };
        }
        last = rewards.iter().sum::<f32>() / rewards.len() as f32;
        first = if step == 0 { last } else { first };
        if step % 5 == 0 || step + 1 == STEPS {
            println!("step {step:2}  reward {last:.3}");
        }
    }
    Ok((first, last))
}

/// Returns the first digit whose cumulative probability exceeds `u` in [0, 1).
fn sample(probabilities: &[f32], u: f32) -> usize {
    let mut sum = 0.0;
    probabilities.iter().position(|p| (sum += p, u < sum).1).unwrap_or(DIGITS - 1)
}

#[allow(dead_code, reason = "the test of this example calls train() instead")]
fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    train(Implementation::Fused).map(|_| ())
}
