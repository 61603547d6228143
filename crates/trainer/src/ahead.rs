//! Batches that an engine samples in the background, while the policy trains on earlier ones (`rollout.max_staleness`).
//!
//! With `max_staleness` k, each step waits for the oldest batch of a queue, after it has started new ones, so that k batches are being
//! sampled while the step trains. A batch is trained on at most k steps after its start. Its tokens have the weights of its start or later
//! ones, so none is older, unless a server reports other weights: such completions are dropped, counted, and sampled again.

use crate::error::Result;
use crate::parts::Parts;
use grpo_conversations::{Completed, encode_prompts};
use grpo_data::Item;
use grpo_policy::{Completion, Pending, Sampling};
use grpo_rng::Purpose;
use grpo_run_config::TrainConfig;
use std::collections::VecDeque;

/// The batches that are being sampled, oldest first.
#[derive(Default)]
pub(crate) struct Ahead(VecDeque<Batch>);

struct Batch {
    items: Vec<Item>,
    prompts: Vec<Vec<u32>>,
    /// The cursor of the data set before the batch.
    cursor: u64,
    /// The number of GRPO steps done when the batch was started.
    version: u64,
    sampling: Sampling,
    pending: Pending,
}

/// A batch whose completions are sampled.
pub(crate) struct Drawn {
    pub(crate) items: Vec<Item>,
    pub(crate) completed: Completed,
    /// The number of GRPO steps since the oldest weights of each completion.
    pub(crate) staleness: Vec<u64>,
    /// The number of completions that were dropped because their weights were too old.
    pub(crate) dropped: usize,
}

impl Ahead {
    /// Returns the cursor of the data set before the first batch of the queue.
    pub(crate) fn cursor(&self) -> Option<u64> {
        self.0.front().map(|batch| batch.cursor)
    }

    /// Drops all batches.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns the next batch for step number `step` (from 0), and starts the batches of later steps.
    ///
    /// # Errors
    /// The errors of the data set, the tokenizer and the engine.
    pub(crate) fn next(&mut self, config: &TrainConfig, parts: &mut Parts, step: u64) -> Result<Drawn> {
        let first = match self.0.pop_front() {
            Some(batch) => batch,
            None => Batch::start(config, parts, step)?,
        };
        let later = config.grpo.max_steps.saturating_sub(step + 1).min(config.rollout.max_staleness);
        while (self.0.len() as u64) < later {
            self.0.push_back(Batch::start(config, parts, step)?);
        }
        first.finish(config, parts, step)
    }
}

impl Batch {
    fn start(config: &TrainConfig, parts: &mut Parts, step: u64) -> Result<Self> {
        let cursor = parts.dataset.cursor();
        let items = parts.dataset.next_batch(config.grpo.prompts_per_step)?;
        let prompts = encode_prompts(&*parts.tokenizer, &items)?;
        // The cursor identifies the batch: its step is not known yet with dynamic sampling.
        let sampling = Sampling::Random {
            temperature: config.rollout.temperature(),
            processors: config.rollout.processors(),
            seed: config.seed,
            purpose: Purpose::Rollout,
            step: cursor,
            first: 0,
        };
        let pending = parts.rollout(config).start(&prompts, config.grpo.num_generations, sampling)?;
        Ok(Self { items, prompts, cursor, version: step, sampling, pending })
    }

    /// Waits for the completions, and samples those anew whose weights are too old.
    fn finish(self, config: &TrainConfig, parts: &mut Parts, step: u64) -> Result<Drawn> {
        let Self { items, prompts, cursor: _, version, sampling, pending } = self;
        let per_prompt = config.grpo.num_generations;
        let mut completed = parts.rollout(config).wait(pending, prompts, per_prompt, sampling)?;
        let oldest = |completion: &Completion| {
            completion.weight_versions.iter().map(|span| span.version).min().unwrap_or(version)
        };
        let staleness = |completion: &Completion| step.saturating_sub(oldest(completion));
        let is_stale = |completion: &Completion| staleness(completion) > config.rollout.max_staleness;
        let dropped = completed.completions.iter().filter(|completion| is_stale(completion)).count();
        if dropped > 0 {
            let groups = completed.completions.chunks(per_prompt).enumerate();
            let stale: Vec<usize> =
                groups.filter(|(_, group)| group.iter().any(is_stale)).map(|(index, _)| index).collect();
            tracing::warn!(
                "{dropped} completions of step {} have weights of more than rollout.max_staleness, {}, steps ago: their {} prompts are \
                 completed again",
                step + 1,
                config.rollout.max_staleness,
                stale.len()
            );
            let again: Vec<&Item> = stale.iter().map(|index| &items[*index]).collect();
            // The batch has used the random numbers before these.
            let sampling = match sampling {
                Sampling::Random { temperature, processors, seed, purpose, step, first } => {
                    let first = first + (items.len() * per_prompt) as u64;
                    Sampling::Random { temperature, processors, seed, purpose, step, first }
                }
                Sampling::Greedy => Sampling::Greedy,
            };
            let longest = config.rollout.max_completion_length();
            let fresh = parts.rollout(config).complete(&again, per_prompt, longest, sampling)?;
            completed.replace(&stale, fresh, per_prompt);
        }
        let staleness = completed.completions.iter().map(staleness).collect();
        Ok(Drawn { items, completed, staleness, dropped })
    }
}
