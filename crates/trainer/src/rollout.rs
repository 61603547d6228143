//! Completions of prompts, as reward functions read them.

use crate::error::{Error, Result};
use crate::factory::Parts;
use crate::prompts::opens_think;
use crate::stops::Stops;
use data::Item;
use policy::{Completion, RolloutRequest, Sampling};
use rewards::RewardInput;
use run_config::RolloutConfig;

/// Completions of prompts, the same number of each.
pub(crate) struct Completed {
    pub(crate) completions: Vec<Completion>,
    /// The text of each completion.
    texts: Vec<String>,
    /// Whether each prompt ends with `<think>`.
    opens_think: Vec<bool>,
}

impl Completed {
    /// Returns the inputs of reward functions. `items` has the row of each prompt.
    pub(crate) fn inputs<'a>(&'a self, items: &[&'a Item]) -> Vec<RewardInput<'a>> {
        let per_item = self.completions.len() / items.len().max(1);
        (self.completions.iter().zip(&self.texts).enumerate())
            .map(|(i, (completion, text))| RewardInput {
                item: items[i / per_item],
                completion: text,
                truncated: completion.truncated,
                completion_ids: &completion.ids,
                opens_think: self.opens_think[i / per_item],
            })
            .collect()
    }
}

impl Parts {
    /// Samples `num_generations` completions of each prompt.
    ///
    /// # Errors
    /// The errors of the engine and the tokenizer; [`Error::Argument`] if the engine returns too few completions or an empty one.
    pub(crate) fn complete(
        &mut self,
        rollout: &RolloutConfig,
        prompts: &[Vec<u32>],
        num_generations: usize,
        max_completion_length: usize,
        sampling: Sampling,
    ) -> Result<Completed> {
        let Self { policy, tokenizer, engine, .. } = self;
        let stops = Stops::new(rollout, &**tokenizer);
        let completions = engine.generate(
            &mut **policy,
            &RolloutRequest {
                prompts,
                num_generations,
                max_completion_length,
                stop_ids: &stops.ids,
                stop: stops.condition(),
                sampling,
            },
        )?;
        let count = prompts.len() * num_generations;
        if completions.len() != count || completions.iter().any(|c| c.ids.is_empty()) {
            let expected = format!("{count} completions of at least one token");
            return Err(Error::argument("rollout", expected, format!("{} completions", completions.len())));
        }
        let texts = completions.iter().map(|c| tokenizer.decode(&c.ids)).collect::<models::Result<_>>()?;
        let opens_think = prompts.iter().map(|prompt| opens_think(&**tokenizer, prompt)).collect();
        Ok(Completed { completions, texts, opens_think })
    }
}
