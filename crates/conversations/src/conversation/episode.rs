//! One conversation with its environment.

use super::check::{Tools, beginning};
use super::{Conversed, Ended};
use crate::{Result, encode_prompt, exceeds};
use grpo_agents::{Environment, Environments, Episode, Failure, Outcome, Parsed, Reply, Start};
use grpo_data::{Item, Prompt};
use grpo_models::{Tokenizer, with_names};
use grpo_policy::Completion;
use grpo_rewards::Conversation;
use grpo_run_config::MultiTurnConfig;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The name of the tool in the result of a call that could not be read.
const UNREAD: &str = "unknown";

/// A conversation.
pub(super) struct Talk<'a> {
    item: &'a Item,
    /// Its environment with its index; `None` if the row names no known environment.
    environment: Option<(usize, Arc<dyn Environment>)>,
    /// Its worker of the environment.
    worker: usize,
    episode: Option<Box<dyn Episode>>,
    /// The first messages of the environment, or its failure, before the conversation begins.
    start: Option<Result<Vec<Value>, Failure>>,
    tools: Option<Value>,
    /// The messages of the prompt and all later ones, as the chat template renders them anew; `None` unless the run forks conversations.
    history: Option<Vec<Value>>,
    /// The documents of the prompt.
    documents: Option<Value>,
    /// The next message for the environment.
    question: Option<Value>,
    /// The seed, the step and the number of the conversation, which determine the ids of its calls.
    key: [u64; 3],
    /// All calls of the last message with their ids, in order.
    last_calls: Vec<Value>,
    /// Results of tool calls that the environment does not see, with the position of the call in the message.
    refused: Vec<(usize, Value)>,
    /// The answer of the environment to the last message, or its failure.
    reply: Option<Result<Reply, Failure>>,
    /// The failure of the environment at the end of the conversation.
    end: Option<Failure>,
    outcome: Outcome,
    lacks_room: bool,
    pub(super) prompt: Vec<u32>,
    pub(super) completion: Completion,
    /// Earlier rows, whose tokens the chat template has changed.
    other_rows: Vec<(Vec<u32>, Completion)>,
    /// The last message of the assistant.
    text: String,
    conversation: Conversation,
    is_open: bool,
    /// `true` if the environment's next answer is its last one, because of the number of turns.
    is_last: bool,
    turns: usize,
    /// The number of messages of the assistant with tool calls.
    calling_turns: usize,
    calls: usize,
    failed_calls: usize,
}

/// The maximum numbers of tokens of a row.
#[derive(Clone, Copy)]
pub(super) struct Room {
    /// Of a prompt that renders a conversation anew.
    pub(super) prompt: usize,
    pub(super) completion: usize,
}

/// The answer of an environment to a message of the assistant.
pub(super) enum Answer {
    /// Messages to go on with.
    Messages(Vec<Value>),
    /// The conversation is over.
    Over,
}

/// The tokens before the next turn.
enum Next {
    /// They follow the completion.
    Behind(Vec<u32>),
    /// They are the prompt of another row.
    Prompt(Vec<u32>),
}

impl<'a> Talk<'a> {
    /// Returns the conversation number `index` of a rollout with this seed and step.
    pub(super) fn new(environments: &Environments, item: &'a Item, index: usize, [seed, step]: [u64; 2]) -> Self {
        let (environment, failure) = match environments.of_row(item) {
            Ok(at) => (environments.get(at).map(|(_, environment)| (at, Arc::clone(environment))), None),
            Err(failure) => (None, Some(failure)),
        };
        let workers = environment.as_ref().map_or(1, |(_, environment)| environment.workers().max(1));
        Self {
            item,
            environment,
            worker: index % workers,
            episode: None,
            start: None,
            tools: None,
            history: None,
            documents: None,
            question: None,
            key: [seed, step, index as u64],
            last_calls: Vec::new(),
            refused: Vec::new(),
            reply: None,
            prompt: Vec::new(),
            completion: Completion::default(),
            other_rows: Vec::new(),
            text: String::new(),
            is_open: failure.is_none(),
            is_last: false,
            conversation: Conversation {
                failure: failure.as_ref().map(ToString::to_string),
                ..Conversation::default()
            },
            end: None,
            outcome: failure.map_or(Outcome::NotAsked, Outcome::Failed),
            lacks_room: false,
            turns: 0,
            calling_turns: 0,
            calls: 0,
            failed_calls: 0,
        }
    }

    /// Returns its environment and the worker of it that answers.
    pub(super) fn worker(&self) -> (Option<usize>, usize) {
        (self.environment.as_ref().map(|(index, _)| *index), self.worker)
    }

    /// Returns `true` if the policy may write another turn.
    pub(super) fn is_open(&self) -> bool {
        self.is_open
    }

    fn fail(&mut self, failure: Failure) {
        self.conversation.failure = Some(failure.to_string());
        self.outcome = Outcome::Failed(failure);
        self.is_open = false;
    }

    /// Starts the environment.
    pub(super) fn reset(&mut self) {
        let Some((_, environment)) = &self.environment else { return };
        let start = environment.reset(self.item, self.worker).and_then(|Start { messages, episode }| {
            grpo_agents::check_messages(&messages)?;
            self.episode = Some(episode);
            Ok(messages)
        });
        self.start = Some(start);
    }

    /// Takes the first messages of the environment, or its failure.
    pub(super) fn take_start(&mut self) -> Result<Vec<Value>, Failure> {
        self.start.take().unwrap_or_else(|| Ok(Vec::new()))
    }

    /// Encodes the prompt, of at most `longest` tokens. `environment_tools` are the tools of the environment.
    pub(super) fn begin(
        &mut self,
        start: Result<Vec<Value>, Failure>,
        environment_tools: Option<&Value>,
        tokenizer: &dyn Tokenizer,
        tools: &mut Tools<'_>,
        longest: usize,
    ) -> Result<()> {
        if !self.is_open {
            return Ok(());
        }
        let first = match start {
            Ok(messages) => messages,
            Err(failure) => {
                self.fail(failure);
                return Ok(());
            }
        };
        let prompt = match beginning(self.item, environment_tools, &first) {
            Ok(prompt) => prompt,
            Err(failure) => {
                self.fail(failure);
                return Ok(());
            }
        };
        let too_long = |found: String| {
            Failure::new(format!(
                "its prompt has {found} tokens, and the context has room for {longest} before the completion"
            ))
        };
        if let Prompt::Messages { messages, .. } = &prompt
            && let Some(least) = exceeds(messages, longest)
        {
            self.fail(too_long(format!("at least {least}")));
            return Ok(());
        }
        // Without messages of the environment, the prompt is that of the row, which was checked before the run.
        let ids = match encode_prompt(tokenizer, &prompt) {
            Err(error) if !first.is_empty() => {
                self.fail(Failure::new(format!("the chat template refuses its messages: {error}")));
                return Ok(());
            }
            ids => ids?,
        };
        if ids.len() > longest {
            self.fail(too_long(ids.len().to_string()));
            return Ok(());
        }
        self.prompt = ids;
        if let Prompt::Messages { messages, tools: row_tools, documents } = prompt {
            self.history = tools.forks().then_some(messages);
            (self.documents, self.tools) = (documents, row_tools);
        }
        self.tools.as_ref().map_or(Ok(()), |row_tools| tools.check(row_tools))
    }

    /// Takes a turn of the policy, and prepares the message for the environment.
    pub(super) fn take_turn(
        &mut self,
        turn: Completion,
        tokenizer: &dyn Tokenizer,
        tools: &mut Tools<'_>,
        limits: &MultiTurnConfig,
    ) -> Result<()> {
        self.text = tokenizer.decode(&turn.ids)?;
        let Parsed { content, calls } = match &self.tools {
            Some(row_tools) => tools.parse(&turn.ids, &self.text, row_tools)?,
            None => Parsed { content: self.text.clone(), calls: Vec::new() },
        };
        self.completion.append(turn);
        self.turns += 1;
        let mut message = json!({"role": "assistant", "content": content});
        self.calls += calls.len();
        self.calling_turns += usize::from(!calls.is_empty());
        let (has_calls, mut known) = (!calls.is_empty(), Vec::new());
        self.last_calls.clear();
        for (position, call) in calls.into_iter().enumerate() {
            let [seed, step, conversation] = self.key;
            let written = call.as_ref().ok().and_then(|call| call.id.clone());
            // Two calls with one id could not be told apart.
            let id = written
                .filter(|id| self.last_calls.iter().all(|call| call["id"] != **id))
                .unwrap_or_else(|| call_id([seed, step, conversation, self.turns as u64, position as u64]));
            let name = call.as_ref().map_or(UNREAD, |call| &call.name);
            let arguments = call.as_ref().map_or_else(|_| json!({}), |call| Value::from(call.arguments.clone()));
            self.last_calls
                .push(json!({"type": "function", "id": id, "function": {"name": name, "arguments": arguments}}));
            match call {
                Ok(call) if is_tool(self.tools.as_ref(), &call.name) => {
                    let mut call = call.to_message();
                    call["id"] = id.into();
                    known.push(call);
                }
                Ok(call) => self.refuse(position, format!("there is no tool `{}`", call.name)),
                Err(error) => self.refuse(position, error),
            }
        }
        if let Some(history) = &mut self.history {
            let mut rendered = message.clone();
            if has_calls {
                rendered["tool_calls"] = self.last_calls.clone().into();
            }
            history.push(rendered);
        }
        let is_refused = has_calls && known.is_empty();
        if !known.is_empty() {
            message["tool_calls"] = known.into();
        }
        self.conversation.messages.push(message.clone());
        let too_many_calls =
            has_calls && limits.max_tool_calling_iterations.is_some_and(|most| self.calling_turns > most);
        self.is_open = !(self.completion.truncated || too_many_calls);
        self.is_last = limits.max_assistant_turns.is_some_and(|most| self.turns >= most);
        self.question = Some(message).filter(|_| !is_refused);
        Ok(())
    }

    /// Adds the result of a call that the environment does not see.
    fn refuse(&mut self, position: usize, error: String) {
        self.failed_calls += 1;
        self.refused.push((position, json!({"role": "tool", "content": format!("error: {error}")})));
    }

    /// Asks the environment.
    pub(super) fn ask(&mut self) {
        let (Some(question), Some(episode)) = (self.question.take(), &mut self.episode) else { return };
        let reply = episode.step(&question).and_then(|reply| {
            reply.check()?;
            let is_silent = reply.messages.is_empty() && !reply.done && self.refused.is_empty();
            if is_silent {
                return Err(Failure::new("it answers without a message, and does not end the conversation"));
            }
            Ok(reply)
        });
        self.reply = Some(reply);
    }

    /// Takes the answer of the environment, or its failure; `None` if it was not asked.
    pub(super) fn take_reply(&mut self) -> Option<Result<Reply, Failure>> {
        self.reply.take()
    }

    /// Adds the answer of the environment, if the conversation is open: counts its rewards and failed calls, and cuts long messages.
    pub(super) fn add_reply(&mut self, reply: Option<Result<Reply, Failure>>, limits: &MultiTurnConfig) -> Answer {
        if !self.is_open {
            return Answer::Over;
        }
        let Reply { mut messages, reward, done } = match reply.transpose() {
            Ok(reply) => {
                if reply.is_some() {
                    self.outcome = Outcome::Answered;
                }
                reply.unwrap_or_default()
            }
            Err(failure) => {
                self.fail(failure);
                return Answer::Over;
            }
        };
        // Results are in the order of the calls.
        for (position, message) in self.refused.drain(..) {
            messages.insert(position.min(messages.len()), message);
        }
        if let Err(failure) = identify(&mut messages, &self.last_calls) {
            self.fail(failure);
            return Answer::Over;
        }
        if let Some(reward) = reward {
            *self.conversation.reward.get_or_insert(0.0) += reward;
        }
        for message in &mut messages {
            if let Some(fields) = message.as_object_mut() {
                let is_error = fields.shift_remove("is_error").is_some_and(|is_error| is_error == true);
                self.failed_calls += usize::from(is_error);
            }
            if let Some(text) = message["content"].as_str() {
                let cut = limits.cut(text).into_owned();
                message["content"] = cut.into();
            }
        }
        self.conversation.messages.extend(messages.iter().cloned());
        self.history.iter_mut().for_each(|history| history.extend(messages.iter().cloned()));
        if done || self.is_last {
            self.is_open = false;
            return Answer::Over;
        }
        Answer::Messages(messages)
    }

    /// Appends the tokens of messages, and those that begin the next turn. If the template changes the tokens before, the conversation goes on
    /// in another row. If there is no room for them and a sampled token, they are left out and the conversation is over, at its length limit.
    pub(super) fn append(
        &mut self,
        tokenizer: &dyn Tokenizer,
        tools: &mut Tools<'_>,
        messages: Vec<Value>,
        room: Room,
    ) -> Result<()> {
        let Some(last) = self.completion.ids.last().copied() else { return Ok(()) };
        let left = room.completion.saturating_sub(self.completion.ids.len());
        let role = messages.first().and_then(|message| message["role"].as_str()).unwrap_or("user").to_owned();
        let turns = tools.turns(self.tools.as_ref(), &role)?;
        let most = if turns.rewrites() { left.max(room.prompt) } else { left };
        if exceeds(&messages, most).is_some() {
            self.end_without_room(messages.len());
            return Ok(());
        }
        let calls = if role == "tool" { &self.last_calls[..] } else { &[] };
        let next = match &self.history {
            Some(history) if turns.rewrites() => {
                turns.whole(tokenizer, history, self.documents.as_ref()).map(|ids| self.continued(ids))
            }
            _ => turns.following(tokenizer, last, calls, &messages).map(Next::Behind),
        };
        match next {
            Ok(Next::Behind(ids)) if ids.len() < left => self.completion.append_given(&ids),
            Ok(Next::Prompt(ids)) if ids.len() <= room.prompt => {
                let row = (std::mem::replace(&mut self.prompt, ids), std::mem::take(&mut self.completion));
                self.other_rows.push(row);
            }
            Ok(_) => self.end_without_room(messages.len()),
            // A wrong answer of an environment is no error of the run.
            Err(error) => self.fail(Failure::new(format!("the chat template refuses its messages: {error}"))),
        }
        Ok(())
    }

    /// Returns the tokens of the whole conversation as the row's next ones, or as the prompt of another row.
    fn continued(&self, whole: Vec<u32>) -> Next {
        let behind = whole.strip_prefix(&self.prompt[..]).and_then(|ids| ids.strip_prefix(&self.completion.ids[..]));
        match behind {
            Some(ids) if !ids.is_empty() => Next::Behind(ids.to_vec()),
            _ => Next::Prompt(whole),
        }
    }

    /// Ends the conversation, whose last `left_out` messages have no room.
    fn end_without_room(&mut self, left_out: usize) {
        let kept = self.conversation.messages.len().saturating_sub(left_out);
        self.conversation.messages.truncate(kept);
        (self.completion.truncated, self.lacks_room, self.is_open) = (true, true, false);
    }

    /// Ends the conversation for the environment.
    pub(super) fn close(&mut self) {
        self.end = self.episode.take().and_then(|mut episode| episode.end().err());
    }

    /// Takes the failure of the environment at the end of the conversation.
    pub(super) fn take_end(&mut self) -> Option<Failure> {
        self.end.take()
    }

    /// Adds a failure of the environment at the end of the conversation, unless it has failed before.
    pub(super) fn add_end(&mut self, failure: Option<Failure>) {
        if let Some(failure) = failure.filter(|_| self.conversation.failure.is_none()) {
            self.fail(failure);
        }
    }

    /// Returns the conversation after its end.
    pub(super) fn finish(mut self, tokenizer: &dyn Tokenizer) -> Result<Ended> {
        if self.prompt.is_empty() {
            self.prompt.push(tokenizer.eos_id());
        }
        if self.completion.ids.is_empty() {
            // A conversation that failed before its first turn: nothing was sampled, and nothing is trained on.
            self.completion.append_given(&[tokenizer.eos_id()]);
        }
        let other_tokens: usize = self.other_rows.iter().map(|(_, completion)| completion.sampled_len()).sum();
        self.conversation.sampled_tokens = other_tokens + self.completion.sampled_len();
        let truncated = self.completion.truncated;
        self.other_rows.iter_mut().for_each(|(_, completion)| completion.truncated = truncated);
        // The last row's prompt contains the earlier turns.
        let before = if self.other_rows.is_empty() { &[] } else { &self.prompt[..] };
        let conversed = Conversed {
            transcript: tokenizer.decode_with_special(&[before, &self.completion.ids].concat())?,
            conversation: self.conversation,
            environment: self.environment.map(|(index, _)| index),
            outcome: self.outcome,
            lacks_room: self.lacks_room,
            unmet: 0,
            turns: self.turns,
            calls: self.calls,
            failed_calls: self.failed_calls,
            other_rows: self.other_rows,
        };
        Ok(Ended { prompt: self.prompt, completion: self.completion, text: self.text, conversed })
    }
}

/// Returns an id of nine letters and digits, which Mistral's templates demand. The same key has the same id.
fn call_id(key: [u64; 5]) -> String {
    const DIGITS: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    let mut hash = grpo_rng::stable_hash(&format!("{key:?}"));
    let digits = (0..9).map(|_| {
        let digit = DIGITS[(hash % 36) as usize];
        hash /= 36;
        char::from(digit)
    });
    digits.collect()
}

/// Gives the results of tools the ids and names of their calls. A result without `tool_call_id` belongs to the first call that has none yet.
///
/// # Errors
/// A failure for the id of no call.
fn identify(messages: &mut [Value], calls: &[Value]) -> Result<(), Failure> {
    let Some(last) = calls.len().checked_sub(1) else { return Ok(()) };
    let mut is_answered = vec![false; calls.len()];
    for message in messages.iter_mut().filter(|message| message["role"] == "tool") {
        let id = &message["tool_call_id"];
        let at = match id.is_null() {
            true => is_answered.iter().position(|is_answered| !is_answered).unwrap_or(last),
            false => calls.iter().position(|call| call["id"] == *id).ok_or_else(|| {
                let expected = "`tool_call_id` of a result to be the id of a call of the message, or left out";
                Failure::new(format!(
                    "expected {expected}, got {}",
                    id.to_string().chars().take(100).collect::<String>()
                ))
            })?,
        };
        is_answered[at] = true;
        message["tool_call_id"] = calls[at]["id"].clone();
    }
    with_names(messages, calls);
    Ok(())
}

/// Returns `true` if the tools contain a function of this name.
fn is_tool(tools: Option<&Value>, name: &str) -> bool {
    let list = tools.and_then(Value::as_array).into_iter().flatten();
    list.map(|tool| tool.get("function").unwrap_or(tool)).any(|function| function["name"] == name)
}

/// Calls `work` for conversations: one thread for each worker of each environment.
pub(super) fn for_each_worker<'a>(talks: Vec<&mut Talk<'a>>, work: fn(&mut Talk<'a>)) {
    let mut workers: BTreeMap<(Option<usize>, usize), Vec<&mut Talk<'a>>> = BTreeMap::new();
    for talk in talks {
        workers.entry(talk.worker()).or_default().push(talk);
    }
    if workers.len() <= 1 {
        workers.into_values().flatten().for_each(work);
        return;
    }
    std::thread::scope(|scope| {
        for talks in workers.into_values() {
            scope.spawn(move || talks.into_iter().for_each(work));
        }
    });
}
