//! The requests, responses and errors of OpenAI's API of chat completions.
//!
//! A field is honoured, has no effect ([`WITHOUT_EFFECT`]), or has a value that means "off" (`check_field`). Any other field or value is refused by
//! name: nothing that a client asks for is ignored.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::time::{SystemTime, UNIX_EPOCH};

/// The name of the model. A client may write any other name, too.
pub(crate) const MODEL: &str = "policy";

/// The maximum number of messages of a request.
const MOST_MESSAGES: usize = 4096;
/// The maximum number of tokens that a request may ask for.
const MOST_TOKENS: u64 = 1 << 32;

/// Fields that are read.
const HONOURED: [&str; 11] = [
    "model",
    "messages",
    "tools",
    "tool_choice",
    "temperature",
    "top_p",
    "stop",
    "max_tokens",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
];
/// Fields that do not change what the model writes.
const WITHOUT_EFFECT: [&str; 6] =
    ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"];

/// An error in OpenAI's form.
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

    pub(super) fn body(&self) -> Value {
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
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChatRequest {
    /// The messages: `role` (`system`, `user`, `assistant` or `tool`), `content`, a text; if they have them `tool_calls`, with arguments as an
    /// object, `tool_call_id` and `name`.
    pub messages: Vec<Value>,
    /// The tools that the model may call, a list of functions as JSON schemas.
    pub tools: Option<Value>,
    /// `false` if `tool_choice` is `none`: the text is not searched for calls.
    pub calls_tools: bool,
    /// The temperature that the client expects.
    pub temperature: Option<f64>,
    /// The `top_p` that the client expects.
    pub top_p: Option<f64>,
    /// The stop texts that the client expects.
    pub stop: Option<Vec<String>>,
    /// The maximum number of tokens of the message.
    pub max_tokens: Option<usize>,
    /// `true` if the response has the log-probabilities of the tokens.
    pub logprobs: bool,
}

/// A message of the assistant for a client.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatReply {
    /// The message, as in [`ChatRequest::messages`]; its tool calls have an `id`.
    pub message: Value,
    /// `stop`, `length` or `tool_calls`.
    pub finish_reason: &'static str,
    /// The number of tokens before the message.
    pub prompt_tokens: usize,
    /// The text and the log-probability (nats) of each token of the message.
    pub tokens: Vec<(String, f32)>,
}

impl ChatRequest {
    /// Reads the body of a request.
    pub(super) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let body: Value = serde_json::from_slice(body)
            .map_err(|error| ApiError::new(400, format!("the body is no JSON: {error}")))?;
        let Value::Object(fields) = body else {
            return Err(ApiError::new(400, "the body must be a JSON object with `model` and `messages`"));
        };
        for (name, value) in &fields {
            check_field(name, value)?;
        }
        let field = |name: &str| fields.get(name).filter(|value| !value.is_null());
        if !field("model").is_some_and(Value::is_string) {
            return Err(expected("model", "the name of a model, such as \"policy\"", field("model")));
        }
        let messages = match field("messages") {
            Some(Value::Array(list)) if (1..=MOST_MESSAGES).contains(&list.len()) => list,
            other => return Err(expected("messages", "a list of 1 to 4096 messages", other)),
        };
        let messages: Vec<Value> =
            messages.iter().enumerate().map(|(index, value)| message(index, value)).collect::<Result<_, _>>()?;
        if messages.last().is_some_and(|last| last["role"] == "assistant") {
            let last = format!("messages[{}].role", messages.len() - 1);
            return Err(ApiError::param(last, "the last message must be one of the user, a tool or the system"));
        }
        let tools = match field("tools") {
            None => None,
            Some(Value::Array(list)) if list.is_empty() => None,
            Some(tools) if tools.as_array().is_some_and(|list| list.iter().all(is_tool)) => Some(tools.clone()),
            other => {
                return Err(expected(
                    "tools",
                    "a list of {\"type\": \"function\", \"function\": {\"name\": ...}}",
                    other,
                ));
            }
        };
        let calls_tools = match field("tool_choice") {
            None => true,
            Some(Value::String(choice)) if choice == "auto" => true,
            Some(Value::String(choice)) if choice == "none" => false,
            other => {
                return Err(expected(
                    "tool_choice",
                    "\"auto\" or \"none\": the model is not forced to call a tool",
                    other,
                ));
            }
        };
        let number = |name: &str| match field(name) {
            None => Ok(None),
            Some(value) => value.as_f64().map(Some).ok_or_else(|| expected(name, "a number", Some(value))),
        };
        let count = |name: &str| match field(name) {
            None => Ok(None),
            Some(value) => match value.as_u64().filter(|count| (1..=MOST_TOKENS).contains(count)) {
                Some(count) => Ok(Some(count as usize)),
                None => Err(expected(name, "a whole number of at least 1", Some(value))),
            },
        };
        let limits = [count("max_tokens")?, count("max_completion_tokens")?];
        let logprobs = match field("logprobs") {
            None => false,
            Some(Value::Bool(logprobs)) => *logprobs,
            other => return Err(expected("logprobs", "true or false", other)),
        };
        Ok(Self {
            messages,
            tools,
            calls_tools,
            temperature: number("temperature")?,
            top_p: number("top_p")?,
            stop: field("stop").map(stop).transpose()?,
            max_tokens: limits.into_iter().flatten().min(),
            logprobs,
        })
    }
}

/// Refuses a field that the endpoint does not have.
fn check_field(name: &str, value: &Value) -> Result<(), ApiError> {
    let off: &[Value] = &[
        json!(null),
        match name {
            "stream" | "return_token_ids" => json!(false),
            "n" => json!(1),
            "top_logprobs" | "frequency_penalty" | "presence_penalty" => json!(0),
            "parallel_tool_calls" => json!(true),
            "logit_bias" => json!({}),
            "response_format" => json!({"type": "text"}),
            "modalities" => json!(["text"]),
            _ => json!(null),
        },
    ];
    let is_off = off.contains(value) || (off[1] == json!(0) && value.as_f64() == Some(0.0));
    if is_off || WITHOUT_EFFECT.contains(&name) || (HONOURED.contains(&name) && name != "top_logprobs") {
        return Ok(());
    }
    let reason = match name {
        "stream" => "responses are not streamed",
        "n" => "a request has one completion; send it again for another one",
        "seed" => "the run's `seed` chooses the samples",
        "top_logprobs" => "only sampled tokens have log-probabilities",
        "functions" | "function_call" => "`tools` and `tool_choice` have replaced it",
        _ => "the endpoint does not have it, and it may change what the model writes",
    };
    let only = if off[1].is_null() { "leave it out".to_owned() } else { format!("leave it out, or send {}", off[1]) };
    Err(ApiError::param(name, format!("`{name}` is not supported: {reason}; {only}"))
        .with_code("unsupported_parameter"))
}

fn expected(param: impl Into<String>, what: &str, found: Option<&Value>) -> ApiError {
    let param = param.into();
    let found: String = found.map_or_else(|| "nothing".into(), Value::to_string).chars().take(100).collect();
    let message = format!("`{param}`: expected {what}, got {found}");
    ApiError::param(param, message)
}

fn is_tool(tool: &Value) -> bool {
    tool["type"] == "function" && tool["function"]["name"].is_string()
}

fn stop(value: &Value) -> Result<Vec<String>, ApiError> {
    let texts = match value {
        Value::String(text) => Some(vec![text.clone()]),
        Value::Array(list) => list.iter().map(|text| text.as_str().map(str::to_owned)).collect(),
        _ => None,
    };
    texts.ok_or_else(|| expected("stop", "a text or a list of texts", Some(value)))
}

/// Returns a message with the fields that a chat template may read.
fn message(index: usize, value: &Value) -> Result<Value, ApiError> {
    let at = |field: &str| format!("messages[{index}].{field}");
    let role = match value["role"].as_str() {
        Some("developer") => "system",
        Some(role) if ["system", "user", "assistant", "tool"].contains(&role) => role,
        _ => return Err(expected(at("role"), "system, developer, user, assistant or tool", value.get("role"))),
    };
    let calls = match value.get("tool_calls").filter(|calls| !calls.is_null()) {
        Some(Value::Array(list)) if role == "assistant" => {
            let call = |(i, call)| tool_call(&at(&format!("tool_calls[{i}]")), call);
            list.iter().enumerate().map(call).collect::<Result<Vec<_>, _>>()?
        }
        None => Vec::new(),
        other => return Err(expected(at("tool_calls"), "a list of calls, of the assistant", other)),
    };
    let content = match value.get("content") {
        None | Some(Value::Null) if role == "assistant" => String::new(),
        Some(content) => {
            text(content).ok_or_else(|| expected(at("content"), "a text, or a list of texts", Some(content)))?
        }
        None => return Err(expected(at("content"), "a text", None)),
    };
    let mut message = json!({"role": role, "content": content});
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    for name in ["tool_call_id", "name"] {
        match value.get(name) {
            None | Some(Value::Null) => {}
            Some(text @ Value::String(_)) => message[name] = text.clone(),
            other => return Err(expected(at(name), "a text", other)),
        }
    }
    Ok(message)
}

/// Returns the text of a content: a text, or a list of parts that are texts.
fn text(content: &Value) -> Option<String> {
    let part = |part: &Value| part["text"].as_str().filter(|_| part["type"] == "text").map(str::to_owned);
    match content {
        Value::String(text) => Some(text.clone()),
        Value::Array(parts) => parts.iter().map(part).collect(),
        _ => None,
    }
}

/// Returns a call with its arguments as an object, as chat templates expect it.
fn tool_call(at: &str, call: &Value) -> Result<Value, ApiError> {
    let function = &call["function"];
    let Some(name) = function["name"].as_str() else {
        return Err(expected(format!("{at}.function.name"), "the name of a tool", function.get("name")));
    };
    let arguments = match &function["arguments"] {
        Value::String(text) if text.is_empty() => Some(Map::new()),
        Value::String(text) => serde_json::from_str(text).ok(),
        Value::Object(arguments) => Some(arguments.clone()),
        _ => None,
    };
    let Some(arguments) = arguments else {
        return Err(expected(format!("{at}.function.arguments"), "a JSON object as text", function.get("arguments")));
    };
    let mut result = json!({"type": "function", "function": {"name": name, "arguments": arguments}});
    if let Some(id) = call["id"].as_str() {
        result["id"] = id.into();
    }
    Ok(result)
}

impl ChatReply {
    /// Returns the body of the response number `number`.
    pub(super) fn body(&self, number: u64, logprobs: bool) -> Value {
        let mut message = json!({"role": "assistant", "content": self.message["content"], "refusal": null});
        if let Some(calls) = self.message["tool_calls"].as_array() {
            if message["content"] == "" {
                message["content"] = Value::Null;
            }
            let as_text = |call: &Value| {
                let mut call = call.clone();
                call["function"]["arguments"] = call["function"]["arguments"].to_string().into();
                call
            };
            message["tool_calls"] = calls.iter().map(as_text).collect();
        }
        let logprobs = if logprobs { json!({"content": self.logprobs(), "refusal": null}) } else { Value::Null };
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let (prompt, completion) = (self.prompt_tokens, self.tokens.len());
        json!({
            "id": format!("chatcmpl-{number}"),
            "object": "chat.completion",
            "created": created,
            "model": MODEL,
            "choices": [{"index": 0, "message": message, "logprobs": logprobs, "finish_reason": self.finish_reason}],
            "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
        })
    }

    fn logprobs(&self) -> Vec<Value> {
        let entry = |(token, logp): &(String, f32)| {
            // A token that is a part of a character has no text of its own.
            let bytes = if token.contains(char::REPLACEMENT_CHARACTER) { Value::Null } else { json!(token.as_bytes()) };
            json!({"token": token, "logprob": logp, "bytes": bytes, "top_logprobs": []})
        };
        self.tokens.iter().map(entry).collect()
    }
}

/// Returns the description of the model, for `/v1/models`.
pub(super) fn model() -> Value {
    json!({"id": MODEL, "object": "model", "created": 0, "owned_by": "grpo"})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(change: Value) -> Result<ChatRequest, ApiError> {
        let mut body = json!({"model": "policy", "messages": [{"role": "user", "content": "Hi"}]});
        for (name, value) in change.as_object().unwrap() {
            body[name] = value.clone();
        }
        ChatRequest::parse(body.to_string().as_bytes())
    }

    #[test]
    fn fields_that_would_be_ignored_are_refused_by_name() {
        for (change, param, words) in [
            (json!({"stream": true}), "stream", "not streamed"),
            (json!({"n": 2}), "n", "one completion"),
            (json!({"seed": 1}), "seed", "the run's `seed`"),
            (json!({"top_logprobs": 3}), "top_logprobs", "only sampled tokens"),
            (json!({"frequency_penalty": 0.5}), "frequency_penalty", "not supported"),
            (json!({"logit_bias": {"7": 1}}), "logit_bias", "not supported"),
            (json!({"response_format": {"type": "json_object"}}), "response_format", "send {\"type\":\"text\"}"),
            (json!({"parallel_tool_calls": false}), "parallel_tool_calls", "send true"),
            (json!({"functions": []}), "functions", "`tools`"),
            (json!({"best_of": 2}), "best_of", "leave it out"),
            (json!({"tool_choice": "required"}), "tool_choice", "\"auto\" or \"none\""),
            (json!({"tools": [{"name": "f"}]}), "tools", "expected a list of"),
            (json!({"max_tokens": 0}), "max_tokens", "at least 1"),
            (json!({"temperature": "hot"}), "temperature", "a number"),
            (json!({"stop": 3}), "stop", "a text or a list of texts"),
            (json!({"logprobs": 1}), "logprobs", "true or false"),
            (json!({"model": null}), "model", "the name of a model"),
            (json!({"messages": []}), "messages", "a list of 1 to 4096"),
            (json!({"messages": [{"role": "robot", "content": "x"}]}), "messages[0].role", "developer"),
            (json!({"messages": [{"role": "user"}]}), "messages[0].content", "got nothing"),
            (
                json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
                "messages[0].content",
                "texts",
            ),
            (json!({"messages": [{"role": "assistant", "content": "x"}]}), "messages[0].role", "the last message"),
            (
                json!({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}),
                "messages[0].tool_calls[0].function.arguments",
                "a JSON object",
            ),
        ] {
            let error = parse(change.clone()).unwrap_err();
            assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{change}");
            assert!(error.message.contains(words), "{}", error.message);
            assert_eq!(error.body()["error"]["type"], "invalid_request_error");
        }
        for body in ["", "{", "[]", "\"x\"", "{\"model\": \"m\"}"] {
            assert_eq!(ChatRequest::parse(body.as_bytes()).unwrap_err().status, 400, "{body}");
        }
    }

    #[test]
    fn values_that_mean_off_and_fields_without_effect_are_read() {
        let off = json!({
            "stream": false, "n": 1, "seed": null, "frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}, "top_logprobs": 0,
            "parallel_tool_calls": true, "response_format": {"type": "text"}, "user": "me", "metadata": {"a": "b"}, "tools": [],
        });
        assert_eq!(parse(off).unwrap(), parse(json!({})).unwrap());
        let request = parse(json!({
            "max_tokens": 9, "max_completion_tokens": 7, "temperature": 1, "top_p": 0.5, "stop": "x", "logprobs": true, "tool_choice": "none",
        }))
        .unwrap();
        assert_eq!((request.max_tokens, request.temperature, request.top_p), (Some(7), Some(1.0), Some(0.5)));
        assert_eq!((request.stop, request.logprobs, request.calls_tools), (Some(vec!["x".into()]), true, false));
    }

    #[test]
    fn a_message_that_a_client_sends_back_equals_the_message_of_the_reply() {
        let call = json!({"type": "function", "function": {"name": "add", "arguments": {"a": 0.1, "b": [1]}}, "id": "call00001"});
        for message in [
            json!({"role": "assistant", "content": "", "tool_calls": [call]}),
            json!({"role": "assistant", "content": "I add.", "tool_calls": [call]}),
            json!({"role": "assistant", "content": "4"}),
        ] {
            let reply = ChatReply {
                message: message.clone(),
                finish_reason: "stop",
                prompt_tokens: 3,
                tokens: vec![("4".into(), -0.5), ("\u{fffd}".into(), -1.0)],
            };
            let body = reply.body(1, true);
            assert_eq!(body["usage"]["total_tokens"], 5);
            assert_eq!(body["choices"][0]["logprobs"]["content"][0]["bytes"], json!([52]));
            assert_eq!(body["choices"][0]["logprobs"]["content"][1]["bytes"], Value::Null);
            assert_eq!(reply.body(1, false)["choices"][0]["logprobs"], Value::Null);
            // As clients send it: with the other fields of the response.
            let mut back = body["choices"][0]["message"].clone();
            back["annotations"] = json!([]);
            let request =
                parse(json!({"messages": [back, {"role": "user", "content": [{"type": "text", "text": "Go on."}]}]}))
                    .unwrap();
            assert_eq!(request.messages, [message, json!({"role": "user", "content": "Go on."})]);
        }
    }
}
