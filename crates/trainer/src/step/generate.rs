//! Samples and scores groups of completions; with dynamic sampling, until enough groups pass the filter.

use super::context::StepContext;
use super::sample::Sample;
use super::times::PhaseTimes;
use crate::ahead::Drawn;
use crate::error::{Error, Result};
use grpo_conversations::{Completed, Conversed};
use grpo_core::Metrics;
use grpo_data::Item;
use grpo_policy::{Completion, Sampling};
use grpo_rewards::{Failures, Reward, RewardInput, Rewards};
use grpo_rng::Purpose;
use grpo_run_config::{FilterGroupsConfig, REWARD};

/// A prompt and its completions.
pub(super) struct Group {
    pub(super) item: Item,
    /// The token ids of the prompt of each completion.
    pub(super) prompts: Vec<Vec<u32>>,
    pub(super) completions: Vec<Completion>,
    pub(super) samples: Vec<Sample>,
    /// The conversation of each completion; none if completions have one turn.
    pub(super) conversations: Vec<Conversed>,
}

impl Group {
    /// Returns the rows to train on, each with the index of its sample, its prompt and its completion: one of each sample, behind the other rows
    /// of the conversation of an agent.
    pub(super) fn rows(&self) -> impl Iterator<Item = (usize, &Vec<u32>, &Completion)> {
        let of_sample = |(i, (prompt, completion))| {
            let others = self.conversations.get(i).map_or(&[][..], |conversed: &Conversed| &conversed.other_rows);
            others
                .iter()
                .map(|(prompt, completion)| (prompt, completion))
                .chain([(prompt, completion)])
                .map(move |(p, c)| (i, p, c))
        };
        self.prompts.iter().zip(&self.completions).enumerate().flat_map(of_sample)
    }
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
        let of_group = |group: &Group| {
            group.rows().map(|(_, prompt, completion)| prompt.len() + completion.ids.len()).sum::<usize>()
        };
        self.all.iter().map(of_group).sum()
    }

    /// Returns the number of sampled tokens of all groups.
    pub(super) fn sampled_tokens(&self) -> usize {
        self.all.iter().flat_map(Group::rows).map(|(_, _, completion)| completion.sampled_len()).sum()
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
        let groups = match context.config.rollout.max_staleness {
            0 => {
                let items = context.parts.dataset.next_batch(wanted)?;
                sample_batch(context, items, step, (batch * grpo.sequences()) as u64, times)?
            }
            _ => wait_for_batch(context, step, metrics, times)?,
        };
        if step == 0 && batch == 0 {
            check_rewards(&context.parts.rewards, &groups)?;
        }
        let kept = match filter.enable {
            true => keep(filter, &context.parts.rewards, &groups)?,
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

/// Checks that every reward function has scored a completion of the first generation batch.
fn check_rewards(rewards: &Rewards, groups: &[Group]) -> Result<()> {
    let mut scored: Vec<&Reward> = Vec::new();
    for group in groups {
        let has_failed = |i: usize| group.conversations.get(i).is_some_and(|each| each.conversation.failure.is_some());
        let samples = group.samples.iter().enumerate().filter(|(i, _)| !has_failed(*i));
        scored.extend(samples.map(|(_, sample)| &sample.reward));
    }
    Ok(Failures::check_first_step(rewards, &scored)?)
}

/// Returns the indices of the groups that pass the filter.
fn keep(filter: &FilterGroupsConfig, rewards: &Rewards, groups: &[Group]) -> Result<Vec<usize>> {
    // A filter with an unknown name was rejected before the run.
    let term = rewards.names().position(|name| name == filter.metric).filter(|_| filter.metric != REWARD);
    let value = |sample: &Sample| term.map_or(sample.reward.total, |k| sample.reward.terms[k]);
    let values: Vec<Option<f32>> = groups.iter().flat_map(|group| group.samples.iter().map(value)).collect();
    let per_group = groups.first().map_or(1, |group| group.samples.len());
    Ok(filter.keep.filter(&values, per_group)?.kept)
}

/// Samples one generation batch. `first` is the number of samples that the step has already drawn.
fn sample_batch(
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
    let rows: Vec<&Item> = items.iter().collect();
    let completed = times.time("gen", || complete(context, &rows, num_generations, sampling))?;
    if !completed.conversations.is_empty() {
        times.part("environments", "gen", completed.environment_time);
        count_environments(context, &completed)?;
    }
    groups(context, items, completed, times)
}

/// Returns a generation batch that was sampled in the background, and starts later ones.
fn wait_for_batch(
    context: &mut StepContext<'_>,
    step: u64,
    metrics: &mut Metrics,
    times: &mut PhaseTimes,
) -> Result<Vec<Group>> {
    let StepContext { config, parts, ahead, .. } = context;
    let drawn = times.time("gen", || ahead.next(config, parts, step))?;
    let Drawn { items, completed, staleness, dropped } = drawn;
    let total: u64 = staleness.iter().sum();
    metrics.mean("sampling/staleness", total as f64, staleness.len() as f64);
    metrics.mean("sampling/stale_completions", dropped as f64, 1.0);
    groups(context, items, completed, times)
}

/// Scores the completions of some rows and returns them as groups.
fn groups(
    context: &mut StepContext<'_>,
    items: Vec<Item>,
    completed: Completed,
    times: &mut PhaseTimes,
) -> Result<Vec<Group>> {
    let num_generations = context.config.grpo.num_generations;
    let rows: Vec<&Item> = items.iter().collect();
    let mut samples = times.time("reward", || judge(context, &rows, &completed))?.into_iter();
    let mut completions = completed.completions.into_iter();
    let (mut prompts, mut conversations) = (completed.prompts.into_iter(), completed.conversations.into_iter());
    let groups = items.into_iter().map(|item| Group {
        item,
        prompts: prompts.by_ref().take(num_generations).collect(),
        completions: completions.by_ref().take(num_generations).collect(),
        samples: samples.by_ref().take(num_generations).collect(),
        conversations: conversations.by_ref().take(num_generations).collect(),
    });
    Ok(groups.collect())
}

/// Returns the reward of the greedy completion of each group's prompt.
pub(super) fn greedy_rewards(context: &mut StepContext<'_>, groups: &[Group]) -> Result<Vec<Option<f32>>> {
    let rows: Vec<&Item> = groups.iter().map(|group| &group.item).collect();
    let completed = complete(context, &rows, 1, Sampling::Greedy)?;
    count_environments(context, &completed)?;
    let samples = judge(context, &rows, &completed)?;
    Ok(samples.iter().map(|sample| sample.reward.total).collect())
}

fn complete(
    context: &mut StepContext<'_>,
    items: &[&Item],
    num_generations: usize,
    sampling: Sampling,
) -> Result<Completed> {
    let config = context.config;
    let longest = config.rollout.max_completion_length();
    Ok(context.parts.rollout(config).complete(items, num_generations, longest, sampling)?)
}

/// Counts the failures of environments; too many in a row, or nothing but failures, are an error.
fn count_environments(context: &mut StepContext<'_>, completed: &Completed) -> Result<()> {
    let most = context.config.rollout.multi_turn.max_consecutive_failures;
    let conversations = completed.conversations.iter().map(|conversed| (conversed.environment, &conversed.outcome));
    Ok(context.parts.environments.count(conversations, most)?)
}

/// Scores completions and returns them as samples. Each reward function gets all completions at once. A completion that a function failed
/// to score has no reward; too many failures in a row are an error.
fn judge(context: &mut StepContext<'_>, items: &[&Item], completed: &Completed) -> Result<Vec<Sample>> {
    let inputs = completed.inputs(items);
    let rewards = context.parts.score(None, &inputs)?;
    context.failures.count(&context.parts.rewards, &inputs, &rewards)?;
    let sample = |(i, (completion, (input, reward))): (usize, (&Completion, (&RewardInput<'_>, _)))| Sample {
        task: input.item.source.to_string(),
        prompt: input.item.prompt.to_string(),
        answer: input.item.answer.clone().unwrap_or_default(),
        completion: completed.transcript(i).to_owned(),
        truncated: input.truncated,
        reward,
        advantage: 0.0,
        weight_versions: completion.weight_versions.clone(),
    };
    Ok(completed.completions.iter().zip(inputs.iter().zip(rewards)).enumerate().map(sample).collect())
}
