//! GRPO with a burn model: grpo-burn is an operation of burn, whose scalar has a `backward()`.
//!
//! The model sees one digit and predicts the next one. The reward of a completion is the share of its digits that count up from the
//! prompt, modulo 10. The program fails if the model does not learn that.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::activation::{gelu, softmax};
use burn::tensor::{Device, Gradients, Int, Tensor};
use burn_nn::{Embedding, EmbeddingConfig, Linear, LinearConfig}; // `burn::nn` of the crate `burn`
use grpo_backend_cpu::CpuBackend;
use grpo_burn::GrpoLoss;
use grpo_core::{AdvantageConfig, HeadLayout, LossConfig, Metrics, TokenBatch};
use rand::{RngExt, SeedableRng, rngs::StdRng};

const VOCAB: usize = 10; // the digits
const HIDDEN: usize = 32;
const LENGTH: usize = 4; // tokens of a completion
const GROUP: usize = 8; // completions of a prompt
const STEPS: usize = 30;
const LEARNING_RATE: f32 = 3.0;

#[derive(Module, Debug)]
struct Model {
    embedding: Embedding,
    mlp: Linear,
    lm_head: Linear,
}

impl Model {
    fn new(device: &Device) -> Self {
        Self {
            embedding: EmbeddingConfig::new(VOCAB, HIDDEN).init(device),
            mlp: LinearConfig::new(HIDDEN, HIDDEN).init(device),
            lm_head: LinearConfig::new(HIDDEN, VOCAB).init(device),
        }
    }

    /// Returns the hidden states `[N, H]` of tokens `[N]`.
    fn hidden(&self, tokens: &[i64]) -> Tensor<2> {
        let tokens = Tensor::<1, Int>::from_data(tokens, &self.lm_head.weight.val().device());
        gelu(self.mlp.forward(self.embedding.forward(tokens.unsqueeze()).squeeze_dim(0)))
    }

    /// Returns the head `[H, V]` and its bias `[V]`.
    fn head(&self) -> (Tensor<2>, Option<Tensor<1>>) {
        (self.lm_head.weight.val(), self.lm_head.bias.as_ref().map(Param::val))
    }
}

/// Gradient descent. An optimizer of burn takes the same gradients: `GradientsParams::from_grads(gradients, &model)`.
struct Descend(Gradients);

impl ModuleMapper for Descend {
    fn map_float<const D: usize>(&mut self, parameter: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(gradient) = parameter.val().grad(&self.0) else { return parameter };
        parameter.map(|value| Tensor::from_inner(value.inner() - gradient * LEARNING_RATE).require_grad())
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
    let device = Device::flex().autodiff();
    device.seed(1);
    let mut model = Model::new(&device);
    let grpo = GrpoLoss::builder(LossConfig::dapo().epsilon_high(0.28))
        .head_layout(HeadLayout::HiddenVocab) // burn's Linear: [H, V]
        .build(&CpuBackend::new())?;
    let (mut reward, mut metrics) = (0.0, Metrics::default());
    for step in 1..=STEPS {
        // Rollout: a group of completions for each digit as a prompt.
        let (policy, tokens) = (model.valid(), (0..VOCAB as i64).collect::<Vec<_>>());
        let probabilities =
            softmax(policy.lm_head.forward(policy.hidden(&tokens)), 1).into_data().try_to_vec::<f32>()?;
        let (mut inputs, mut targets, mut rewards) = (vec![], vec![], vec![]);
        for sequence in 0..VOCAB * GROUP {
            let (mut token, mut right) = (sequence / GROUP, 0.0);
            for _ in 0..LENGTH {
                let next = sample(&probabilities[token * VOCAB..][..VOCAB], rng.random());
                right += f32::from(u8::from(next == (token + 1) % VOCAB));
                inputs.push(token as i64);
                targets.push(next as i64);
                token = next;
            }
            rewards.push(right / LENGTH as f32);
        }
        let offsets = (0..=rewards.len()).map(|sequence| sequence * LENGTH).collect();

        let advantages = AdvantageConfig::default().advantages(&rewards, GROUP)?;
        let batch = TokenBatch::packed(targets, offsets)?.with_advantages(advantages)?;
        let (lm_head, bias) = model.head();
        let old = grpo.score(model.hidden(&inputs), lm_head, bias, &batch)?;
        let batch = batch.with_old_logp(old.logp)?; // the second update is clipped where it leaves the old policy
        for _ in 0..2 {
            let (lm_head, bias) = model.head();
            let output = grpo.loss(model.hidden(&inputs), lm_head, bias, &batch)?;
            model = model.map(&mut Descend(output.loss.backward()));
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
