//! Requests and replies of the endpoint, in the form that all of its protocols share, and their errors.

use grpo_files::{long_integers_as_digits, mark_long_integers};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

/// The name of the model. A client may write any other name, too.
pub(crate) const MODEL: &str = "policy";

/// The maximum number of messages of a request.
const MOST_MESSAGES: usize = 4096;
/// The maximum number of tokens that a request may ask for.
const MOST_TOKENS: u64 = 1 << 32;
/// The maximum number of fields that are named in the log.
const MOST_NAMED: usize = 64;
/// The maximum number of characters of a value in a message.
const SHOWN: usize = 100;

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

/// The fields of a request that the run replaces, which the log names once.
#[derive(Default)]
pub(super) struct Named(Mutex<BTreeSet<String>>);

impl Named {
    fn log(&self, name: &str, message: &str) {
        let mut named = rewards::programs::lock(&self.0);
        let name: String = name.chars().filter(|c| !c.is_control()).take(SHOWN).collect();
        if named.len() < MOST_NAMED && named.insert(name.clone()) {
            tracing::warn!(
                "agents send `{name}` to rollout.endpoint: {message}; said once, and rollout.endpoint_strict refuses it"
            );
        }
    }
}

/// The fields of a request, and the rules for those that are not honoured.
pub(super) struct Fields<'a> {
    fields: Map<String, Value>,
    rules: &'a Rules,
    named: &'a Named,
}

impl<'a> Fields<'a> {
    /// Reads the body of a request.
    pub(super) fn read(body: &[u8], rules: &'a Rules, named: &'a Named) -> Result<Self, ApiError> {
        let text =
            std::str::from_utf8(body).map_err(|error| ApiError::new(400, format!("the body is no JSON: {error}")))?;
        let body: Value = serde_json::from_str(&mark_long_integers(text))
            .map_err(|error| ApiError::new(400, format!("the body is no JSON: {error}")))?;
        match body {
            Value::Object(fields) => Ok(Self { fields, rules, named }),
            _ => Err(ApiError::new(400, "the body must be a JSON object with `model`")),
        }
    }

    /// Returns a field that is not null.
    pub(super) fn get(&self, name: &str) -> Option<&Value> {
        self.fields.get(name).filter(|value| !value.is_null())
    }

    /// Checks the fields other than those that the protocol has `honoured`, and the name of the model.
    pub(super) fn check(&self, honoured: &[&str]) -> Result<(), ApiError> {
        let model = self.text("model")?.unwrap_or_default();
        if self.get("model").is_none() {
            return Err(expected("model", "the name of a model, such as \"policy\"", None));
        }
        if model != MODEL && !self.rules.is_strict {
            self.named.log("model", "every name is the policy of the run");
        }
        for (name, value) in self.fields.iter().filter(|(name, _)| !honoured.contains(&name.as_str())) {
            if is_off(name, value) || WITHOUT_EFFECT.contains(&name.as_str()) {
                continue;
            }
            if let Some(reason) = contradiction(name) {
                return Err(unsupported(name, reason));
            }
            self.replace(name, reason(name))?;
        }
        for (name, own) in [("temperature", self.rules.temperature), ("top_p", self.rules.top_p)] {
            if let Some(value) = self.get(name) {
                let asked = value.as_f64().ok_or_else(|| expected(name, "a number", Some(value)))?;
                if (asked - own).abs() > 1e-6 {
                    self.replace_sampling(name, &own.to_string())?;
                }
            }
        }
        Ok(())
    }

    /// Refuses a field with a strict endpoint, and names it in the log otherwise.
    pub(super) fn replace(&self, name: &str, reason: &str) -> Result<(), ApiError> {
        if self.rules.is_strict {
            return Err(unsupported(name, reason));
        }
        self.named.log(name, reason);
        Ok(())
    }

    /// Like [`Fields::replace`], for a value that differs from the run's.
    fn replace_sampling(&self, name: &str, own: &str) -> Result<(), ApiError> {
        if self.rules.is_strict {
            let message =
                format!("`{name}`: the run samples with rollout.{name}: {own}; leave it out, or send the same");
            return Err(ApiError::param(name, message).with_code("unsupported_value"));
        }
        self.named.log(name, &format!("the run samples with rollout.{name}: {own}"));
        Ok(())
    }

    /// Returns the stop texts of a request that the run does not have.
    pub(super) fn stop(&self, name: &str) -> Result<Vec<String>, ApiError> {
        let texts = match self.get(name) {
            None => Some(Vec::new()),
            Some(Value::String(text)) => Some(vec![text.clone()]),
            Some(Value::Array(list)) => list.iter().map(|text| text.as_str().map(str::to_owned)).collect(),
            Some(_) => None,
        };
        let texts = texts.ok_or_else(|| expected(name, "a text or a list of texts", self.get(name)))?;
        if self.rules.is_strict && !texts.is_empty() && texts != self.rules.stop {
            self.replace_sampling("stop", &format!("{:?}", self.rules.stop))?;
        }
        Ok(texts.into_iter().filter(|text| !text.is_empty() && !self.rules.stop.contains(text)).collect())
    }

    /// Returns a number of tokens, of at least 1.
    pub(super) fn count(&self, name: &str) -> Result<Option<usize>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_u64().filter(|count| (1..=MOST_TOKENS).contains(count)) {
            Some(count) => Ok(Some(count as usize)),
            None => Err(expected(name, "a whole number of at least 1", Some(value))),
        }
    }

    /// Returns true or false; without the field, false.
    pub(super) fn flag(&self, name: &str) -> Result<bool, ApiError> {
        match self.get(name) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            other => Err(expected(name, "true or false", other)),
        }
    }

    /// Returns a text.
    pub(super) fn text(&self, name: &str) -> Result<Option<&str>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            other => Err(expected(name, "a text", other)),
        }
    }

    /// Returns a list of 1 to 4096 messages.
    pub(super) fn list(&self, name: &str) -> Result<&[Value], ApiError> {
        match self.get(name) {
            Some(Value::Array(list)) if (1..=MOST_MESSAGES).contains(&list.len()) => Ok(list),
            other => Err(expected(name, "a list of 1 to 4096 messages", other)),
        }
    }

    /// Returns the tools of a request in OpenAI's form of chat completions. `function` reads one; `None` is a tool of the provider, which is left out.
    pub(super) fn tools(&self, function: impl Fn(&Value) -> Option<Value>) -> Result<Option<Value>, ApiError> {
        let list = match self.get("tools") {
            None => return Ok(None),
            Some(Value::Array(list)) => list,
            other => return Err(expected("tools", "a list of tools", other)),
        };
        let mut tools = Vec::new();
        for tool in list {
            match function(tool) {
                Some(tool) if tool["function"]["name"].is_string() => tools.push(tool),
                None if tool["type"].is_string() && tool["type"] != "function" => {
                    self.replace("tools", "a tool of the provider is left out, as the run has none")?;
                }
                _ => return Err(expected("tools", "a list of functions with a `name`", Some(tool))),
            }
        }
        Ok((!tools.is_empty()).then_some(tools.into()))
    }

    /// Returns whether the model may call tools, and must. `choice` is `auto`, `none`, `required` or the name of a tool.
    pub(super) fn tool_choice(&self, choice: Option<&str>) -> Result<[bool; 2], ApiError> {
        match choice {
            None | Some("auto") => Ok([true, false]),
            Some("none") => Ok([false, false]),
            Some(_) => {
                self.replace(
                    "tool_choice",
                    "the model is not forced to call a tool; answers without a call are counted",
                )?;
                Ok([true, true])
            }
        }
    }

    /// Returns the keys of the JSON that a request expects, if it does. `format` is `response_format`, and `schema` the schema in it.
    pub(super) fn json(
        &self,
        name: &str,
        format: Option<&Value>,
        schema: &Value,
    ) -> Result<Option<Vec<String>>, ApiError> {
        let kind = format.map(|format| format["type"].as_str().unwrap_or_default());
        match kind {
            None | Some("text") => Ok(None),
            Some("json_object" | "json_schema") => {
                self.replace(name, "sampling is not constrained; answers that are no such JSON are counted")?;
                let required = schema["required"].as_array().into_iter().flatten();
                Ok(Some(required.filter_map(|key| key.as_str().map(str::to_owned)).collect()))
            }
            Some(_) => Err(expected(name, "the type text, json_object or json_schema", format)),
        }
    }
}

/// Fields that do not change what the model writes.
const WITHOUT_EFFECT: [&str; 14] = [
    "model",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "temperature",
    "top_p",
    "stream",
    "stream_options",
    "include",
    "truncation",
    "prompt_cache_retention",
];

/// Returns `true` if a value switches its field off.
fn is_off(name: &str, value: &Value) -> bool {
    match name {
        _ if value.is_null() => true,
        "return_token_ids" | "background" | "echo" => *value == json!(false),
        "n" | "best_of" => *value == json!(1),
        "top_logprobs" | "frequency_penalty" | "presence_penalty" => value.as_f64() == Some(0.0),
        "parallel_tool_calls" => *value == json!(true),
        "logit_bias" => *value == json!({}),
        "modalities" => *value == json!(["text"]),
        _ => false,
    }
}

/// Returns the reason why a field is refused also by an endpoint that is not strict: the answer would be another thing than asked for.
fn contradiction(name: &str) -> Option<&'static str> {
    match name {
        "n" | "best_of" => Some("a request has one completion; send it again for another one"),
        "functions" | "function_call" => Some("`tools` and `tool_choice` have replaced it"),
        "modalities" | "audio" => Some("the model writes text"),
        "echo" | "suffix" => Some("the answer is the text behind the prompt"),
        "previous_response_id" | "conversation" => Some("the endpoint keeps no responses: send all items in `input`"),
        "background" => Some("a response is complete when it comes"),
        _ => None,
    }
}

/// Returns the reason why a field is not honoured.
fn reason(name: &str) -> &'static str {
    match name {
        "seed" => "the run's `seed` chooses the samples",
        "top_logprobs" => "only sampled tokens have log-probabilities",
        "frequency_penalty" | "presence_penalty" | "repetition_penalty" | "logit_bias" | "top_k" | "min_p" => {
            "the section `rollout` says how the run samples"
        }
        "parallel_tool_calls" => "the model may write several calls",
        _ => "the endpoint does not have it",
    }
}

fn unsupported(name: &str, reason: &str) -> ApiError {
    let off = match name {
        "n" | "best_of" => ", or send 1",
        "top_logprobs" | "frequency_penalty" | "presence_penalty" => ", or send 0",
        "parallel_tool_calls" => ", or send true",
        "response_format" => ", or send {\"type\":\"text\"}",
        "tool_choice" => ", or send \"auto\" or \"none\"",
        _ => "",
    };
    let name: String = name.chars().filter(|c| !c.is_control()).take(SHOWN).collect();
    ApiError::param(name.clone(), format!("`{name}` is not supported: {reason}; leave it out{off}"))
        .with_code("unsupported_parameter")
}

/// Returns the error for a field with another value than `what`.
pub(super) fn expected(param: impl Into<String>, what: &str, found: Option<&Value>) -> ApiError {
    let param = param.into();
    let found = found.map_or_else(|| "nothing".into(), |found| long_integers_as_digits(found.to_string()));
    let found: String = found.chars().take(SHOWN).collect();
    let message = format!("`{param}`: expected {what}, got {found}");
    ApiError::param(param, message)
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
