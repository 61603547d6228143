//! Conversations with environments: the policy samples a turn of every open conversation, the environments answer, and so on.
//!
//! ```text
//! reset every environment; prompt = tokens of the row's messages and the environment's
//! while conversations are open:
//!     sample the next turn of each, behind prompt + completion; as soon as one is finished:
//!         append its tokens to the completion, with mask 1
//!         find tool calls, and ask the environment, while other turns are sampled
//!     append the tokens that the chat template puts between the turns, with mask 0;
//!     with `data.history: fork`, a conversation whose tokens the template has changed goes on in a row of its own
//! ```
//!
//! Nothing that was sampled is ever encoded again. In a run of several processes, process 0 asks the environments ([`crate::lockstep`]).

mod check;
mod ended;
mod episode;
mod listener;

pub(crate) use check::Tools;
pub use check::{CheckedEnvironments, check_environments, with_tools};
pub use ended::Conversed;
pub(crate) use ended::{Conversations, Ended, stream};

use crate::lockstep::{Sampled, leads, share_list};
use crate::stops::Stops;
use crate::{Error, Result, Rollout, request};
use episode::{Answer, Room, Talk, for_each_worker};
use grpo_agents::Failure;
use grpo_data::Item;
use grpo_policy::{Finished, RolloutRequest, Sampling, Turn};
use listener::{Listener, Turns};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The name of the first messages of all conversations.
const STARTS: &str = "the first messages of the environments";
/// The name of the answers to a turn of all conversations.
const REPLIES: &str = "the answers of the environments";
/// The name of the failures at the end of all conversations.
const ENDS: &str = "the ends of the conversations with environments";

impl Rollout<'_> {
    /// Holds `num_generations` conversations about each row.
    ///
    /// # Errors
    /// The errors of the engine and the tokenizer; a chat template that cannot be used for the conversations. An environment that fails is no
    /// error: its conversation has a failure.
    pub(crate) fn converse(
        &mut self,
        items: &[&Item],
        num_generations: usize,
        max_completion_length: usize,
        sampling: Sampling,
    ) -> Result<Conversations> {
        let (tokenizer, environments, config, store) = (self.tokenizer, self.environments, self.config, self.store);
        let (limits, context) = (&config.multi_turn, self.context_length());
        let stops = Stops::new(config, tokenizer);
        let mut tools = Tools::new(tokenizer, limits, self.history);
        let rows = items.iter().flat_map(|item| std::iter::repeat_n(*item, num_generations));
        let key = match sampling {
            Sampling::Random { seed, step, .. } => [seed, step],
            Sampling::Greedy => [0, 0],
        };
        let talk = |(index, item)| Talk::new(environments, item, index, key);
        let mut talks: Vec<Talk<'_>> = rows.enumerate().map(talk).collect();
        let mut environment_time = Duration::ZERO;
        let began = Instant::now();
        if leads(store) {
            for_each_worker(talks.iter_mut().collect(), Talk::reset);
        }
        let starts = share_list(store, STARTS, &Sampled::default(), talks.len(), || {
            talks.iter_mut().map(Talk::take_start).collect()
        })?;
        environment_time += began.elapsed();
        let longest_prompt = context.saturating_sub(max_completion_length);
        let room = Room {
            prompt: self.max_prompt_length.map_or(longest_prompt, |most| most.min(longest_prompt)),
            completion: max_completion_length,
        };
        for (talk, start) in talks.iter_mut().zip(starts) {
            let (index, _) = talk.worker();
            let environment_tools = index.and_then(|index| environments.tools(index));
            talk.begin(start, environment_tools, tokenizer, &mut tools, longest_prompt)?;
        }
        for turn in 0_u64.. {
            let open: Vec<usize> = (0..talks.len()).filter(|i| talks[*i].is_open()).collect();
            if open.is_empty() {
                break;
            }
            let next = NextTurn::of(&talks, &open, turn, num_generations, max_completion_length);
            let base = request(config, &stops, &next.prompts, next.num_generations, max_completion_length, sampling);
            let (sampled, began) = {
                let talks: Vec<Mutex<&mut Talk<'_>>> = talks.iter_mut().map(Mutex::new).collect();
                let turns = Turns::new(&talks, &open, tokenizer, &mut tools, limits);
                std::thread::scope(|scope| {
                    let listener = Listener::start(&turns, leads(store), scope);
                    let turn = Some(Turn { streams: &next.streams, limits: &next.limits, finished: Some(&listener) });
                    let sampled = self.generate(&RolloutRequest { turn, ..base })?;
                    // Engines need not report completions.
                    sampled.iter().enumerate().for_each(|(index, completion)| listener.finished(index, completion));
                    listener.end()?;
                    let sampled = Sampled::of(sampled.iter().map(|c| (&c.ids[..], c.truncated)));
                    Ok::<_, Error>((sampled, Instant::now()))
                })?
            };
            let replies = share_list(store, REPLIES, &sampled, open.len(), || {
                open.iter().map(|i| talks[*i].take_reply()).collect()
            })?;
            environment_time += began.elapsed();
            for (i, reply) in open.into_iter().zip(replies) {
                if let Answer::Messages(messages) = talks[i].add_reply(reply, limits) {
                    talks[i].append(tokenizer, &mut tools, messages, room)?;
                }
            }
        }
        let began = Instant::now();
        for_each_worker(talks.iter_mut().collect(), Talk::close);
        let ends: Vec<Option<Failure>> = share_list(store, ENDS, &Sampled::default(), talks.len(), || {
            talks.iter_mut().map(Talk::take_end).collect()
        })?;
        talks.iter_mut().zip(ends).for_each(|(talk, end)| talk.add_end(end));
        environment_time += began.elapsed();
        let ended = talks.into_iter().map(|talk| talk.finish(tokenizer)).collect::<Result<_>>()?;
        Ok(Conversations { ended, environment_time })
    }
}

/// The request that samples the next turn of all open conversations.
struct NextTurn {
    prompts: Vec<Vec<u32>>,
    num_generations: usize,
    streams: Vec<u64>,
    limits: Vec<usize>,
}

impl NextTurn {
    /// Returns the request for the conversations at `open`. The first turns of a row share its prompt, if they are all open and their
    /// environments began them alike.
    fn of(talks: &[Talk<'_>], open: &[usize], turn: u64, num_generations: usize, max_completion_length: usize) -> Self {
        let is_shared = turn == 0
            && open.len() == talks.len()
            && talks.chunks(num_generations).all(|group| group.iter().all(|talk| talk.prompt == group[0].prompt));
        let prompt = |talk: &Talk<'_>| [&talk.prompt[..], &talk.completion.ids].concat();
        let (prompts, num_generations) = match is_shared {
            true => (talks.iter().step_by(num_generations).map(prompt).collect(), num_generations),
            false => (open.iter().map(|i| prompt(&talks[*i])).collect(), 1),
        };
        Self {
            prompts,
            num_generations,
            streams: open.iter().map(|i| stream(turn, *i as u64)).collect(),
            limits: open.iter().map(|i| max_completion_length - talks[*i].completion.ids.len()).collect(),
        }
    }
}
