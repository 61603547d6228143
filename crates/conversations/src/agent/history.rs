//! The rows of a conversation that an agent holds.
//!
//! A request that repeats the messages of a row and adds some continues the row: the tokens so far stay, and those of the new messages follow
//! with mask 0. Any other request begins a row of its own, as in prime-rl and AReaL. Its prompt has the tokens of the longest beginning that a row
//! has, too, up to a message of the assistant: sampled tokens are never encoded again, and each is trained on in one row only.

use crate::conversation::Tools;
use crate::{Result, encode_prompt, exceeds};
use grpo_agents::Parsed;
use grpo_agents::endpoint::{ApiError, ChatReply, ChatRequest};
use grpo_data::Prompt;
use grpo_models::{Tokenizer, with_names};
use grpo_policy::Completion;
use grpo_run_config::MultiTurnConfig;
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
    /// `true` if the prompt is a text without the chat template. Such a row is not continued.
    is_text: bool,
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
    /// The number of answers without the tool call or the JSON that their request expects.
    pub(super) unmet: usize,
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
    is_text: bool,
    /// `true` if it lacks the tool call or the JSON that the request expects.
    is_unmet: bool,
}

/// Returns the number of tokens before the answer to a request, as a reply without a message.
///
/// # Errors
/// The error for the agent if the request is too long, or the chat template refuses its messages.
pub(super) fn count(
    request: &ChatRequest,
    tokenizer: &dyn Tokenizer,
    tools: &mut Tools<'_>,
    limits: Limits<'_>,
) -> Result<ChatReply, ApiError> {
    check_bytes(&request.messages, limits)?;
    let ids = encode(request, request.messages.clone(), tokenizer, tools)?;
    Ok(ChatReply { prompt_tokens: ids.len(), finish_reason: "stop", ..ChatReply::default() })
}

/// Refuses messages that cannot fit, before they are encoded.
fn check_bytes(messages: &[Value], limits: Limits<'_>) -> Result<(), ApiError> {
    let context = limits.prompt.saturating_add(limits.completion);
    match exceeds(messages, context) {
        None => Ok(()),
        Some(least) => Err(too_long("the context of the run", context, &format!("at least {least}"))),
    }
}

/// Encodes the messages of a request, of a row of its own.
fn encode(
    request: &ChatRequest,
    mut messages: Vec<Value>,
    tokenizer: &dyn Tokenizer,
    tools: &mut Tools<'_>,
) -> Result<Vec<u32>, ApiError> {
    let has_results = !request.is_text && messages.iter().any(|message| message["role"] == "tool");
    // A template that is no good for conversations may still render this one.
    if has_results && let Ok(turns) = tools.turns(request.tools.as_ref(), "tool") {
        let calls: Vec<Value> =
            messages.iter().filter_map(|message| message["tool_calls"].as_array()).flatten().cloned().collect();
        with_names(&mut messages, &calls);
        return turns.whole(tokenizer, &messages, None).map_err(|error| refused(&error));
    }
    let prompt = match (request.is_text, messages.first()) {
        (true, Some(message)) => Prompt::Rendered(message["content"].as_str().unwrap_or_default().into()),
        _ => Prompt::Messages { messages, tools: request.tools.clone(), documents: None },
    };
    encode_prompt(tokenizer, &prompt).map_err(|error| refused(&error))
}

fn refused(error: &dyn std::fmt::Display) -> ApiError {
    ApiError::param("messages", format!("the chat template of the run refuses them: {error}"))
}

/// Ends a turn with the token that completes one of the texts `stop`, as if it had been sampled with them, and returns the text.
fn end_at_stop<'a>(turn: &mut Completion, stop: &'a [String], tokenizer: &dyn Tokenizer) -> Result<Option<&'a String>> {
    let found = |text: &str| stop.iter().find(|stop| text.contains(stop.as_str()));
    if stop.is_empty() || found(&tokenizer.decode(&turn.ids)?).is_none() {
        return Ok(None);
    }
    for length in 1..=turn.ids.len() {
        if let Some(stop) = found(&tokenizer.decode(&turn.ids[..length])?) {
            turn.truncate(length);
            turn.truncated = false;
            return Ok(Some(stop));
        }
    }
    Ok(None)
}

/// Returns `true` if a text is JSON with these keys.
fn is_json(text: &str, keys: &[String]) -> bool {
    serde_json::from_str::<Value>(text).is_ok_and(|value| keys.iter().all(|key| value.get(key).is_some()))
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
        let calls = request.messages[..known].last().and_then(|message| message["tool_calls"].as_array());
        let calls = calls.map_or(&[][..], Vec::as_slice);
        let mut new: Vec<Value> =
            request.messages[known..].iter().map(|message| cut(message, limits.multi_turn)).collect();
        check_bytes(&new, limits).inspect_err(|_| self.truncated = true)?;
        with_names(&mut new, calls);
        let Some((row, turn)) = beginning else {
            let ids = encode(request, new, tokenizer, tools)?;
            return self.new_row(ids, request, limits);
        };
        let found = &self.rows[row];
        let length = found.turns[turn][1];
        let last = found.completion.ids[..length].last().copied().unwrap_or_default();
        let role = new.first().and_then(|message| message["role"].as_str()).unwrap_or("user");
        let turns = tools.turns(request.tools.as_ref(), role).map_err(|error| refused(&error))?;
        let row_ids = [&found.prompt[..], &found.completion.ids[..length]].concat();
        let between = if turns.rewrites() {
            let messages = request.messages.iter().map(|message| cut(message, limits.multi_turn)).collect();
            let whole = encode(request, messages, tokenizer, tools)?;
            match whole.strip_prefix(&row_ids[..]) {
                Some(between) if !between.is_empty() => between.to_vec(),
                _ => return self.new_row(whole, request, limits),
            }
        } else {
            turns
                .following(tokenizer, last, if role == "tool" { calls } else { &[] }, &new)
                .map_err(|error| refused(&error))?
        };
        if found.is_busy || turn + 1 < found.turns.len() {
            return self.new_row([row_ids, between].concat(), request, limits);
        }
        let room = limits.completion.saturating_sub(length + between.len());
        if room == 0 {
            self.truncated = true;
            let found = (length + between.len() + 1).to_string();
            return Err(too_long("rollout.max_completion_length", limits.completion, &found));
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
            !(row.is_text || request.is_text)
                && row.tools == request.tools
                && next.is_some_and(|next| next["role"] != "assistant")
                && request.messages[..messages] == row.messages[..messages]
        };
        let last_repeated = |(index, row): (usize, &Row)| {
            let turn = row.turns.iter().rposition(|[messages, _]| repeats(row, *messages))?;
            // Of several rows with the same beginning, one that can be continued.
            let can_continue = turn + 1 == row.turns.len() && !row.is_busy;
            Some((row.turns[turn][0], can_continue, (index, turn)))
        };
        let best =
            self.rows.iter().enumerate().filter_map(last_repeated).max_by_key(|(messages, can, _)| (*messages, *can));
        best.map(|(.., found)| found)
    }

    fn new_row(&mut self, prompt: Vec<u32>, request: &ChatRequest, limits: Limits<'_>) -> Result<Place, ApiError> {
        if prompt.len() > limits.prompt {
            self.truncated = true;
            return Err(too_long(
                "data.max_prompt_length, or the context without rollout.max_completion_length",
                limits.prompt,
                &prompt.len().to_string(),
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
        mut turn: Completion,
        tokenizer: &dyn Tokenizer,
        tools: &mut Tools<'_>,
    ) -> Result<(Answer, ChatReply)> {
        let stop = end_at_stop(&mut turn, &request.stop, tokenizer)?.cloned();
        let mut text = tokenizer.decode(&turn.ids)?;
        let mut parsed = match &request.tools {
            Some(request_tools) if request.calls_tools => tools.parse(&turn.ids, &text, request_tools)?,
            _ => Parsed { content: text.clone(), calls: Vec::new() },
        };
        if let Some(stop) = &stop {
            for text in [&mut text, &mut parsed.content] {
                text.truncate(text.find(stop).unwrap_or(text.len()));
            }
        }
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
        let content = message["content"].as_str().unwrap_or_default();
        let is_unmet = (request.requires_call && read == 0)
            || request.json.as_ref().is_some_and(|keys| read == 0 && !is_json(content, keys));
        let reply = ChatReply { message: message.clone(), finish_reason, stop, prompt_tokens, tokens };
        let (failed_calls, is_text) = (calls - read, request.is_text);
        Ok((Answer { place, turn, text, message, messages, tools, calls, failed_calls, is_text, is_unmet }, reply))
    }

    /// Records an answer that was delivered.
    pub(super) fn record(&mut self, answer: Answer) {
        let Answer { place, turn, text, message, mut messages, tools, calls, failed_calls, is_text, is_unmet } = answer;
        self.unmet += usize::from(is_unmet);
        self.text = text;
        self.turns += 1;
        self.calls += calls;
        self.failed_calls += failed_calls;
        self.calling_turns += usize::from(calls > 0);
        self.truncated |= turn.truncated && !place.is_limited;
        let index = place.row.unwrap_or(self.rows.len());
        match place.row {
            Some(_) => self.rows[index].completion.append_given(&place.ids),
            None => self.rows.push(Row { tools, prompt: place.ids, is_text, ..Row::default() }),
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

fn too_long(what: &str, limit: usize, found: &str) -> ApiError {
    let message = format!("the conversation is too long: {what} is {limit} tokens, and the request needs {found}");
    ApiError::param("messages", message).with_code("context_length_exceeded")
}
