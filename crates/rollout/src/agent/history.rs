//! The rows of a conversation that an agent holds.
//!
//! A request that repeats the messages of a row and adds some continues the row: the tokens so far stay, and those of the new messages follow
//! with mask 0. Any other request begins a row of its own, as in prime-rl and AReaL. Its prompt has the tokens of the longest beginning that a row
//! has, too, up to a message of the assistant: sampled tokens are never encoded again, and each is trained on in one row only.

use crate::conversation::Tools;
use crate::{Result, encode_prompt};
use agents::Parsed;
use agents::endpoint::{ApiError, ChatReply, ChatRequest};
use data::Prompt;
use models::Tokenizer;
use policy::Completion;
use run_config::MultiTurnConfig;
use serde_json::{Value, json};

/// The maximum number of messages of the assistant if `rollout.multi_turn.max_assistant_turns` sets none: rows without end would fill the memory.
const MOST_TURNS: usize = 256;

/// The limits of a conversation.
#[derive(Clone, Copy)]
pub(super) struct Limits<'a> {
    pub(super) multi_turn: &'a MultiTurnConfig,
    /// The maximum number of tokens of a row's prompt.
    pub(super) prompt: usize,
    /// The maximum number of tokens of a row behind its prompt.
    pub(super) completion: usize,
}

/// A row: a prompt and what follows it.
#[derive(Default)]
pub(super) struct Row {
    tools: Option<Value>,
    /// All messages, those of the prompt included.
    messages: Vec<Value>,
    pub(super) prompt: Vec<u32>,
    pub(super) completion: Completion,
    /// The number of messages and of tokens of the completion behind each message of the assistant that was sampled.
    turns: Vec<[usize; 2]>,
    /// `true` while a request continues the row.
    is_busy: bool,
}

/// A conversation.
#[derive(Default)]
pub(super) struct History {
    pub(super) rows: Vec<Row>,
    /// The index of the row of the last answer.
    last: usize,
    /// The text of the last answer.
    pub(super) text: String,
    /// The number of requests that were or are being sampled.
    pub(super) started: usize,
    /// The number of answers.
    pub(super) turns: usize,
    /// The number of answers with tool calls.
    calling_turns: usize,
    pub(super) calls: usize,
    pub(super) failed_calls: usize,
    /// The number of calls with an id, also in answers that were not delivered.
    named_calls: usize,
    /// `true` if a limit of the run has cut the conversation.
    truncated: bool,
}

/// The place of a request in its conversation.
pub(super) struct Place {
    /// The index of the row that it continues; `None` for a new row.
    row: Option<usize>,
    /// The new tokens of the row: behind its completion, or the prompt of a new row.
    ids: Vec<u32>,
    /// The maximum number of tokens of the answer.
    pub(super) limit: usize,
    /// `true` if the request limits the answer, and not the run.
    is_limited: bool,
}

/// An answer, before its delivery.
pub(super) struct Answer {
    place: Place,
    turn: Completion,
    text: String,
    message: Value,
    /// The messages of the request.
    messages: Vec<Value>,
    tools: Option<Value>,
    calls: usize,
    failed_calls: usize,
}

impl History {
    /// Finds the place of a request.
    ///
    /// # Errors
    /// The error for the agent if the conversation is over, the request too long, or the chat template refuses its messages.
    pub(super) fn place(
        &mut self,
        request: &ChatRequest,
        tokenizer: &dyn Tokenizer,
        tools: &mut Tools<'_>,
        limits: Limits<'_>,
    ) -> Result<Place, ApiError> {
        self.check_turns(limits.multi_turn)?;
        let beginning = self.beginning(request);
        let known = beginning.map_or(0, |(row, turn)| self.rows[row].turns[turn][0]);
        let new: Vec<Value> = request.messages[known..].iter().map(|message| cut(message, limits.multi_turn)).collect();
        let refused = |error: &dyn std::fmt::Display| {
            ApiError::param("messages", format!("the chat template of the run refuses them: {error}"))
        };
        let Some((row, turn)) = beginning else {
            let prompt = Prompt::Messages { messages: new, tools: request.tools.clone(), documents: None };
            let ids = encode_prompt(tokenizer, &prompt).map_err(|error| refused(&error))?;
            return self.new_row(ids, request, limits);
        };
        let found = &self.rows[row];
        let length = found.turns[turn][1];
        let last = found.completion.ids[..length].last().copied().unwrap_or_default();
        let role = new.first().and_then(|message| message["role"].as_str()).unwrap_or("user");
        let turns = tools.turns(request.tools.as_ref(), role).map_err(|error| refused(&error))?;
        let between = turns.following(tokenizer, last, &new).map_err(|error| refused(&error))?;
        if found.is_busy || turn + 1 < found.turns.len() {
            let ids = [&found.prompt[..], &found.completion.ids[..length], &between].concat();
            return self.new_row(ids, request, limits);
        }
        let room = limits.completion.saturating_sub(length + between.len());
        if room == 0 {
            self.truncated = true;
            return Err(too_long("rollout.max_completion_length", limits.completion, length + between.len() + 1));
        }
        self.rows[row].is_busy = true;
        Ok(self.start(Some(row), between, room, request))
    }

    /// Refuses requests of a conversation that has reached a number of turns.
    fn check_turns(&mut self, limits: &MultiTurnConfig) -> Result<(), ApiError> {
        let over = |key: &str, most: usize| {
            let message = format!("the conversation is over: rollout.multi_turn.{key} is {most}");
            ApiError::new(400, message).with_code("conversation_over")
        };
        let most = limits.max_assistant_turns.unwrap_or(MOST_TURNS);
        if self.started >= most {
            // Without the key, the limit protects the run, and the agent has not expected it.
            self.truncated |= limits.max_assistant_turns.is_none();
            return Err(over("max_assistant_turns", most));
        }
        match limits.max_tool_calling_iterations {
            Some(most) if self.calling_turns > most => Err(over("max_tool_calling_iterations", most)),
            _ => Ok(()),
        }
    }

    /// Returns the row and the turn up to which the request repeats the most messages.
    fn beginning(&self, request: &ChatRequest) -> Option<(usize, usize)> {
        let repeats = |row: &Row, messages: usize| {
            let next = request.messages.get(messages);
            row.tools == request.tools
                && next.is_some_and(|next| next["role"] != "assistant")
                && request.messages[..messages] == row.messages[..messages]
        };
        let of_row = |(index, row): (usize, &Row)| {
            let turn = row.turns.iter().rposition(|[messages, _]| repeats(row, *messages))?;
            // Of several rows with the same beginning, one that can be continued.
            let can_continue = turn + 1 == row.turns.len() && !row.is_busy;
            Some((row.turns[turn][0], can_continue, (index, turn)))
        };
        let best = self.rows.iter().enumerate().filter_map(of_row).max_by_key(|(messages, can, _)| (*messages, *can));
        best.map(|(.., found)| found)
    }

    fn new_row(&mut self, prompt: Vec<u32>, request: &ChatRequest, limits: Limits<'_>) -> Result<Place, ApiError> {
        if prompt.len() > limits.prompt {
            self.truncated = true;
            return Err(too_long(
                "data.max_prompt_length, or the context without rollout.max_completion_length",
                limits.prompt,
                prompt.len(),
            ));
        }
        Ok(self.start(None, prompt, limits.completion, request))
    }

    fn start(&mut self, row: Option<usize>, ids: Vec<u32>, room: usize, request: &ChatRequest) -> Place {
        self.started += 1;
        let limit = request.max_tokens.unwrap_or(room).min(room);
        Place { row, ids, limit, is_limited: limit < room }
    }

    /// Returns the tokens before the answer.
    pub(super) fn prompt(&self, place: &Place) -> Vec<u32> {
        match place.row {
            Some(row) => [&self.rows[row].prompt[..], &self.rows[row].completion.ids, &place.ids].concat(),
            None => place.ids.clone(),
        }
    }

    /// Returns an answer, and its form for the agent.
    ///
    /// # Errors
    /// The errors of the tokenizer; a chat template whose tool calls no parser reads.
    pub(super) fn answer(
        &mut self,
        place: Place,
        request: &ChatRequest,
        turn: Completion,
        tokenizer: &dyn Tokenizer,
        tools: &mut Tools<'_>,
    ) -> Result<(Answer, ChatReply)> {
        let text = tokenizer.decode(&turn.ids)?;
        let parsed = match &request.tools {
            Some(of_request) if request.calls_tools => tools.parse(&turn.ids, &text, of_request)?,
            _ => Parsed { content: text.clone(), calls: Vec::new() },
        };
        let calls = parsed.calls.len();
        let (message, read) = self.message(parsed, &text);
        let was_cut = turn.truncated;
        let finish_reason = match message.get("tool_calls") {
            _ if was_cut => "length",
            Some(_) => "tool_calls",
            None => "stop",
        };
        let texts = turn.ids.iter().map(|id| tokenizer.decode_with_special(&[*id]));
        let tokens = texts.zip(&turn.logps).map(|(text, logp)| Ok((text?, *logp))).collect::<Result<_>>()?;
        let prompt_tokens = self.prompt(&place).len();
        let (messages, tools) = (request.messages.clone(), request.tools.clone());
        let reply = ChatReply { message: message.clone(), finish_reason, prompt_tokens, tokens };
        Ok((Answer { place, turn, text, message, messages, tools, calls, failed_calls: calls - read }, reply))
    }

    /// Records an answer that was delivered.
    pub(super) fn record(&mut self, answer: Answer) {
        let Answer { place, turn, text, message, mut messages, tools, calls, failed_calls } = answer;
        self.text = text;
        self.turns += 1;
        self.calls += calls;
        self.failed_calls += failed_calls;
        self.calling_turns += usize::from(calls > 0);
        self.truncated |= turn.truncated && !place.is_limited;
        let index = place.row.unwrap_or(self.rows.len());
        match place.row {
            Some(_) => self.rows[index].completion.append_given(&place.ids),
            None => self.rows.push(Row { tools, prompt: place.ids, ..Row::default() }),
        }
        let row = &mut self.rows[index];
        row.completion.append(turn);
        messages.push(message);
        (row.messages, row.is_busy) = (messages, false);
        row.turns.push([row.messages.len(), row.completion.ids.len()]);
        self.last = index;
    }

    /// Drops an answer for which its agent did not wait. Its row can be continued as before.
    pub(super) fn drop_answer(&mut self, answer: &Answer) {
        if let Some(row) = answer.place.row {
            self.rows[row].is_busy = false;
        }
    }

    /// Returns the message of the assistant, and the number of tool calls in it. If no call can be read, it is the `text` as it is.
    fn message(&mut self, parsed: Parsed, text: &str) -> (Value, usize) {
        let Parsed { content, calls } = parsed;
        let count = calls.len();
        let calls: Vec<Value> = calls.into_iter().flatten().map(|call| call.to_message()).collect();
        if calls.is_empty() {
            let text = if count > 0 { text } else { &content };
            return (json!({"role": "assistant", "content": text}), 0);
        }
        let first = self.named_calls;
        self.named_calls += calls.len();
        let with_id = |(index, mut call): (usize, Value)| {
            // Mistral's templates expect nine characters.
            call["id"] = format!("call{:05}", first + index).into();
            call
        };
        let calls: Vec<Value> = calls.into_iter().enumerate().map(with_id).collect();
        let read = calls.len();
        (json!({"role": "assistant", "content": content, "tool_calls": calls}), read)
    }

    /// Returns the row of the last answer with all its messages, and the other rows; `None` without an answer.
    pub(super) fn into_rows(mut self) -> Option<(Row, Vec<Value>, Vec<Row>)> {
        if self.rows.is_empty() {
            return None;
        }
        let mut last = self.rows.remove(self.last);
        last.completion.truncated = self.truncated;
        self.rows.iter_mut().for_each(|row| row.completion.truncated = self.truncated);
        let messages = std::mem::take(&mut last.messages);
        Some((last, messages, self.rows))
    }
}

/// Returns a message with the result of a tool cut to `rollout.multi_turn.max_tool_response_length`.
fn cut(message: &Value, limits: &MultiTurnConfig) -> Value {
    let mut message = message.clone();
    if let ("tool", Some(text)) = (message["role"].as_str().unwrap_or_default(), message["content"].as_str()) {
        let text = limits.cut(text).into_owned();
        message["content"] = text.into();
    }
    message
}

fn too_long(what: &str, limit: usize, found: usize) -> ApiError {
    let message = format!("the conversation is too long: {what} is {limit} tokens, and the request needs {found}");
    ApiError::param("messages", message).with_code("context_length_exceeded")
}
