//! One GRPO step: rollout, rewards, advantages, then inner updates on the generated batch.

use crate::dataset::Item;
use crate::error::{Error, Result};
use crate::loss::PolicyLoss;
use crate::micro_batch::{accumulate, split_evenly};
use crate::model::Decoder;
use crate::optim::AdamW;
use crate::reward::{Reward, RewardInput, Rewards};
use crate::rng::Purpose;
use crate::rollout::{Completion, RolloutEngine, RolloutRequest, Sampling};
use crate::sequences::{Sequence, completion_hidden, token_batch};
use crate::tokenizer::Tokenizer;
use crate::train_config::TrainConfig;
use burn::module::Module;
use grpo_core::config::Rows;
use grpo_core::weights::{TokenWeights, token_weights};
use grpo_core::{Advantages, LossConfig, Metrics, Scores, TokenBatch};
use rayon::prelude::*;
use std::ops::Range;

/// One sampled completion and its judgement.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Name of the task.
    pub task: String,
    /// The question.
    pub prompt: String,
    /// A right answer.
    pub answer: String,
    /// What the policy wrote, without EOS.
    pub completion: String,
    /// Whether the length limit cut it off.
    pub truncated: bool,
    /// Its rewards.
    pub reward: Reward,
    /// Its advantage, scaled by `grpo.advantage_scale`.
    pub advantage: f32,
}

/// What one GRPO step did.
#[derive(Clone, Debug)]
pub struct StepReport {
    /// Number of the step, from 1.
    pub step: u64,
    /// Metrics under TRL's names: `loss`, `reward`, `reward_std`, `rewards/NAME/mean`, `completions/mean_length`, `kl`,
    /// `entropy`, `clip_ratio/..`, `grad_norm`, `learning_rate`, `frac_reward_zero_std`, `num_tokens` (of this step).
    pub metrics: Metrics,
    /// Every sample, those of one prompt next to each other.
    pub samples: Vec<Sample>,
    /// Prompt and completion tokens of all samples.
    pub tokens: usize,
}

impl StepReport {
    /// Value of a metric; 0 when it is not there.
    pub fn metric(&self, name: &str) -> f64 {
        self.metrics.value(name).unwrap_or(0.0)
    }
}

/// What a step works with beside the policy.
pub struct StepContext<'a> {
    /// The run's configuration.
    pub config: &'a TrainConfig,
    /// The loss and who computes it.
    pub loss: &'a PolicyLoss,
    /// Judges.
    pub rewards: &'a Rewards,
    /// Sampler.
    pub engine: &'a mut dyn RolloutEngine,
    /// Frozen reference for the KL term; needed when beta is not 0.
    pub reference: Option<&'a Decoder>,
}

/// The completions of one step, ready to be trained on.
struct Generation {
    sequences: Vec<Sequence>,
    batch: TokenBatch,
    samples: Vec<Sample>,
}

/// GRPO step number `step` (from 0) on `items`, one group of completions per item. `policy` lives on a device with
/// autodiff.
///
/// # Errors
/// Those of the engine, the loss and the optimizer; [`Error::NotFinite`] when the loss is not finite.
pub fn grpo_step(
    mut policy: Decoder,
    optimizer: &mut AdamW,
    context: &mut StepContext<'_>,
    items: &[Item],
    step: u64,
) -> Result<(Decoder, StepReport)> {
    let config = context.config;
    let mut metrics = Metrics::default();
    let generation = generate(&policy, context, items, step, &mut metrics)?;
    for _ in 0..config.grpo.num_iterations {
        for rows in updates(config, items.len()) {
            policy = update_policy(policy, optimizer, context, &generation, rows, &mut metrics)?;
        }
    }
    let tokens = generation.sequences.iter().map(|s| s.prompt.len() + s.completion.len()).sum();
    metrics.mean("num_tokens", tokens as f64, 1.0);
    Ok((policy, StepReport { step: step + 1, metrics, samples: generation.samples, tokens }))
}

/// Samples, judges and compares.
fn generate(
    policy: &Decoder,
    context: &mut StepContext<'_>,
    items: &[Item],
    step: u64,
    metrics: &mut Metrics,
) -> Result<Generation> {
    let config = context.config;
    let per_prompt = config.grpo.num_generations;
    let sampler = policy.valid();
    let prompts = items.iter().map(|i| Tokenizer.encode_prompt(&i.problem.prompt)).collect::<Result<Vec<_>>>()?;
    let request = RolloutRequest {
        prompts: &prompts,
        num_generations: per_prompt,
        max_completion_length: config.rollout.max_completion_length,
        sampling: Sampling::Random {
            temperature: config.rollout.temperature,
            seed: config.seed,
            purpose: Purpose::Rollout,
            step,
        },
    };
    let completions = context.engine.generate(&sampler, &request)?;
    if completions.len() != items.len() * per_prompt || completions.iter().any(|c| c.ids.is_empty()) {
        let expected = format!("{} completions of at least one token", items.len() * per_prompt);
        return Err(Error::argument("rollout", expected, format!("{} completions", completions.len())));
    }

    let mut samples = judge(items, per_prompt, &completions, context.rewards)?;
    let rewards: Vec<f32> = samples.iter().map(|s| s.reward.total.unwrap_or(f32::NAN)).collect();
    let advantages = config.grpo.advantages.advantages(&rewards, per_prompt)?;
    for (sample, advantage) in samples.iter_mut().zip(advantages) {
        sample.advantage = advantage * config.grpo.advantage_scale;
    }
    record_generation(metrics, &samples, &completions, per_prompt, context.rewards);

    let sequences: Vec<Sequence> = completions
        .iter()
        .enumerate()
        .map(|(i, c)| Sequence { prompt: prompts[i / per_prompt].clone(), completion: c.ids.clone() })
        .collect();
    let mut batch = token_batch(&sequences)?
        .with_advantages(Advantages::PerSequence(samples.iter().map(|s| s.advantage).collect()))?;
    // The engine samples with the policy itself: its log-probabilities matter to who asks for a correction, or brings
    // another engine and does.
    if corrects_sampler(&config.loss) {
        batch = batch.with_sampler_logp(completions.into_iter().flat_map(|c| c.logps).collect())?;
    }
    // With a single update the policy is its own old policy and every ratio is 1.
    let on_policy = config.grpo.num_iterations * config.grpo.steps_per_generation == 1;
    if !on_policy {
        let scores = score_all(&sampler, &sequences, &batch, context)?;
        batch = batch.with_old_logp(scores.logp)?;
    }
    if let Some(reference) = context.reference.filter(|_| context.loss.config.needs_ref_logp()) {
        let scores = score_all(reference, &sequences, &batch, context)?;
        batch = batch.with_ref_logp(scores.logp)?;
    }
    Ok(Generation { sequences, batch, samples })
}

fn judge(items: &[Item], per_prompt: usize, completions: &[Completion], rewards: &Rewards) -> Result<Vec<Sample>> {
    completions
        .iter()
        .enumerate()
        .map(|(i, c)| {
            let item = &items[i / per_prompt];
            let completion = Tokenizer.decode(&c.ids)?;
            let reward = rewards.score(&RewardInput {
                problem: &item.problem,
                task: item.task.as_ref(),
                completion: &completion,
                truncated: c.truncated,
            });
            Ok(Sample {
                task: item.task.name().to_owned(),
                prompt: item.problem.prompt.clone(),
                answer: item.problem.answer.clone(),
                completion,
                truncated: c.truncated,
                reward,
                advantage: 0.0,
            })
        })
        .collect()
}

/// The sequences of each optimizer step of one pass: whole groups, end to end.
fn updates(config: &TrainConfig, groups: usize) -> impl Iterator<Item = Range<usize>> {
    let per_prompt = config.grpo.num_generations;
    split_evenly(groups, config.grpo.steps_per_generation).map(move |g| g.start * per_prompt..g.end * per_prompt)
}

/// Whether the loss wants to know what the sampler said.
fn corrects_sampler(loss: &LossConfig) -> bool {
    loss.vllm_importance_sampling_correction == Some(true) || loss.rollout_is.is_some() || loss.rollout_rs.is_some()
}

/// Scores of all completion tokens under `model`, in the micro-batches of the updates, so that an unchanged policy gets a
/// ratio of 1.
fn score_all(model: &Decoder, sequences: &[Sequence], batch: &TokenBatch, context: &StepContext<'_>) -> Result<Scores> {
    let config = context.config;
    let parts = updates(config, sequences.len() / config.grpo.num_generations).flat_map(|rows| {
        split_evenly(rows.len(), config.grpo.gradient_accumulation_steps)
            .map(move |part| rows.start + part.start..rows.start + part.end)
    });
    score_parts(model, sequences, batch, parts, context.loss)
}

/// Scores of all completion tokens under `model`, part by part.
fn score_parts(
    model: &Decoder,
    sequences: &[Sequence],
    batch: &TokenBatch,
    parts: impl Iterator<Item = Range<usize>>,
    loss: &PolicyLoss,
) -> Result<Scores> {
    let parts: Vec<_> = parts.map(|rows| (rows, model.clone())).collect();
    let scores = parts
        .into_par_iter()
        .map(|(rows, model)| {
            let hidden = completion_hidden(&model, &sequences[rows.clone()])?;
            loss.score(hidden, model.lm_head(), &batch.select_sequences(rows)?)
        })
        .collect::<Result<Vec<_>>>()?;
    let mut all = Scores::default();
    for part in scores {
        all.logp.extend(part.logp);
        all.entropy.extend(part.entropy);
    }
    Ok(all)
}

/// One optimizer step on the sequences `rows`.
fn update_policy(
    policy: Decoder,
    optimizer: &mut AdamW,
    context: &StepContext<'_>,
    generation: &Generation,
    rows: Range<usize>,
    metrics: &mut Metrics,
) -> Result<Decoder> {
    let whole = generation.batch.select_sequences(rows.clone())?;
    let sequences = &generation.sequences[rows.clone()];
    let (loss, parts) = (context.loss, context.config.grpo.gradient_accumulation_steps);
    // Tokens are chosen from the whole update, whatever its micro-batches.
    let truncated = (0..rows.len()).filter(|row| generation.samples[rows.start + row].truncated).collect();
    let whole = LossConfig { truncated_rows: Rows::Indices(truncated), ..loss.config.clone() }
        .prepare(&whole, |batch| {
            let parts = split_evenly(batch.sequences(), parts);
            Ok::<_, Error>(score_parts(&policy.valid(), sequences, batch, parts, loss)?.into())
        })?
        .into_owned();
    if let Some(factors) = whole.factors() {
        metrics.merge(&factors.metrics);
    }
    // Truncated completions leave the count with the mask (TRL).
    let counts = |row: &usize| !(loss.config.mask_truncated_completions && generation.samples[*row].truncated);
    let tokens: usize = (0..generation.samples.len()).filter(counts).map(|row| generation.batch.active_in(row)).sum();
    let share = tokens as f64 / context.config.grpo.steps_per_generation as f64;
    let weights = update_weights(&loss.config, &whole, share)?;
    let whole = whole.with_weights(weights)?;

    let sum = accumulate(&policy, rows.len(), parts, |policy, part| {
        let hidden = completion_hidden(policy, &sequences[part.clone()])?;
        loss.loss(hidden, policy.lm_head(), &whole.select_sequences(part)?)
    })?;
    if !sum.loss.is_finite() {
        return Err(Error::NotFinite { what: "the loss", step: optimizer.steps() });
    }
    metrics.merge(&sum.metrics);
    let (policy, done) = optimizer.step(policy, &sum.gradients)?;
    metrics.mean("loss", sum.loss, 1.0);
    metrics.mean("grad_norm", done.grad_norm, 1.0);
    metrics.mean("learning_rate", done.learning_rate, 1.0);
    Ok(policy)
}

/// Weights of one whole update, so that its micro-batches simply add up.
///
/// dapo and cispo divide by the tokens of the generation batch, of which an update takes `share`, the even one: its own
/// count would make tokens of a short update weigh more (TRL's `num_items_in_batch`).
fn update_weights(config: &LossConfig, update: &TokenBatch, share: f64) -> Result<TokenWeights> {
    Ok(token_weights(&LossConfig { num_items_in_batch: Some(share), ..config.clone() }, update)?)
}

/// What can be said before the first update.
fn record_generation(
    metrics: &mut Metrics,
    samples: &[Sample],
    completions: &[Completion],
    per_prompt: usize,
    rewards: &Rewards,
) {
    for sample in samples {
        if let Some(reward) = sample.reward.total {
            metrics.mean("reward", f64::from(reward), 1.0);
        }
        for (name, term) in rewards.names().zip(&sample.reward.terms) {
            if let Some(term) = term {
                metrics.mean(&format!("rewards/{name}/mean"), f64::from(*term), 1.0);
            }
        }
    }
    for group in samples.chunks(per_prompt) {
        let present: Vec<f64> = group.iter().filter_map(|s| s.reward.total.map(f64::from)).collect();
        let mean = present.iter().sum::<f64>() / present.len().max(1) as f64;
        let variance = present.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / (present.len() as f64 - 1.0).max(1.0);
        metrics.mean("reward_std", variance.sqrt(), 1.0);
        let equal = present.windows(2).all(|w| w[0] == w[1]);
        metrics.mean("frac_reward_zero_std", f64::from(u8::from(equal)), 1.0);
    }
    for completion in completions {
        let length = completion.ids.len() as f64;
        metrics.mean("completions/mean_length", length, 1.0);
        metrics.min("completions/min_length", length);
        metrics.max("completions/max_length", length);
        metrics.mean("completions/clipped_ratio", f64::from(u8::from(completion.truncated)), 1.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_core::LossType;

    #[test]
    fn every_token_of_a_generation_batch_weighs_the_same_under_dapo() {
        // Two updates of 2 and 6 tokens: 8 in all, an even share of 4.
        let generation = TokenBatch::packed(vec![0; 8], vec![0, 2, 8]).unwrap();
        let weights = |loss_type| {
            let config = LossConfig { loss_type, epsilon_high: Some(5.0), ..LossConfig::default() };
            [0..1, 1..2]
                .map(|rows| update_weights(&config, &generation.select_sequences(rows).unwrap(), 4.0).unwrap().policy)
        };
        assert_eq!(weights(LossType::Dapo), [vec![0.25; 2], vec![0.25; 6]]);
        assert_eq!(weights(LossType::Cispo), [vec![0.25; 2], vec![0.25; 6]]);
        assert_eq!(weights(LossType::Bnpo), [vec![1.0 / 2.0; 2], vec![1.0 / 6.0; 6]]);
    }
}
