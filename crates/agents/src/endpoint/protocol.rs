//! Parsed requests and bodies of responses, for the files of all protocols.

use super::events::Body;
use super::fields::expected;
use super::request::{ApiError, ChatReply, ChatRequest};
use grpo_files::{long_integers_as_digits, mark_long_integers};
use serde_json::{Map, Value, json};
use std::time::{SystemTime, UNIX_EPOCH};

/// A request, and the function that writes its response.
pub(super) struct Parsed {
    pub(super) request: ChatRequest,
    pub(super) render: Render,
}

/// Writes a reply as the response with a number.
pub(super) type Render = Box<dyn FnOnce(&ChatReply, u64) -> Body>;

impl ApiError {
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
