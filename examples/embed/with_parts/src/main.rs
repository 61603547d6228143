//! grpo-trainer with a policy, a data set and a reward of its own.
//!
//! The prompts are digits, and the reward is the share of characters that count up, modulo 10. The program fails if this is not learned.

use grpo_backend_cpu::CpuBackend;
use grpo_trainer::data::{self, Dataset, Item};
use grpo_trainer::grpo_core::{Grads, GrpoLoss, HeadLayout, LossOutput, Scores};
use grpo_trainer::models::CharTokenizer;
use grpo_trainer::policy::{self, Completion, CompletionSampler, OptimizerSettings, Policy};
use grpo_trainer::policy::{RolloutRequest, Sequence, SequenceBatch, StepLoss, UpdateReport, Weights};
use grpo_trainer::rewards::{RewardFn, RewardInput, Rewards};
use grpo_trainer::{Parts, Phase, TrainConfig, Trainer};
use std::iter::repeat_n;

const VOCAB: usize = CharTokenizer::VOCAB_SIZE;
const LENGTH: usize = 4; // tokens of a completion

/// A head `[H, V]` without a model below it: the hidden state is the one-hot vector of the last token, so H = V.
struct Bigram {
    head: Vec<f32>,
    gradient: Vec<f32>,
    loss: GrpoLoss,
    updates: u64,
}

impl Bigram {
    /// Returns the hidden states `[N, H]` that predict the completion tokens of a micro-batch.
    fn hidden(batch: &SequenceBatch<'_>) -> Vec<f32> {
        let inputs = |s: &Sequence| [&s.prompt[s.prompt.len() - 1..], &s.completion[..s.completion.len() - 1]].concat();
        let one_hot = |token: u32| (0..VOCAB as u32).map(move |id| f32::from(u8::from(id == token)));
        batch.sequences.iter().flat_map(inputs).flat_map(one_hot).collect()
    }
}

impl Policy for Bigram {
    fn num_parameters(&self) -> usize {
        self.head.len()
    }
    fn context_length(&self) -> usize {
        64
    }
    fn generate(&mut self, request: &RolloutRequest<'_>) -> policy::Result<Vec<Completion>> {
        let mut completions = Vec::new();
        for prompt in request.prompts.iter().flat_map(|prompt| repeat_n(prompt, request.num_generations)) {
            let mut sampler = CompletionSampler::new(request, completions.len(), prompt);
            while let Some(token) = sampler.next_input() {
                sampler.extend(&self.head[token as usize * VOCAB..][..VOCAB])?;
            }
            completions.push(sampler.finish());
        }
        Ok(completions)
    }
    fn score(&mut self, _: Weights, batches: &[SequenceBatch<'_>]) -> policy::Result<Scores> {
        let mut scores = Scores::default();
        for batch in batches {
            let next = self.loss.score(&Self::hidden(batch), &self.head, &batch.tokens)?;
            scores.logp.extend(next.logp);
            scores.entropy.extend(next.entropy);
        }
        Ok(scores)
    }
    fn accumulate(&mut self, batches: &[SequenceBatch<'_>], loss: StepLoss) -> policy::Result<LossOutput> {
        if loss != StepLoss::Grpo {
            return Err(policy::Error::argument("accumulate", "the GRPO loss (warmup.steps: 0)", "another loss"));
        }
        let mut output = LossOutput::default();
        for (batch, hidden) in batches.iter().map(|batch| (batch, Self::hidden(batch))) {
            let mut dhidden = vec![0.0; hidden.len()]; // a model below the head would need it
            let grads = Grads::new(&mut dhidden, &mut self.gradient);
            output.merge(self.loss.step(&hidden, &self.head, &batch.tokens, grads)?);
        }
        Ok(output)
    }
    fn apply(&mut self, learning_rate: f64) -> policy::Result<UpdateReport> {
        for (weight, gradient) in self.head.iter_mut().zip(&self.gradient) {
            *weight -= learning_rate as f32 * gradient;
        }
        self.updates += 1;
        Ok(UpdateReport { applied: true, ..self.skip()? })
    }
    fn skip(&mut self) -> policy::Result<UpdateReport> {
        let grad_norm = self.gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        self.gradient.fill(0.0);
        Ok(UpdateReport { grad_norm, applied: false })
    }
    fn reset_optimizer(&mut self, _: &OptimizerSettings) -> policy::Result<()> {
        self.updates = 0; // plain gradient descent has no moments
        self.skip().map(drop)
    }
    fn optimizer_steps(&self) -> u64 {
        self.updates
    }
}

/// The ten digits, in turn.
struct Digits(u64);
impl Dataset for Digits {
    fn next_batch(&mut self, count: usize) -> data::Result<Vec<Item>> {
        self.0 += count as u64;
        Ok((self.0 - count as u64..self.0).map(|row| Item::new((row % 10).to_string())).collect())
    }
    fn cursor(&self) -> u64 {
        self.0
    }
    fn set_cursor(&mut self, cursor: u64) {
        self.0 = cursor;
    }
}

struct CountsUp;
impl RewardFn for CountsUp {
    fn name(&self) -> &str {
        "counts_up"
    }
    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        let prompt: u32 = input.item.prompt.to_string().parse().ok()?;
        let right = input.completion.chars().zip(prompt + 1..).filter(|(c, next)| c.to_digit(10) == Some(next % 10));
        Some(right.count() as f32 / LENGTH as f32)
    }
}

fn main() -> grpo_trainer::Result<()> {
    let mut config = TrainConfig::default();
    config.rollout.max_completion_length = Some(LENGTH);
    config.grpo.num_generations = 16;
    config.optimizer.learning_rate = 20.0;

    let loss = GrpoLoss::builder(config.loss()).head(VOCAB, VOCAB).head_layout(HeadLayout::HiddenVocab);
    let (loss, zeros) = (loss.build(&CpuBackend::new())?, vec![0.0; VOCAB * VOCAB]);
    let policy = Bigram { head: zeros.clone(), gradient: zeros, loss, updates: 0 };
    let parts = Parts::new(policy, CharTokenizer, Digits(0), Rewards::from_terms(vec![(Box::new(CountsUp), 1.0)])?);
    let (mut run, mut reward) = (Trainer::with_parts(config, parts)?, 0.0);
    while run.phase() == Phase::Grpo {
        let report = run.grpo_step()?;
        reward = report.metric("reward");
        if report.step % 20 == 0 {
            println!("step {:3}  reward {reward:.3}  entropy {:.3}", report.step, report.metric("entropy"));
        }
    }
    assert!(reward > 0.9, "the policy did not learn to count: reward {reward}");
    Ok(())
}
