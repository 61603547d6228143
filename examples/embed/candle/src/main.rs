//! GRPO with a candle model: the loss of grpo-candle has a `backward()`.
//!
//! The model sees one digit and predicts the next one. The reward of a completion is the share of its digits that count up from the
//! prompt, modulo 10. The program fails if the model does not learn that.

use candle_core::{D, Device, Tensor, Var};
use grpo_backend_cpu::CpuBackend;
use grpo_candle::GrpoLoss;
use grpo_core::{AdvantageConfig, LossConfig, Metrics, TokenBatch};
use rand::{RngExt, SeedableRng, rngs::StdRng};

const VOCAB: usize = 10; // the digits
const HIDDEN: usize = 32;
const LENGTH: usize = 4; // tokens of a completion
const GROUP: usize = 8; // completions of a prompt
const STEPS: usize = 30;
const LEARNING_RATE: f64 = 3.0;

struct Model {
    embedding: Var, // [V, H]
    mlp: Var,       // [H, H]
    lm_head: Var,   // [V, H]
}

impl Model {
    fn new(rng: &mut StdRng) -> candle_core::Result<Self> {
        let mut uniform = |rows: usize, scale: f32| {
            let values: Vec<f32> = (0..rows * HIDDEN).map(|_| rng.random_range(-scale..scale)).collect();
            Var::from_vec(values, (rows, HIDDEN), &Device::Cpu)
        };
        let scale = (HIDDEN as f32).powf(-0.5);
        Ok(Self { embedding: uniform(VOCAB, 1.0)?, mlp: uniform(HIDDEN, scale)?, lm_head: uniform(VOCAB, scale)? })
    }

    /// Returns the hidden states `[N, H]` of tokens `[N]`.
    fn hidden(&self, tokens: &[u32]) -> candle_core::Result<Tensor> {
        let tokens = Tensor::new(tokens, &Device::Cpu)?;
        self.embedding.index_select(&tokens, 0)?.matmul(&self.mlp)?.gelu()
    }

    /// Returns the probabilities `[V, V]` of the token after each token.
    fn probabilities(&self) -> candle_core::Result<Vec<Vec<f32>>> {
        let tokens: Vec<u32> = (0..VOCAB as u32).collect();
        let weights = self.hidden(&tokens)?.matmul(&self.lm_head.t()?)?.exp()?;
        weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?.to_vec2()
    }
}

/// Returns the first token whose cumulative probability exceeds `point` in [0, 1).
fn sample(probabilities: &[f32], point: f32) -> usize {
    let mut sum = 0.0;
    let exceeds = |probability: &f32| {
        sum += probability;
        sum > point
    };
    probabilities.iter().position(exceeds).unwrap_or(VOCAB - 1)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut rng = StdRng::seed_from_u64(1);
    let model = Model::new(&mut rng)?;
    let grpo = GrpoLoss::builder(LossConfig::dapo().epsilon_high(0.28)).build(&CpuBackend::new())?;
    let (mut reward, mut metrics) = (0.0, Metrics::default());
    for step in 1..=STEPS {
        // Rollout: a group of completions for each digit as a prompt.
        let probabilities = model.probabilities()?;
        let (mut inputs, mut targets, mut rewards) = (vec![], vec![], vec![]);
        for sequence in 0..VOCAB * GROUP {
            let (mut token, mut right) = (sequence / GROUP, 0.0);
            for _ in 0..LENGTH {
                let next = sample(&probabilities[token], rng.random());
                right += f32::from(u8::from(next == (token + 1) % VOCAB));
                inputs.push(token as u32);
                targets.push(next as i64);
                token = next;
            }
            rewards.push(right / LENGTH as f32);
        }
        let offsets = (0..=rewards.len()).map(|sequence| sequence * LENGTH).collect();

        let advantages = AdvantageConfig::default().advantages(&rewards, GROUP)?;
        let batch = TokenBatch::packed(targets, offsets)?.with_advantages(advantages)?;
        let old = grpo.score(&model.hidden(&inputs)?, &model.lm_head, None, &batch)?;
        let batch = batch.with_old_logp(old.logp)?; // the second update is clipped where it leaves the old policy
        for _ in 0..2 {
            let output = grpo.loss(&model.hidden(&inputs)?, &model.lm_head, None, &batch)?;
            let gradients = output.backward()?;
            // Gradient descent. The optimizers of candle-nn take the same gradients: `optimizer.step(&gradients)`.
            for parameter in [&model.embedding, &model.mlp, &model.lm_head] {
                let gradient = gradients.get(parameter).ok_or("a parameter has no gradient")?;
                parameter.set(&(parameter.as_tensor() - (gradient * LEARNING_RATE)?)?)?;
            }
            metrics = output.metrics;
        }

        reward = rewards.iter().sum::<f32>() / rewards.len() as f32;
        if step % 5 == 0 {
            let metric = |name: &str| metrics.value(name).unwrap_or(f64::NAN);
            let (entropy, clipped) = (metric("entropy"), metric("clip_ratio/region_mean"));
            println!("step {step:2}  reward {reward:.3}  entropy {entropy:.3}  clipped {clipped:.3}");
        }
    }
    assert!(reward > 0.9, "the model did not learn to count: reward {reward}");
    Ok(())
}
