//! Samples and scores groups of completions; with dynamic sampling, until enough groups pass the filter.

use super::{PhaseTimes, Sample, StepContext};
use crate::error::{Error, Result};
use crate::prompts::{encode_prompts, opens_think};
use crate::stops::Stops;
use data::Item;
use grpo_core::Metrics;
use policy::{Completion, Policy, RolloutRequest, Sampling};
use rewards::{RewardInput, Rewards};
use rng::Purpose;
use run_config::{FilterGroupsConfig, REWARD};

/// A prompt and its completions.
pub(super) struct Group {
    pub(super) item: Item,
    /// The token ids of the prompt.
    pub(super) prompt: Vec<u32>,
    pub(super) completions: Vec<Completion>,
    pub(super) samples: Vec<Sample>,
}

/// The groups that a step has sampled.
pub(super) struct Sampled {
    /// All groups, in sampling order.
    pub(super) all: Vec<Group>,
    /// The indices of the groups to train on, ascending.
    kept: Vec<usize>,
}

impl Sampled {
    /// Returns the number of prompt and completion tokens of all groups.
    pub(super) fn tokens(&self) -> usize {
        let of_group =
            |group: &Group| group.completions.iter().map(|c| group.prompt.len() + c.ids.len()).sum::<usize>();
        self.all.iter().map(of_group).sum()
    }

    /// Returns the groups to train on.
    pub(super) fn into_kept(self) -> Vec<Group> {
        let mut kept = self.kept.into_iter().peekable();
        let is_kept = |(index, _): &(usize, Group)| kept.next_if_eq(index).is_some();
        self.all.into_iter().enumerate().filter(is_kept).map(|(_, group)| group).collect()
    }
}

/// Samples generation batches until enough groups are kept (DAPO, arXiv 2503.14476); a single batch without a filter.
pub(super) fn sample(
    policy: &mut dyn Policy,
    context: &mut StepContext<'_>,
    step: u64,
    metrics: &mut Metrics,
    times: &mut PhaseTimes,
) -> Result<Sampled> {
    let grpo = &context.config.grpo;
    let (filter, wanted) = (&grpo.filter_groups, grpo.prompts_per_step);
    let mut sampled = Sampled { all: Vec::new(), kept: Vec::new() };
    for batch in 0.. {
        if filter.enable && batch == filter.max_num_gen_batches {
            return Err(Error::TooFewGroups {
                found: sampled.kept.len(),
                wanted,
                batches: batch,
                metric: filter.metric.clone(),
            });
        }
        let items = context.dataset.next_batch(wanted)?;
        let groups = sample_batch(policy, context, items, step, (batch * grpo.sequences()) as u64, times)?;
        let kept = match filter.enable {
            true => keep(filter, context.rewards, &groups)?,
            false => (0..groups.len()).collect(),
        };
        let first = sampled.all.len();
        sampled.kept.extend(kept.into_iter().map(|index| first + index));
        sampled.all.extend(groups);
        if sampled.kept.len() < wanted {
            continue;
        }
        if filter.enable {
            for (name, count) in [
                ("num_gen_batches", batch + 1),
                ("evicted_groups", sampled.all.len() - sampled.kept.len()),
                ("discarded_surplus_groups", sampled.kept.len() - wanted),
            ] {
                metrics.mean(&format!("filter_groups/{name}"), count as f64, 1.0);
            }
        }
        sampled.kept.truncate(wanted);
        break;
    }
    Ok(sampled)
}

/// Returns the indices of the groups that pass the filter.
fn keep(filter: &FilterGroupsConfig, rewards: &Rewards, groups: &[Group]) -> Result<Vec<usize>> {
    // A filter with an unknown name was rejected before the run.
    let term = rewards.names().position(|name| name == filter.metric).filter(|_| filter.metric != REWARD);
    let value = |sample: &Sample| term.map_or(sample.reward.total, |k| sample.reward.terms[k]).unwrap_or(f32::NAN);
    let values: Vec<f32> = groups.iter().flat_map(|group| group.samples.iter().map(value)).collect();
    let per_group = groups.first().map_or(1, |group| group.samples.len());
    Ok(filter.keep.filter(&values, per_group)?.kept)
}

/// Samples one generation batch. `first` is the number of samples that the step has already drawn.
fn sample_batch(
    policy: &mut dyn Policy,
    context: &mut StepContext<'_>,
    items: Vec<Item>,
    step: u64,
    first: u64,
    times: &mut PhaseTimes,
) -> Result<Vec<Group>> {
    let config = context.config;
    let num_generations = config.grpo.num_generations;
    let sampling = Sampling::Random {
        temperature: config.rollout.temperature(),
        processors: config.rollout.processors(),
        seed: config.seed,
        purpose: Purpose::Rollout,
        step,
        first,
    };
    let prompts = encode_prompts(context.tokenizer, &items)?;
    let completions = times.time("gen", || complete(policy, context, &prompts, num_generations, sampling))?;
    let judged = completions.iter().enumerate().map(|(i, completion)| {
        let group = i / num_generations;
        (&items[group], &prompts[group][..], completion)
    });
    let mut samples = times.time("reward", || judge(judged, context))?.into_iter();
    let mut completions = completions.into_iter();
    let groups = items.into_iter().zip(prompts).map(|(item, prompt)| {
        let completions = completions.by_ref().take(num_generations).collect();
        let samples = samples.by_ref().take(num_generations).collect();
        Group { item, prompt, completions, samples }
    });
    Ok(groups.collect())
}

/// Returns the reward of the greedy completion of each group's prompt; NaN if it is missing.
pub(super) fn greedy_rewards(
    policy: &mut dyn Policy,
    context: &mut StepContext<'_>,
    groups: &[Group],
) -> Result<Vec<f32>> {
    let prompts: Vec<Vec<u32>> = groups.iter().map(|group| group.prompt.clone()).collect();
    let completions = complete(policy, context, &prompts, 1, Sampling::Greedy)?;
    let judged = groups.iter().zip(&completions);
    let judged = judged.map(|(group, completion)| (&group.item, &group.prompt[..], completion));
    let samples = judge(judged, context)?;
    Ok(samples.iter().map(|sample| sample.reward.total.unwrap_or(f32::NAN)).collect())
}

fn complete(
    policy: &mut dyn Policy,
    context: &mut StepContext<'_>,
    prompts: &[Vec<u32>],
    num_generations: usize,
    sampling: Sampling,
) -> Result<Vec<Completion>> {
    let max_completion_length = context.config.rollout.max_completion_length();
    let stops = Stops::new(&context.config.rollout, context.tokenizer);
    let request = RolloutRequest {
        prompts,
        num_generations,
        max_completion_length,
        stop_ids: &stops.ids,
        stop: stops.condition(),
        sampling,
    };
    let completions = context.engine.generate(policy, &request)?;
    let count = prompts.len() * num_generations;
    if completions.len() != count || completions.iter().any(|c| c.ids.is_empty()) {
        let expected = format!("{count} completions of at least one token");
        return Err(Error::argument("rollout", expected, format!("{} completions", completions.len())));
    }
    Ok(completions)
}

/// Scores completions and returns them as samples. Each reward function gets all completions at once. A completion that a function failed
/// to score has no reward; too many failures in a row are an error.
fn judge<'a>(
    completions: impl Iterator<Item = (&'a Item, &'a [u32], &'a Completion)>,
    context: &mut StepContext<'_>,
) -> Result<Vec<Sample>> {
    let tokenizer = context.tokenizer;
    let decode = |(item, prompt, completion): (&'a Item, &'a [u32], &'a Completion)| {
        Ok((item, completion, opens_think(tokenizer, prompt), tokenizer.decode(&completion.ids)?))
    };
    let texts = completions.map(decode).collect::<models::Result<Vec<_>>>()?;
    let inputs: Vec<RewardInput<'_>> = texts
        .iter()
        .map(|(item, completion, opens_think, text)| RewardInput {
            item,
            completion: text,
            truncated: completion.truncated,
            completion_ids: &completion.ids,
            opens_think: *opens_think,
        })
        .collect();
    let rewards = context.rewards.score(&inputs);
    context.failures.count(context.rewards, &inputs, &rewards)?;
    let sample = |((item, completion, _, text), reward): ((&Item, &Completion, bool, String), _)| Sample {
        task: item.source.to_string(),
        prompt: item.prompt.to_string(),
        answer: item.answer.clone().unwrap_or_default(),
        completion: text,
        truncated: completion.truncated,
        reward,
        advantage: 0.0,
    };
    Ok(texts.into_iter().zip(rewards).map(sample).collect())
}
