#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod agent;
mod conversation;
mod error;
pub mod lockstep;
mod prompts;
mod stops;

pub use conversation::{CheckedEnvironments, Conversed, check_environments, with_tools};
pub use error::{Error, Result};
use prompts::exceeds;
pub use prompts::{encode_prompt, encode_prompts, opens_think};

use conversation::{Conversations, Ended};
use grpo_agents::endpoint::Rules;
use grpo_agents::{Endpoint, Environments};
use grpo_data::{History, Item};
use grpo_distributed::Store;
use grpo_models::Tokenizer;
use grpo_policy::{Completion, Pending, Policy, RolloutEngine, RolloutRequest, Sampling};
use grpo_rewards::RewardInput;
use grpo_rng::Purpose;
use grpo_run_config::RolloutConfig;
use std::time::Duration;
use stops::Stops;

/// Completions of prompts, the same number of each.
#[derive(Default)]
pub struct Completed {
    /// The token ids of the prompt of each completion.
    pub prompts: Vec<Vec<u32>>,
    /// The completions, in the order of their prompts.
    pub completions: Vec<Completion>,
    /// The text of each completion; of a conversation, the last message of the assistant.
    pub texts: Vec<String>,
    /// Whether each prompt ends with `<think>`.
    pub opens_think: Vec<bool>,
    /// The conversation of each completion; none if completions have one turn.
    pub conversations: Vec<Conversed>,
    /// The time in which environments answered.
    pub environment_time: Duration,
}

impl Completed {
    /// Decodes the completions of prompts, `num_generations` of each.
    fn of_prompts(
        tokenizer: &dyn Tokenizer,
        prompts: Vec<Vec<u32>>,
        num_generations: usize,
        completions: Vec<Completion>,
    ) -> Result<Self> {
        let texts = completions.iter().map(|c| tokenizer.decode(&c.ids)).collect::<grpo_models::Result<_>>()?;
        let pairs = prompts.into_iter().map(|prompt| (opens_think(tokenizer, &prompt), prompt));
        let (opens_think, prompts) = pairs.flat_map(|each| std::iter::repeat_n(each, num_generations)).unzip();
        let (conversations, environment_time) = (Vec::new(), Duration::ZERO);
        Ok(Self { prompts, completions, texts, opens_think, conversations, environment_time })
    }

    /// Returns conversations as completions.
    fn of_conversations(
        tokenizer: &dyn Tokenizer,
        conversations: impl Iterator<Item = Ended>,
        environment_time: Duration,
    ) -> Self {
        let mut completed = Self { environment_time, ..Self::default() };
        for Ended { prompt, completion, text, conversed } in conversations {
            completed.opens_think.push(opens_think(tokenizer, &prompt));
            completed.prompts.push(prompt);
            completed.completions.push(completion);
            completed.texts.push(text);
            completed.conversations.push(conversed);
        }
        completed
    }

    /// Replaces the completions of some prompts, by index. `fresh` has `per_prompt` completions of each of them.
    pub fn replace(&mut self, prompts: &[usize], fresh: Self, per_prompt: usize) {
        let mut fresh = fresh.completions.into_iter().zip(fresh.texts);
        for index in prompts.iter().flat_map(|prompt| prompt * per_prompt..(prompt + 1) * per_prompt) {
            if let Some((completion, text)) = fresh.next() {
                (self.completions[index], self.texts[index]) = (completion, text);
            }
        }
    }

    /// Returns the inputs of reward functions. `items` has the row of each group of completions.
    pub fn inputs<'a>(&'a self, items: &[&'a Item]) -> Vec<RewardInput<'a>> {
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
    pub fn transcript(&self, i: usize) -> &str {
        self.conversations.get(i).map_or(&self.texts[i], |conversed| &conversed.transcript)
    }
}

/// Opens the endpoint of `rollout.endpoint`, for the agents of a run.
///
/// # Errors
/// [`grpo_agents::Error`] for an address that cannot be used.
pub fn open_endpoint(rollout: &RolloutConfig) -> Result<Endpoint> {
    let rules = Rules {
        temperature: rollout.temperature(),
        top_p: rollout.top_p.unwrap_or(1.0),
        stop: rollout.stop.clone().unwrap_or_default(),
        is_strict: rollout.endpoint_strict,
    };
    Ok(Endpoint::open(rollout.endpoint.as_deref(), rules)?)
}

/// Samples completions with a policy, an engine and environments.
pub struct Rollout<'a> {
    /// The policy.
    pub policy: &'a mut dyn Policy,
    /// The engine that samples for the policy.
    pub engine: &'a mut dyn RolloutEngine,
    /// The tokenizer of the policy.
    pub tokenizer: &'a dyn Tokenizer,
    /// The environments of conversations; without one, a completion is one message.
    pub environments: &'a Environments,
    /// The endpoint of agents; `None` if no environment is one, and in processes that follow process 0.
    pub endpoint: Option<&'a Endpoint>,
    /// The connection to the other processes of the run, if it has several. Process 0 alone runs environments and agents.
    pub store: Option<&'a Store>,
    /// The treatment of chat templates that rewrite earlier turns.
    pub history: History,
    /// The maximum number of tokens of a prompt that an agent writes, or that renders a conversation anew; `None` is what the completion leaves
    /// of the context.
    pub max_prompt_length: Option<usize>,
    /// `true` if completions that are trained on have the experts of their tokens.
    pub return_routed_experts: bool,
    /// The section `rollout`: stop tokens and texts, and the limits of conversations.
    pub config: &'a RolloutConfig,
}

impl Rollout<'_> {
    /// Samples `num_generations` completions of each row: conversations with its environment, if the run has environments.
    ///
    /// # Errors
    /// The errors of the engine and the tokenizer; [`Error::Completions`] if the engine returns too few completions or an empty one. An
    /// environment that fails is no error: its conversation has a failure.
    pub fn complete(
        &mut self,
        items: &[&Item],
        num_generations: usize,
        max_completion_length: usize,
        sampling: Sampling,
    ) -> Result<Completed> {
        if !self.environments.is_empty() {
            return self.complete_conversations(items, num_generations, max_completion_length, sampling);
        }
        let prompts = encode_prompts(self.tokenizer, items.iter().copied())?;
        let stops = Stops::new(self.config, self.tokenizer);
        let request = request(self.config, &stops, &prompts, num_generations, max_completion_length, sampling);
        let completions = self.generate(&request)?;
        Completed::of_prompts(self.tokenizer, prompts, num_generations, completions)
    }

    /// Returns the number of tokens of the longest sequence that the policy and the engine take.
    fn context_length(&self) -> usize {
        let policy_context = self.policy.context_length();
        self.engine.context_length().map_or(policy_context, |context| context.min(policy_context))
    }

    /// Holds conversations with the environments and the agents of rows.
    fn complete_conversations(
        &mut self,
        items: &[&Item],
        num_generations: usize,
        max_completion_length: usize,
        sampling: Sampling,
    ) -> Result<Completed> {
        let agent = |item: &Item| self.environments.agent(self.environments.of_row(item).ok()?);
        let (agent_rows, others): (Vec<usize>, Vec<usize>) = (0..items.len()).partition(|i| agent(items[*i]).is_some());
        let rows = |indices: &[usize]| indices.iter().map(|i| items[*i]).collect::<Vec<&Item>>();
        let (mut all, mut time) = (Vec::with_capacity(items.len() * num_generations), Duration::ZERO);
        let mut add = |indices: &[usize], Conversations { ended, environment_time }| {
            all.extend(indices.iter().flat_map(|i| std::iter::repeat_n(*i, num_generations)).zip(ended));
            time += environment_time;
        };
        if !others.is_empty() {
            add(&others, self.converse(&rows(&others), num_generations, max_completion_length, sampling)?);
        }
        if !agent_rows.is_empty() {
            let first_stream = (others.len() * num_generations) as u64;
            let rows = rows(&agent_rows);
            add(&agent_rows, self.hold_agents(&rows, num_generations, max_completion_length, sampling, first_stream)?);
        }
        // The sort is stable: conversations about a row stay in their order.
        all.sort_by_key(|(item, _)| *item);
        Ok(Completed::of_conversations(self.tokenizer, all.into_iter().map(|(_, ended)| ended), time))
    }

    /// Starts to sample completions of up to `rollout.max_completion_length` in the background.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn start(&mut self, prompts: &[Vec<u32>], num_generations: usize, sampling: Sampling) -> Result<Pending> {
        let stops = Stops::new(self.config, self.tokenizer);
        let longest = self.config.max_completion_length();
        Ok(self.engine.start(&request(self.config, &stops, prompts, num_generations, longest, sampling))?)
    }

    /// Waits for the completions of [`Rollout::start`], which had the same arguments.
    ///
    /// # Errors
    /// The errors of [`Rollout::complete`].
    pub fn wait(
        &self,
        pending: Pending,
        prompts: Vec<Vec<u32>>,
        num_generations: usize,
        sampling: Sampling,
    ) -> Result<Completed> {
        let stops = Stops::new(self.config, self.tokenizer);
        let longest = self.config.max_completion_length();
        let request = request(self.config, &stops, &prompts, num_generations, longest, sampling);
        let completions = checked(&request, pending.wait(&request)?)?;
        Completed::of_prompts(self.tokenizer, prompts, num_generations, completions)
    }

    /// Samples completions, and checks their number.
    fn generate(&mut self, request: &RolloutRequest<'_>) -> Result<Vec<Completion>> {
        let return_routed_experts = self.return_routed_experts && is_trained_on(&request.sampling);
        let request = &RolloutRequest { return_routed_experts, ..*request };
        checked(request, self.engine.generate(self.policy, request)?)
    }
}

fn request<'a>(
    rollout: &RolloutConfig,
    stops: &'a Stops<'_>,
    prompts: &'a [Vec<u32>],
    num_generations: usize,
    max_completion_length: usize,
    sampling: Sampling,
) -> RolloutRequest<'a> {
    let (stop_ids, stop) = (&stops.ids, stops.condition());
    RolloutRequest {
        prompts,
        num_generations,
        max_completion_length,
        stop_ids,
        stop,
        sampling,
        return_sampling_mask: rollout.replay_sampling_mask && is_trained_on(&sampling),
        return_routed_experts: false,
        turn: None,
    }
}

/// Returns `true` unless the completions belong to an evaluation.
fn is_trained_on(sampling: &Sampling) -> bool {
    matches!(sampling, Sampling::Random { purpose: Purpose::Rollout, .. })
}

/// Checks the number of completions, and the lengths of their lists.
fn checked(request: &RolloutRequest<'_>, completions: Vec<Completion>) -> Result<Vec<Completion>> {
    let count = request.prompts.len() * request.num_generations;
    let masks = |c: &Completion| !request.return_sampling_mask || c.sampling_mask.tokens() == c.ids.len();
    let routed = |c: &Completion| !request.return_routed_experts || !c.routed_experts.ids.is_empty();
    let lengths = |c: &Completion| !c.ids.is_empty() && [c.logps.len(), c.mask.len()] == [c.ids.len(); 2];
    let is_valid = |c: &Completion| lengths(c) && masks(c) && routed(c);
    if completions.len() != count || !completions.iter().all(is_valid) {
        let replayed = if request.return_sampling_mask { ", and with the ids that it was sampled from" } else { "" };
        let experts = if request.return_routed_experts { ", and with its experts" } else { "" };
        let expected = format!(
            "{count} completions of at least one token, each token with a log-probability and a mask{replayed}{experts}"
        );
        return Err(Error::Completions { expected, found: format!("{} completions", completions.len()) });
    }
    Ok(completions)
}
