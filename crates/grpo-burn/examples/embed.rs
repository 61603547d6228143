//! A custom model and training loop with the GRPO loss.
//!
//! The model sees one digit and predicts the next token; its reward is for counting up from the prompt, modulo 10.
//! The loss and its implementation are configuration:
//!
//!     cargo run --release -p grpo-burn --example embed
//!     cargo run --release -p grpo-burn --example embed -- \
//!         '{"implementation": "reference", "loss": {"loss_type": "cispo", "epsilon_high": 2.0}}'

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::activation::{gelu, softmax};
use burn::tensor::{Device, Gradients, Int, Tensor};
use burn_nn::{Embedding, EmbeddingConfig, Linear, LinearConfig}; // `burn::nn` in the umbrella crate
use grpo_burn::GrpoLoss;
use grpo_core::{AdvantageConfig, Advantages, HeadLayout, Implementation, LossConfig, Tiling, TokenBatch};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::sync::Arc;

const DIGITS: usize = 10;
const LENGTH: usize = 4;
const GROUP: usize = 8;
const STEPS: usize = 30;
const LEARNING_RATE: f32 = 3.0;

#[derive(serde::Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct Settings {
    implementation: Implementation,
    tiling: Tiling,
    loss: LossConfig,
}

#[derive(Module, Debug)]
struct Model {
    embedding: Embedding,
    mlp: Linear,
    lm_head: Linear,
}

impl Model {
    fn new(device: &Device) -> Self {
        Self {
            embedding: EmbeddingConfig::new(DIGITS, 32).init(device),
            mlp: LinearConfig::new(32, 32).init(device),
            lm_head: LinearConfig::new(32, DIGITS).init(device),
        }
    }

    /// Returns hidden states `[N, 32]` of tokens `[N]`, which the loss takes together with the head.
    fn hidden(&self, tokens: &[i64]) -> Tensor<2> {
        let tokens = Tensor::<1, Int>::from_data(tokens, &self.lm_head.weight.val().device());
        gelu(self.mlp.forward(self.embedding.forward(tokens.unsqueeze()).squeeze_dim(0)))
    }
}

/// Gradient descent, in place of one of burn's optimizers: `GradientsParams::from_grads` takes the same gradients.
struct Descend(Gradients);

impl ModuleMapper for Descend {
    fn map_float<const D: usize>(&mut self, parameter: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(gradient) = parameter.val().grad(&self.0) else { return parameter };
        parameter.map(|value| Tensor::from_inner(value.inner() - gradient * LEARNING_RATE).require_grad())
    }
}

/// Trains from scratch and returns the mean rewards of the first and of the last step.
pub(crate) fn train(settings: &str) -> Result<(f32, f32), Box<dyn std::error::Error>> {
    let settings: Settings = serde_json::from_str(settings)?;
    let grpo = GrpoLoss::new(Arc::new(backend_cpu::CpuBackend::new()), settings.loss)?
        .with_implementation(settings.implementation)
        .with_tiling(settings.tiling)
        .with_head_layout(HeadLayout::HiddenVocab); // burn's Linear: [H, V]

    let device = Device::flex().autodiff();
    device.seed(1);
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut model = Model::new(&device);
    let (mut first, mut last) = (f32::NAN, f32::NAN);
    for step in 0..STEPS {
        // Rollout: the model conditions on one digit only, so ten rows of probabilities suffice for sampling.
        let policy = model.valid();
        let digits: Vec<i64> = (0..DIGITS as i64).collect();
        let table = softmax(policy.lm_head.forward(policy.hidden(&digits)), 1).into_data().try_to_vec::<f32>()?;
        let (mut inputs, mut targets, mut rewards) = (vec![], vec![], vec![]);
        for sequence in 0..DIGITS * GROUP {
            let mut digit = sequence / GROUP;
            let mut right = 0;
            for _ in 0..LENGTH {
                let next = sample(&table[digit * DIGITS..][..DIGITS], rng.random());
                right += usize::from(next == (digit + 1) % DIGITS);
                inputs.push(digit as i64);
                targets.push(next as i64);
                digit = next;
            }
            rewards.push(right as f32 / LENGTH as f32);
        }

        let advantages = AdvantageConfig::default().advantages(&rewards, GROUP)?;
        let mut batch = TokenBatch::packed(targets, (0..=rewards.len()).map(|b| b * LENGTH).collect())?
            .with_advantages(Advantages::PerSequence(advantages))?;

        // Two updates per rollout: the first computes the old log-probabilities against which the second is clipped.
        let mut report = (0.0, 0.0);
        for _ in 0..2 {
            let (head, bias) = (model.lm_head.weight.val(), model.lm_head.bias.as_ref().map(|b| b.val()));
            let output = grpo.loss(model.hidden(&inputs), head, bias, &batch)?;
            model = model.map(&mut Descend(output.loss.backward()));
            report = (output.value, output.metrics.value("entropy").unwrap_or_default());
            batch = if batch.old_logp().is_some() { batch } else { batch.with_old_logp(output.scores.logp)? };
        }

        last = rewards.iter().sum::<f32>() / rewards.len() as f32;
        first = if step == 0 { last } else { first };
        if step % 5 == 0 || step + 1 == STEPS {
            let (loss, entropy) = report;
            println!("step {step:2}  reward {last:.3}  loss {loss:+.4}  entropy {entropy:.3}");
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
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let settings = std::env::args().nth(1).unwrap_or_else(|| "{}".into());
    train(&settings).map(|_| ())
}
