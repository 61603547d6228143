//! GRPO with a model of `f32` slices: grpo-core computes the loss and its gradients, this file has everything else.
//!
//! The model sees one digit and predicts the next one. The reward of a completion is the share of its digits that count up from the
//! prompt, modulo 10. The program fails if the model does not learn that.

use grpo_backend_cpu::CpuBackend;
use grpo_core::{AdvantageConfig, Grads, GrpoLoss, LossConfig, Metrics, TokenBatch};
use rand::{RngExt, SeedableRng, rngs::StdRng};

const VOCAB: usize = 10; // the digits
const HIDDEN: usize = 16;
const LENGTH: usize = 4; // tokens of a completion
const GROUP: usize = 8; // completions of a prompt
const STEPS: usize = 40;
const LEARNING_RATE: f32 = 0.05;

/// A matrix of weights, and the moments of its gradient for AdamW.
struct Parameter {
    values: Vec<f32>,
    mean: Vec<f32>,
    square: Vec<f32>,
}

impl Parameter {
    fn new(size: usize, rng: &mut StdRng) -> Self {
        let values = (0..size).map(|_| rng.random_range(-0.3..0.3)).collect();
        Self { values, mean: vec![0.0; size], square: vec![0.0; size] }
    }

    /// Takes step `t`, from 1, of AdamW with betas 0.9 and 0.99 and weight decay 0.01.
    fn update(&mut self, gradient: &[f32], t: i32) {
        for (i, g) in gradient.iter().enumerate() {
            self.mean[i] += (1.0 - 0.9) * (g - self.mean[i]);
            self.square[i] += (1.0 - 0.99) * (g * g - self.square[i]);
            let (mean, square) = (self.mean[i] / (1.0 - 0.9f32.powi(t)), self.square[i] / (1.0 - 0.99f32.powi(t)));
            self.values[i] -= LEARNING_RATE * (mean / (square.sqrt() + 1e-8) + 0.01 * self.values[i]);
        }
    }
}

/// Hidden states are tanh of an embedding; the loss multiplies them with the head.
struct Model {
    embedding: Parameter, // [V, H]
    lm_head: Parameter,   // [V, H]
    updates: i32,
}

impl Model {
    fn new(rng: &mut StdRng) -> Self {
        let [embedding, lm_head] = [(); 2].map(|()| Parameter::new(VOCAB * HIDDEN, rng));
        Self { embedding, lm_head, updates: 0 }
    }

    /// Returns the hidden states `[N, H]` of tokens `[N]`.
    fn hidden(&self, tokens: &[usize]) -> Vec<f32> {
        let row = |token: &usize| &self.embedding.values[token * HIDDEN..][..HIDDEN];
        tokens.iter().flat_map(row).map(|x| x.tanh()).collect()
    }

    /// Computes the backward pass from the hidden states to the embedding, and updates all weights.
    fn update(&mut self, tokens: &[usize], hidden: &[f32], dhidden: &[f32], dlm_head: &[f32]) {
        let mut dembedding = vec![0.0; VOCAB * HIDDEN];
        for (row, token) in tokens.iter().enumerate() {
            for i in 0..HIDDEN {
                let (h, dh) = (hidden[row * HIDDEN + i], dhidden[row * HIDDEN + i]);
                dembedding[token * HIDDEN + i] += dh * (1.0 - h * h);
            }
        }
        self.updates += 1;
        self.embedding.update(&dembedding, self.updates);
        self.lm_head.update(dlm_head, self.updates);
    }

    /// Samples the token after `token` from the softmax of the logits.
    fn sample(&self, token: usize, rng: &mut StdRng) -> usize {
        let hidden = self.hidden(&[token]);
        let head = self.lm_head.values.chunks(HIDDEN);
        let weights: Vec<f32> =
            head.map(|row| row.iter().zip(&hidden).map(|(w, h)| w * h).sum::<f32>().exp()).collect();
        let mut point = rng.random::<f32>() * weights.iter().sum::<f32>();
        let behind = |weight: &f32| {
            point -= weight;
            point < 0.0
        };
        weights.iter().position(behind).unwrap_or(VOCAB - 1)
    }
}

fn main() -> grpo_core::Result<()> {
    let mut rng = StdRng::seed_from_u64(1);
    let mut model = Model::new(&mut rng);
    let config = LossConfig::dapo().epsilon_high(0.28);
    let loss = GrpoLoss::builder(config).head(HIDDEN, VOCAB).build(&CpuBackend::new())?;
    let (mut reward, mut metrics) = (0.0, Metrics::default());
    for step in 1..=STEPS {
        // Rollout: a group of completions for each digit as a prompt.
        let (mut inputs, mut targets, mut rewards) = (vec![], vec![], vec![]);
        for sequence in 0..VOCAB * GROUP {
            let (mut token, mut right) = (sequence / GROUP, 0.0);
            for _ in 0..LENGTH {
                let next = model.sample(token, &mut rng);
                right += f32::from(u8::from(next == (token + 1) % VOCAB));
                inputs.push(token);
                targets.push(next as i64);
                token = next;
            }
            rewards.push(right / LENGTH as f32);
        }
        let offsets = (0..=rewards.len()).map(|sequence| sequence * LENGTH).collect();

        let advantages = AdvantageConfig::default().advantages(&rewards, GROUP)?;
        let batch = TokenBatch::packed(targets, offsets)?.with_advantages(advantages)?;
        let old = loss.score(&model.hidden(&inputs), &model.lm_head.values, &batch)?;
        let batch = batch.with_old_logp(old.logp)?; // the second update is clipped where it leaves the old policy
        for _ in 0..2 {
            let hidden = model.hidden(&inputs); // [N, H]
            let (mut dhidden, mut dlm_head) = (vec![0.0; hidden.len()], vec![0.0; VOCAB * HIDDEN]);
            let grads = Grads::new(&mut dhidden, &mut dlm_head); // the step adds to them
            let output = loss.step(&hidden, &model.lm_head.values, &batch, grads)?;
            output.check_finite(&batch)?;
            model.update(&inputs, &hidden, &dhidden, &dlm_head);
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
