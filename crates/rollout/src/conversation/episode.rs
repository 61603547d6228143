//! One conversation with its environment.

use super::check::{Tools, beginning};
use super::{Conversed, Ended};
use crate::{Result, encode_prompt, exceeds};
use agents::{Environment, Environments, Episode, Failure, Outcome, Parsed, Reply, Start};
use data::{Item, Prompt};
use models::Tokenizer;
use policy::Completion;
use rewards::Conversation;
use run_config::MultiTurnConfig;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

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
    /// The next message for the environment.
    question: Option<Value>,
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

/// The answer of an environment to a message of the assistant.
pub(super) enum Answer {
    /// Messages to go on with.
    Messages(Vec<Value>),
    /// The conversation is over.
    Over,
}

impl<'a> Talk<'a> {
    /// Returns the conversation number `index` of a rollout.
    pub(super) fn new(environments: &Environments, item: &'a Item, index: usize) -> Self {
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
            question: None,
            refused: Vec::new(),
            reply: None,
            prompt: Vec::new(),
            completion: Completion::default(),
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
            agents::check_messages(&messages)?;
            self.episode = Some(episode);
            Ok(messages)
        });
        self.start = Some(start);
    }

    /// Takes the first messages of the environment, or its failure.
    pub(super) fn take_start(&mut self) -> Result<Vec<Value>, Failure> {
        self.start.take().unwrap_or_else(|| Ok(Vec::new()))
    }

    /// Encodes the prompt, of at most `longest` tokens. `of_environment` are the tools of the environment.
    pub(super) fn begin(
        &mut self,
        start: Result<Vec<Value>, Failure>,
        of_environment: Option<&Value>,
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
        let prompt = match beginning(self.item, of_environment, &first) {
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
        if let Prompt::Messages { tools: Some(of_row), .. } = prompt {
            tools.check(&of_row)?;
            self.tools = Some(of_row);
        }
        Ok(())
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
            Some(of_row) => tools.parse(&turn.ids, &self.text, of_row)?,
            None => Parsed { content: self.text.clone(), calls: Vec::new() },
        };
        self.completion.append(turn);
        self.turns += 1;
        let mut message = json!({"role": "assistant", "content": content});
        self.calls += calls.len();
        self.calling_turns += usize::from(!calls.is_empty());
        let (has_calls, mut known) = (!calls.is_empty(), Vec::new());
        for (position, call) in calls.into_iter().enumerate() {
            match call {
                Ok(call) if is_tool(self.tools.as_ref(), &call.name) => known.push(call.to_message()),
                Ok(call) => self.refuse(position, format!("there is no tool `{}`", call.name)),
                Err(error) => self.refuse(position, error),
            }
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
        if done || self.is_last {
            self.is_open = false;
            return Answer::Over;
        }
        Answer::Messages(messages)
    }

    /// Appends the tokens of messages, and those that begin the next turn. If there is no room for them and a sampled token, they are left out
    /// and the conversation is over, at its length limit.
    pub(super) fn append(
        &mut self,
        tokenizer: &dyn Tokenizer,
        tools: &mut Tools<'_>,
        messages: Vec<Value>,
        max_completion_length: usize,
    ) -> Result<()> {
        let Some(last) = self.completion.ids.last().copied() else { return Ok(()) };
        let room = max_completion_length.saturating_sub(self.completion.ids.len());
        if exceeds(&messages, room).is_some() {
            self.end_without_room(messages.len());
            return Ok(());
        }
        let role = messages.first().and_then(|message| message["role"].as_str()).unwrap_or("user").to_owned();
        let turns = tools.turns(self.tools.as_ref(), &role)?;
        let ids = match turns.following(tokenizer, last, &messages) {
            Ok(ids) => ids,
            // A wrong answer of an environment is no error of the run.
            Err(error) => {
                self.fail(Failure::new(format!("the chat template refuses its messages: {error}")));
                return Ok(());
            }
        };
        if ids.len() >= room {
            self.end_without_room(messages.len());
            return Ok(());
        }
        self.completion.append_given(&ids);
        Ok(())
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
        self.conversation.sampled_tokens = self.completion.sampled_len();
        let conversed = Conversed {
            transcript: tokenizer.decode_with_special(&self.completion.ids)?,
            conversation: self.conversation,
            environment: self.environment.map(|(index, _)| index),
            outcome: self.outcome,
            lacks_room: self.lacks_room,
            unmet: 0,
            turns: self.turns,
            calls: self.calls,
            failed_calls: self.failed_calls,
            other_rows: Vec::new(),
        };
        Ok(Ended { prompt: self.prompt, completion: self.completion, text: self.text, conversed })
    }
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
