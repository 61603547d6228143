//! Completions of prompts, as reward functions read them.

use crate::conversation::Conversed;
use crate::error::{Error, Result};
use crate::factory::Parts;
use crate::prompts::{encode_prompts, opens_think};
use crate::stops::Stops;
use data::Item;
use models::Tokenizer;
use policy::{Completion, Pending, Policy, RolloutEngine, RolloutRequest, Sampling, Turn};
use rewards::RewardInput;
use run_config::RolloutConfig;
use std::time::Duration;

/// Completions of prompts, the same number of each.
pub(crate) struct Completed {
    /// The token ids of the prompt of each completion.
    pub(crate) prompts: Vec<Vec<u32>>,
    pub(crate) completions: Vec<Completion>,
    /// The text of each completion; of a conversation, the last message of the assistant.
    pub(crate) texts: Vec<String>,
    /// Whether each prompt ends with `<think>`.
    pub(crate) opens_think: Vec<bool>,
    /// The conversation of each completion; none if completions have one turn.
    pub(crate) conversations: Vec<Conversed>,
    /// The time in which environments answered.
    pub(crate) environment_time: Duration,
}

impl Completed {
    /// Decodes the completions of prompts, `num_generations` of each.
    fn of_prompts(
        tokenizer: &dyn Tokenizer,
        prompts: Vec<Vec<u32>>,
        num_generations: usize,
        completions: Vec<Completion>,
    ) -> Result<Self> {
        let texts = completions.iter().map(|c| tokenizer.decode(&c.ids)).collect::<models::Result<_>>()?;
        let of_prompts = prompts.into_iter().map(|prompt| (opens_think(tokenizer, &prompt), prompt));
        let (opens_think, prompts) = of_prompts.flat_map(|each| std::iter::repeat_n(each, num_generations)).unzip();
        let (conversations, environment_time) = (Vec::new(), Duration::ZERO);
        Ok(Self { prompts, completions, texts, opens_think, conversations, environment_time })
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

    /// Returns the inputs of reward functions. `items` has the row of each group of completions.
    pub(crate) fn inputs<'a>(&'a self, items: &[&'a Item]) -> Vec<RewardInput<'a>> {
        let per_item = self.completions.len() / items.len().max(1);
        (self.completions.iter().zip(&self.texts).enumerate())
            .map(|(i, (completion, text))| RewardInput {
                item: items[i / per_item],
                completion: text,
                truncated: completion.truncated,
                completion_ids: &completion.ids,
                opens_think: self.opens_think[i],
                conversation: self.conversations.get(i).map(|conversed| &conversed.conversation),
            })
            .collect()
    }

    /// Returns the text of completion `i` for logs: of a conversation, all turns.
    pub(crate) fn transcript(&self, i: usize) -> &str {
        self.conversations.get(i).map_or(&self.texts[i], |conversed| &conversed.transcript)
    }
}

impl Parts {
    /// Samples `num_generations` completions of each row: conversations with its environment, if the run has environments.
    ///
    /// # Errors
    /// The errors of the engine and the tokenizer; [`Error::Argument`] if the engine returns too few completions or an empty one.
    pub(crate) fn complete(
        &mut self,
        rollout: &RolloutConfig,
        items: &[&Item],
        num_generations: usize,
        max_completion_length: usize,
        sampling: Sampling,
    ) -> Result<Completed> {
        if !self.environments.is_empty() {
            return self.converse(rollout, items, num_generations, max_completion_length, sampling);
        }
        let Self { policy, tokenizer, engine, .. } = self;
        let prompts = encode_prompts(&**tokenizer, items.iter().copied())?;
        let stops = Stops::new(rollout, &**tokenizer);
        let sampler = Sampler { policy: &mut **policy, engine: &mut **engine, stops: &stops };
        let completions = sampler.generate(&prompts, num_generations, max_completion_length, sampling, None)?;
        Completed::of_prompts(&**tokenizer, prompts, num_generations, completions)
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
        prompts: Vec<Vec<u32>>,
        num_generations: usize,
        sampling: Sampling,
    ) -> Result<Completed> {
        let stops = Stops::new(rollout, &*self.tokenizer);
        let longest = rollout.max_completion_length();
        let request = request(&stops, &prompts, num_generations, longest, sampling);
        let completions = checked(&request, pending.wait(&request)?)?;
        Completed::of_prompts(&*self.tokenizer, prompts, num_generations, completions)
    }
}

/// The engine of a rollout.
pub(crate) struct Sampler<'a> {
    pub(crate) policy: &'a mut dyn Policy,
    pub(crate) engine: &'a mut dyn RolloutEngine,
    pub(crate) stops: &'a Stops<'a>,
}

impl Sampler<'_> {
    /// Samples completions, and checks their number.
    ///
    /// # Errors
    /// The errors of the engine; [`Error::Argument`] if it returns too few completions or an empty one.
    pub(crate) fn generate(
        self,
        prompts: &[Vec<u32>],
        num_generations: usize,
        max_completion_length: usize,
        sampling: Sampling,
        turn: Option<Turn<'_>>,
    ) -> Result<Vec<Completion>> {
        let request = request(self.stops, prompts, num_generations, max_completion_length, sampling);
        let request = RolloutRequest { turn, ..request };
        checked(&request, self.engine.generate(self.policy, &request)?)
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
    RolloutRequest { prompts, num_generations, max_completion_length, stop_ids, stop, sampling, turn: None }
}

/// Checks the number of completions, and the lengths of their lists.
fn checked(request: &RolloutRequest<'_>, completions: Vec<Completion>) -> Result<Vec<Completion>> {
    let count = request.prompts.len() * request.num_generations;
    let is_valid = |c: &Completion| !c.ids.is_empty() && [c.logps.len(), c.mask.len()] == [c.ids.len(); 2];
    if completions.len() != count || !completions.iter().all(is_valid) {
        let expected =
            format!("{count} completions of at least one token, each token with a log-probability and a mask");
        return Err(Error::argument("rollout", expected, format!("{} completions", completions.len())));
    }
    Ok(completions)
}
