//! Builds the training batch of a step, with advantages, from scored completions.

use super::context::StepContext;
use super::generate::{Group, greedy_rewards};
use super::passes::{pass_micro_batches, rows_of};
use super::sample::Sample;
use super::times::PhaseTimes;
use crate::error::Result;
use crate::micro_batch::sequence_batches;
use grpo_core::advantages::{AdvantageConfig, AdvantageEstimator, AdvantageInputs, RewardValues};
use grpo_core::batch::{SamplingMask, ValueTargets};
use grpo_core::objective::explained_variance;
use grpo_core::rewards::kl_in_reward;
use grpo_core::{Advantages, Metrics, TokenBatch};
use grpo_policy::{RoutedExperts, Sequence, SequenceBatch, Weights, token_batch};
use grpo_rewards::{Reward, Rewards};
use std::borrow::Cow;

/// The completions of one step, ready for training.
pub(super) struct Generation {
    pub(super) sequences: Vec<Sequence>,
    /// The experts of each sequence that training replays; empty without [`grpo_run_config::PolicyConfig::replay_routing`].
    pub(super) routed_experts: Vec<RoutedExperts>,
    pub(super) batch: TokenBatch,
    /// The sampler's log-probabilities `[N]`, NaN where unknown, if the loss does not read them from the batch.
    pub(super) sampler_logp: Option<Vec<f32>>,
    pub(super) samples: Vec<Sample>,
    /// The index of the sample of each sequence, ascending: a conversation of an agent may have several sequences.
    pub(super) sample_of: Vec<usize>,
}

impl Generation {
    /// Concatenates the groups, scores their tokens and computes advantages.
    pub(super) fn new(
        context: &mut StepContext<'_>,
        groups: Vec<Group>,
        metrics: &mut Metrics,
        times: &mut PhaseTimes,
    ) -> Result<Self> {
        let grpo = &context.config.grpo;
        let greedy = match grpo.advantages.estimator {
            AdvantageEstimator::Remax => {
                let of_groups = greedy_rewards(context, &groups)?;
                let of_rows = of_groups.into_iter().flat_map(|r| std::iter::repeat_n(r, grpo.num_generations));
                Some(of_rows.collect::<Vec<_>>())
            }
            _ => None,
        };
        let (mut sequences, mut samples, mut sample_of) = (Vec::new(), Vec::new(), Vec::new());
        let (mut sampler_logp, mut mask, mut sampling_mask) = (Vec::new(), Vec::new(), SamplingMask::default());
        let mut routed_experts = Vec::new();
        for group in groups {
            for (sample, prompt, completion) in group.rows() {
                let mut kept = completion.sampling_mask.clone();
                kept.resize(completion.ids.len());
                sampling_mask.extend(&kept);
                if context.config.policy.replay_routing {
                    routed_experts.push(completion.routed_experts.clone());
                }
                sequences.push(Sequence { prompt: prompt.clone(), completion: completion.ids.clone() });
                sampler_logp.extend_from_slice(&completion.logps);
                mask.extend(completion.mask.iter().map(|sampled| f32::from(*sampled)));
                sample_of.push(samples.len() + sample);
            }
            samples.extend(group.samples);
        }
        let mut batch = token_batch(&sequences)?.with_mask(&mask)?;
        if context.config.rollout.replay_sampling_mask {
            batch = batch.with_sampling_mask(sampling_mask)?;
        }
        // These are the micro-batches of the updates, so that an unchanged policy gets ratios of exactly 1.
        let rows = pass_micro_batches(grpo, &sample_of);
        let parts = sequence_batches(&sequences, &routed_experts, &batch, rows)?;
        let (batch, sampler_logp) = with_logps(context, &parts, batch, sampler_logp, times)?;
        let policy = &mut context.parts.policy;
        let values = match policy.has_value_head() {
            true => Some(times.time("values", || policy.values(&parts))?),
            false => None,
        };
        drop(parts);
        // Conversations are compared as a whole: their rows are one sequence here.
        let joined = joined(&batch, &sample_of)?;
        let (advantages, returns) = times
            .time("adv", || advantages(context, &joined, &samples, greedy.as_deref(), values.as_deref(), metrics))?;
        for (b, sample) in samples.iter_mut().enumerate() {
            sample.advantage = match &advantages {
                Advantages::PerSequence(of) => of[b],
                Advantages::PerToken(of) => {
                    mean(joined.range(b).filter(|row| joined.is_active(*row)).map(|row| of[row]))
                }
            };
        }
        // Every row has the advantage of its conversation.
        let advantages = match advantages {
            Advantages::PerSequence(of) => {
                Advantages::PerSequence(sample_of.iter().map(|sample| of[*sample]).collect())
            }
            per_token @ Advantages::PerToken(_) => per_token,
        };
        let mut batch = batch.with_advantages(advantages)?;
        if let (Some(old_values), Some(returns)) = (values, returns) {
            batch = batch.with_value_targets(ValueTargets { old_values, returns })?;
            if let Some(explained) = explained_variance(&batch) {
                metrics.mean("explained_variance", explained, 1.0);
            }
        }
        Ok(Self { batch, sampler_logp, sequences, routed_experts, samples, sample_of })
    }
}

/// Returns the tokens with one sequence per sample, as estimators of advantages read them.
fn joined<'a>(batch: &'a TokenBatch, sample_of: &[usize]) -> Result<Cow<'a, TokenBatch>> {
    let samples = sample_of.last().map_or(0, |last| last + 1);
    // Every sample has at least one row.
    if samples == sample_of.len() {
        return Ok(Cow::Borrowed(batch));
    }
    let offsets = (0..=samples).map(|sample| batch.offsets()[rows_of(sample_of, sample..sample).start]).collect();
    let mask: Vec<f32> = (0..batch.tokens()).map(|row| f32::from(u8::from(batch.is_active(row)))).collect();
    let mut joined = TokenBatch::packed(batch.targets().to_vec(), offsets)?.with_mask(&mask)?;
    if let Some(logp) = batch.old_logp() {
        joined = joined.with_old_logp(logp.to_vec())?;
    }
    if let Some(logp) = batch.ref_logp() {
        joined = joined.with_ref_logp(logp.to_vec())?;
    }
    Ok(Cow::Owned(joined))
}

/// Adds the log-probabilities that the loss and the rewards require to the batch. Also returns those of the sampler, unless the batch has them.
fn with_logps(
    context: &mut StepContext<'_>,
    parts: &[SequenceBatch<'_>],
    mut batch: TokenBatch,
    sampler_logp: Vec<f32>,
    times: &mut PhaseTimes,
) -> Result<(TokenBatch, Option<Vec<f32>>)> {
    let (grpo, policy) = (&context.config.grpo, &mut context.parts.policy);
    // The log-probabilities of the engine matter to the loss only if it corrects for the sampler. A policy that samples itself needs no
    // correction; with a server it is on by default.
    let unread = match context.loss.asks_for_sampler_logp() {
        true => {
            batch = batch.with_sampler_logp(sampler_logp)?;
            None
        }
        false => Some(sampler_logp),
    };
    if grpo.scores_old_policy() {
        let scores = times.time("old_log_prob", || policy.score(Weights::Policy, parts))?;
        batch = batch.with_old_logp(scores.logp)?;
    }
    if policy.has_ref_policy() {
        let scores = times.time("ref", || policy.score(Weights::RefPolicy, parts))?;
        batch = batch.with_ref_logp(scores.logp)?;
    }
    Ok((batch, unread))
}

/// Computes the advantages of the samples, per completion or per token, scaled by `grpo.advantage_scale`. If the tokens have `values`, also
/// the returns `[N]`, the targets of the value head, NaN if a completion has no reward.
fn advantages(
    context: &mut StepContext<'_>,
    batch: &TokenBatch,
    samples: &[Sample],
    greedy: Option<&[Option<f32>]>,
    values_of_tokens: Option<&[f32]>,
    metrics: &mut Metrics,
) -> Result<(Advantages, Option<Vec<f32>>)> {
    let grpo = &context.config.grpo;
    let totals: Vec<Option<f32>> = samples.iter().map(|s| s.reward.total).collect();
    let mut config = grpo.advantages.clone();
    let values;
    let rewards = if grpo.use_kl_in_reward {
        values = penalised(context, &totals, batch, metrics)?;
        RewardValues::per_token(&values)
    } else if grpo.advantages.estimator == AdvantageEstimator::Gdpo {
        values = per_function(samples, &context.parts.rewards, &mut config);
        RewardValues::per_sequence(&values)
    } else {
        RewardValues::per_sequence(&totals)
    };
    let inputs = AdvantageInputs {
        batch: Some(batch),
        greedy_rewards: greedy.map(Into::into),
        values: values_of_tokens,
        ..AdvantageInputs::new(rewards, grpo.num_generations)
    };
    let scaled = |values: Vec<f32>| values.into_iter().map(|a| a * grpo.advantage_scale).collect();
    let advantages = match config.compute(&inputs)? {
        Advantages::PerSequence(values) => Advantages::PerSequence(scaled(values)),
        Advantages::PerToken(values) => Advantages::PerToken(scaled(values)),
    };
    let returns = values_of_tokens.map(|_| config.value_targets(&inputs)).transpose()?.map(|mut returns| {
        for (b, _) in samples.iter().enumerate().filter(|(_, sample)| sample.reward.total.is_none()) {
            returns[batch.range(b)].fill(f32::NAN);
        }
        returns
    });
    Ok((advantages, returns))
}

/// Returns the rewards per token `[N]`: the rewards of completions minus the KL to the reference. Updates the KL coefficient (verl's
/// `apply_kl_penalty`, with its metrics).
fn penalised(
    context: &mut StepContext<'_>,
    totals: &[Option<f32>],
    batch: &TokenBatch,
    metrics: &mut Metrics,
) -> Result<Vec<Option<f32>>> {
    let controller = &mut context.coefficients.kl;
    let coef = controller.coef();
    let rewards = kl_in_reward(totals, batch, context.config.grpo.kl_penalty, coef)?;
    metrics.mean("actor/reward_kl_penalty", rewards.kl, 1.0);
    metrics.mean("actor/reward_kl_penalty_coeff", coef, 1.0);
    controller.update(rewards.kl, totals.len())?;
    Ok(rewards.token_rewards)
}

/// Returns the rewards `[B, K]` of all functions, and stores their weights in `config`. A row that any function failed to score has no
/// rewards.
fn per_function(samples: &[Sample], rewards: &Rewards, config: &mut AdvantageConfig) -> Vec<Option<f32>> {
    config.reward_weights = rewards.weights().map(f64::from).collect();
    let of_sample = |reward: &Reward| {
        let known = reward.failures.is_empty();
        reward.terms.iter().map(|term| term.filter(|_| known)).collect::<Vec<_>>()
    };
    samples.iter().flat_map(|sample| of_sample(&sample.reward)).collect()
}

fn mean(values: impl Iterator<Item = f32>) -> f32 {
    let (sum, count) = values.fold((0.0, 0.0_f64), |(sum, count), value| (sum + f64::from(value), count + 1.0));
    (sum / count.max(1.0)) as f32
}
