//! Conversations that agents hold over the endpoint of the run.
//!
//! ```text
//! while agents run:
//!     for each request that waits: find its row, and the tokens between the row's last message and the answer
//!     sample the answers of all of them
//!     return their messages to the agents
//!     append the tokens of those that an agent has waited for to the rows, with mask 1
//! ```
//!
//! In a run of several processes, process 0 has the agents and the endpoint ([`crate::lockstep`]).

mod history;

use crate::conversation::{Conversations, Conversed, Ended, Tools, stream};
use crate::lockstep::{Sampled, leads, share, share_list, unexpected};
use crate::stops::Stops;
use crate::{Error, Result, Rollout, request};
use grpo_agents::endpoint::{Asked, ChatRequest, Delivery, Held, Job};
use grpo_agents::{Endpoint, Failure, Outcome};
use grpo_data::Item;
use grpo_distributed::Store;
use grpo_models::Tokenizer;
use grpo_policy::{Completion, RolloutRequest, Sampling, Turn};
use grpo_rewards::Conversation;
use history::{History, Limits, Row};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// The name of the messages about agents.
const HEARD: &str = "the requests of the agents";
/// The name of the deliveries of answers to agents.
const DELIVERED: &str = "the deliveries to the agents";

impl Rollout<'_> {
    /// Lets agents hold `num_generations` conversations about each row. `first_stream` is the random stream of the first conversation.
    ///
    /// # Errors
    /// The errors of the engine and the tokenizer. An agent that fails is no error: its conversation has a failure.
    pub(crate) fn hold_agents(
        &mut self,
        items: &[&Item],
        num_generations: usize,
        max_completion_length: usize,
        sampling: Sampling,
        first_stream: u64,
    ) -> Result<Conversations> {
        let (tokenizer, environments, config, store) = (self.tokenizer, self.environments, self.config, self.store);
        let endpoint = self.endpoint;
        let stops = Stops::new(config, tokenizer);
        let mut tools = Tools::new(tokenizer, &config.multi_turn, self.history);
        let room = self.context_length().saturating_sub(max_completion_length);
        let limits = Limits {
            multi_turn: &config.multi_turn,
            prompt: self.max_prompt_length.unwrap_or(room).min(room),
            completion: max_completion_length,
        };
        let (mut jobs, mut indices) = (Vec::new(), Vec::new());
        for row in items.iter().flat_map(|item| std::iter::repeat_n(*item, num_generations)) {
            // Its caller has found the agents of these rows.
            let Ok(index) = environments.of_row(row) else { continue };
            let Some(agent) = environments.agent(index) else { continue };
            jobs.push(Job { agent: Arc::clone(agent), row });
            indices.push(index);
        }
        let mut histories: Vec<History> = jobs.iter().map(|_| History::default()).collect();
        let answer = |asked: Vec<Asked>| {
            let mut placed = Vec::new();
            for asked in asked {
                let history = &mut histories[asked.job];
                let turn = history.started as u64;
                if asked.request.counts_only {
                    let reply = history::count(&asked.request, tokenizer, &mut tools, limits);
                    drop(asked.answer(reply));
                    continue;
                }
                match history.place(&asked.request, tokenizer, &mut tools, limits) {
                    Ok(place) => {
                        placed.push(Placed { stream: stream(turn, first_stream + asked.job as u64), asked, place })
                    }
                    Err(error) => drop(asked.answer(Err(error))),
                }
            }
            if placed.is_empty() {
                return Ok(());
            }
            let prompts: Vec<Vec<u32>> =
                placed.iter().map(|placed| histories[placed.asked.job].prompt(&placed.place)).collect();
            let streams: Vec<u64> = placed.iter().map(|placed| placed.stream).collect();
            let limits: Vec<usize> = placed.iter().map(|placed| placed.place.limit).collect();
            let turn = Some(Turn { streams: &streams, limits: &limits, finished: None });
            let base = request(config, &stops, &prompts, 1, max_completion_length, sampling);
            let sampled = self.generate(&RolloutRequest { turn, ..base })?;
            let digest = Sampled::of(sampled.iter().map(|c| (&c.ids[..], c.truncated)));
            let (mut answers, mut deliveries) = (Vec::new(), Vec::new());
            for (Placed { asked, place, .. }, completion) in placed.into_iter().zip(sampled) {
                let (job, request) = (asked.job, &asked.request);
                let (answer, reply) = histories[job].answer(place, request, completion, tokenizer, &mut tools)?;
                answers.push((job, answer));
                deliveries.push(asked.answer(Ok(reply)));
            }
            let delivered = share_list(store, DELIVERED, &digest, answers.len(), || {
                deliveries.into_iter().map(Delivery::is_complete).collect()
            })?;
            for ((job, answer), is_delivered) in answers.into_iter().zip(delivered) {
                match is_delivered {
                    true => histories[job].record(answer),
                    false => histories[job].drop_answer(&answer),
                }
            }
            Ok::<_, Error>(())
        };
        let Held { outcomes, waited } = match leads(store) {
            true => lead(endpoint.ok_or(grpo_agents::Error::NoEndpoint)?, &jobs, store, answer)?,
            false => follow(store, jobs.len(), answer)?,
        };
        let ended = histories.into_iter().zip(outcomes).zip(indices);
        let ended = ended.map(|((history, outcome), index)| finish(history, outcome, index, tokenizer));
        Ok(Conversations { ended: ended.collect::<Result<_>>()?, environment_time: waited })
    }
}

/// A message of the leader about its agents.
#[derive(Serialize, Deserialize)]
enum Heard {
    /// Requests that are answered together, each with the index of its job.
    Requests(Vec<(usize, ChatRequest)>),
    /// All agents have ended, with these rewards or failures.
    Over(Vec<Result<Option<f32>, Failure>>),
}

/// Runs agents, and sends their requests and results to the other processes of the run.
fn lead(
    endpoint: &Endpoint,
    jobs: &[Job<'_>],
    store: Option<&Store>,
    mut answer: impl FnMut(Vec<Asked>) -> Result<()>,
) -> Result<Held> {
    let tell = |heard: &dyn Fn() -> Heard| match store {
        Some(_) => share(store, HEARD, &Sampled::default(), heard).map(drop),
        None => Ok(()),
    };
    let held = endpoint.hold(jobs, |asked| {
        let request = |asked: &Asked| (asked.job, asked.request.clone());
        tell(&|| Heard::Requests(asked.iter().map(request).collect()))?;
        answer(asked)
    })?;
    tell(&|| Heard::Over(held.outcomes.clone()))?;
    Ok(held)
}

/// Answers the requests of the leader's agents.
fn follow(store: Option<&Store>, jobs: usize, mut answer: impl FnMut(Vec<Asked>) -> Result<()>) -> Result<Held> {
    loop {
        match share(store, HEARD, &Sampled::default(), || Heard::Over(Vec::new()))? {
            Heard::Requests(requests) if requests.iter().all(|(job, _)| *job < jobs) => {
                let asked = requests.into_iter().map(|(job, request)| Asked::unread(job, request));
                answer(asked.collect())?;
            }
            Heard::Over(outcomes) if outcomes.len() == jobs => return Ok(Held { outcomes, waited: Duration::ZERO }),
            Heard::Requests(_) | Heard::Over(_) => return Err(unexpected(store, HEARD, jobs)),
        }
    }
}

/// A request with its place.
struct Placed {
    asked: Asked,
    place: history::Place,
    stream: u64,
}

/// Returns a conversation after its agent has ended.
fn finish(
    history: History,
    outcome: Result<Option<f32>, Failure>,
    environment: usize,
    tokenizer: &dyn Tokenizer,
) -> Result<Ended> {
    let History { turns, calls, failed_calls, unmet, .. } = history;
    let text = history.text.clone();
    let (reward, failure) = match outcome {
        Ok(reward) => (reward, None),
        Err(failure) => (None, Some(failure)),
    };
    let (environment, text_of) = (Some(environment), |failure: &Failure| failure.to_string());
    let Some((Row { prompt, completion, .. }, messages, others)) = history.into_rows() else {
        // Nothing was sampled, and nothing is trained on.
        let mut completion = Completion::default();
        completion.append_given(&[tokenizer.eos_id()]);
        let failure = failure.unwrap_or_else(|| Failure::new("none of its requests was answered with a message"));
        let conversation = Conversation { failure: Some(text_of(&failure)), ..Conversation::default() };
        let outcome = Outcome::Failed(failure);
        let conversed = Conversed { conversation, environment, outcome, ..Conversed::default() };
        return Ok(Ended { prompt: vec![tokenizer.eos_id()], completion, text, conversed });
    };
    let sampled = others.iter().map(|row| row.completion.sampled_len()).sum::<usize>();
    let sampled_tokens = sampled + completion.sampled_len();
    let conversed = Conversed {
        transcript: tokenizer.decode_with_special(&[&prompt[..], &completion.ids].concat())?,
        conversation: Conversation { messages, reward, sampled_tokens, failure: failure.as_ref().map(text_of) },
        environment,
        outcome: failure.map_or(Outcome::Answered, Outcome::Failed),
        lacks_room: false,
        unmet,
        turns,
        calls,
        failed_calls,
        other_rows: others.into_iter().map(|row| (row.prompt, row.completion)).collect(),
    };
    Ok(Ended { prompt, completion, text, conversed })
}
