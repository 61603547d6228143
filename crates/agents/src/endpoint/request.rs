//! Requests and replies of the endpoint, in the form that all of its protocols share, and their errors.

use super::fields::expected;
use grpo_files::{long_integers_as_digits, mark_long_integers};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::time::{SystemTime, UNIX_EPOCH};

/// The name of the model. A client may write any other name, too.
pub(crate) const MODEL: &str = "policy";

/// The sampling of the run, which a request does not change.
#[derive(Clone, Debug)]
pub struct Rules {
    /// `rollout.temperature`.
    pub temperature: f64,
    /// `rollout.top_p`.
    pub top_p: f64,
    /// `rollout.stop`.
    pub stop: Vec<String>,
    /// `rollout.endpoint_strict`: `true` if fields that would not be honoured are refused.
    pub is_strict: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self { temperature: 1.0, top_p: 1.0, stop: Vec::new(), is_strict: false }
    }
}

/// An error of the endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// The status of the response.
    pub status: u16,
    /// The text for users.
    pub message: String,
    /// The field of the request that is wrong.
    pub param: Option<String>,
    /// The name of the error.
    pub code: Option<&'static str>,
}

impl ApiError {
    /// Returns an error with a status and a message.
    pub fn new(status: u16, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None }
    }

    /// Returns an error about a field of the request, with status 400.
    pub fn param(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(400, message) }
    }

    /// Returns the error with the name `code`.
    #[must_use]
    pub fn with_code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// Returns the error in OpenAI's form.
    pub(super) fn openai(&self) -> Value {
        let kind = match self.status {
            401 => "authentication_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }
}

/// A request for the next message of the assistant.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatRequest {
    /// The messages: `role` (`system`, `user`, `assistant` or `tool`), `content`, a text; if they have them `tool_calls`, with arguments as an
    /// object, `tool_call_id` and `name`.
    pub messages: Vec<Value>,
    /// The tools that the model may call, a list of functions as JSON schemas.
    pub tools: Option<Value>,
    /// `false` if the text is not searched for calls.
    pub calls_tools: bool,
    /// `true` if the client expects at least one tool call.
    pub requires_call: bool,
    /// `true` if the client expects JSON, with these keys at the top if there are any.
    pub json: Option<Vec<String>>,
    /// Texts at which the answer ends, in addition to those of the run; it does not contain them.
    pub stop: Vec<String>,
    /// The maximum number of tokens of the message.
    pub max_tokens: Option<usize>,
    /// `true` if the text of the only message is the prompt, without the chat template.
    pub is_text: bool,
    /// `true` if only the number of tokens before the answer is asked for.
    pub counts_only: bool,
}

/// A message of the assistant for a client.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatReply {
    /// The message, as in [`ChatRequest::messages`]; its tool calls have an `id`.
    pub message: Value,
    /// `stop`, `length` or `tool_calls`.
    pub finish_reason: &'static str,
    /// The text of [`ChatRequest::stop`] that has ended the message.
    pub stop: Option<String>,
    /// The number of tokens before the message.
    pub prompt_tokens: usize,
    /// The text and the log-probability (nats) of each token of the message.
    pub tokens: Vec<(String, f32)>,
}

impl ChatReply {
    /// Returns the text of the message.
    pub(super) fn text(&self) -> &str {
        self.message["content"].as_str().unwrap_or_default()
    }

    /// Returns the id, the name and the arguments as text of each tool call.
    pub(super) fn calls<'a>(&'a self) -> Vec<(&'a str, &'a str, String)> {
        let calls = self.message["tool_calls"].as_array().into_iter().flatten();
        let call = |call: &'a Value| {
            let function = &call["function"];
            let [id, name] = [&call["id"], &function["name"]].map(|text| text.as_str().unwrap_or_default());
            (id, name, long_integers_as_digits(function["arguments"].to_string()))
        };
        calls.map(call).collect()
    }
}

/// Returns the seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Splits a text into pieces, as a model that writes would send it.
pub(super) fn pieces(text: &str) -> Vec<String> {
    const PIECE: usize = 32;
    let characters: Vec<char> = text.chars().collect();
    characters.chunks(PIECE).map(|piece| piece.iter().collect()).collect()
}

/// Returns the text of a content: a text, or a list of parts that are texts of one of the types `kinds`.
pub(super) fn text_of(content: &Value, kinds: &[&str]) -> Option<String> {
    let part = |part: &Value| {
        part["text"].as_str().filter(|_| kinds.iter().any(|kind| part["type"] == *kind)).map(str::to_owned)
    };
    match content {
        Value::String(text) => Some(text.clone()),
        Value::Array(parts) => parts.iter().map(part).collect(),
        _ => None,
    }
}

/// Returns a call with its arguments as an object, as chat templates expect it. `arguments` are an object, or its text.
pub(super) fn tool_call(at: &str, id: &Value, name: &Value, arguments: &Value) -> Result<Value, ApiError> {
    let Some(name) = name.as_str() else {
        return Err(expected(format!("{at}.name"), "the name of a tool", Some(name)));
    };
    let object = match arguments {
        Value::String(text) if text.is_empty() => Some(Map::new()),
        Value::String(text) => serde_json::from_str(&mark_long_integers(text)).ok(),
        Value::Object(arguments) => Some(arguments.clone()),
        _ => None,
    };
    let Some(object) = object else {
        return Err(expected(format!("{at}.arguments"), "a JSON object as text", Some(arguments)));
    };
    let mut result = json!({"type": "function", "function": {"name": name, "arguments": object}});
    if let Some(id) = id.as_str() {
        result["id"] = id.into();
    }
    Ok(result)
}

/// Checks that the last message is not the assistant's.
pub(super) fn check_last(messages: &[Value], param: &str) -> Result<(), ApiError> {
    if messages.last().is_some_and(|last| last["role"] == "assistant") {
        let last = format!("{param}[{}].role", messages.len() - 1);
        return Err(ApiError::param(last, "the last message must be one of the user, a tool or the system"));
    }
    Ok(())
}
