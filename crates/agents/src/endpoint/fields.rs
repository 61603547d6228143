//! The fields of requests, and the rules for those that are not honoured.

use super::request::{ApiError, MODEL, Rules};
use grpo_files::{long_integers_as_digits, mark_long_integers};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::sync::Mutex;

/// The maximum number of messages of a request.
const MOST_MESSAGES: usize = 4096;
/// The maximum number of tokens that a request may ask for.
const MOST_TOKENS: u64 = 1 << 32;
/// The maximum number of fields that are named in the log.
const MOST_NAMED: usize = 64;
/// The maximum number of characters of a value in a message.
const SHOWN: usize = 100;

/// The fields of a request that the run replaces, which the log names once.
#[derive(Default)]
pub(super) struct Named(Mutex<BTreeSet<String>>);

impl Named {
    fn log(&self, name: &str, message: &str) {
        let mut named = grpo_rewards::programs::lock(&self.0);
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
                let requested = value.as_f64().ok_or_else(|| expected(name, "a number", Some(value)))?;
                if (requested - own).abs() > 1e-6 {
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
