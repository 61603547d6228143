//! Completions of prompts, as reward functions read them.

use crate::error::{Error, Result};
use crate::factory::Parts;
use crate::prompts::opens_think;
use crate::stops::Stops;
use data::Item;
use models::Tokenizer;
use policy::{Completion, Pending, RolloutRequest, Sampling};
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
    /// Checks the completions of a request and decodes them.
    fn new(tokenizer: &dyn Tokenizer, request: &RolloutRequest<'_>, completions: Vec<Completion>) -> Result<Self> {
        let count = request.prompts.len() * request.num_generations;
        if completions.len() != count || completions.iter().any(|c| c.ids.is_empty()) {
            let expected = format!("{count} completions of at least one token");
            return Err(Error::argument("rollout", expected, format!("{} completions", completions.len())));
        }
        let texts = completions.iter().map(|c| tokenizer.decode(&c.ids)).collect::<models::Result<_>>()?;
        let opens_think = request.prompts.iter().map(|prompt| opens_think(tokenizer, prompt)).collect();
        Ok(Self { completions, texts, opens_think })
    }

    /// Replaces the completions of some prompts, by index. `fresh` has `per_prompt` completions of each of them.
    pub(crate) fn replace(&mut self, prompts: &[usize], fresh: Self, per_prompt: usize) {
        let mut fresh = fresh.completions.into_iter().zip(fresh.texts);
        for index in prompts.iter().flat_map(|prompt| prompt * per_prompt..(prompt + 1) * per_prompt) {
            if let Some((completion, text)) = fresh.next() {
                (self.completions[index], self.texts[index]) = (completion, text);
            }
        }
    }

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
        let request = request(&stops, prompts, num_generations, max_completion_length, sampling);
        let completions = engine.generate(&mut **policy, &request)?;
        Completed::new(&**tokenizer, &request, completions)
    }

    /// Starts to sample completions of up to `rollout.max_completion_length` in the background.
    ///
    /// # Errors
    /// The errors of the engine.
    pub(crate) fn start(
        &mut self,
        rollout: &RolloutConfig,
        prompts: &[Vec<u32>],
        num_generations: usize,
        sampling: Sampling,
    ) -> Result<Pending> {
        let stops = Stops::new(rollout, &*self.tokenizer);
        let longest = rollout.max_completion_length();
        Ok(self.engine.start(&request(&stops, prompts, num_generations, longest, sampling))?)
    }

    /// Waits for the completions of [`Parts::start`], which had the same arguments.
    ///
    /// # Errors
    /// The errors of [`Parts::complete`].
    pub(crate) fn wait(
        &self,
        pending: Pending,
        rollout: &RolloutConfig,
        prompts: &[Vec<u32>],
        num_generations: usize,
        sampling: Sampling,
    ) -> Result<Completed> {
        let stops = Stops::new(rollout, &*self.tokenizer);
        let longest = rollout.max_completion_length();
        let request = request(&stops, prompts, num_generations, longest, sampling);
        let completions = pending.wait(&request)?;
        Completed::new(&*self.tokenizer, &request, completions)
    }
}

fn request<'a>(
    stops: &'a Stops<'_>,
    prompts: &'a [Vec<u32>],
    num_generations: usize,
    max_completion_length: usize,
    sampling: Sampling,
) -> RolloutRequest<'a> {
    let (stop_ids, stop) = (&stops.ids, stops.condition());
    RolloutRequest { prompts, num_generations, max_completion_length, stop_ids, stop, sampling }
}
