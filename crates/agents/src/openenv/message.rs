//! Messages of OpenEnv's WebSocket, and their form as messages of a conversation.

use super::connection::Address;
use grpo_data::{Item, Prompt};
use serde_json::{Map, Value, json};

/// The code of an error of a server for an action that does not have the environment's form.
const INVALID: &str = "VALIDATION_ERROR";
/// The code of an error of a server that has as many sessions as it allows.
const FULL: &str = "CAPACITY_REACHED";
/// The errors about a missing field, and about a field that there is not: of the configuration, and not of the model.
const OF_FORM: [&str; 2] = ["missing", "extra_forbidden"];

/// An answer of a server.
pub(super) enum Answer {
    Observation(Observation),
    Refusal(Refusal),
}

/// The result of a reset or an action.
#[derive(Debug, PartialEq)]
pub(super) struct Observation {
    pub(super) fields: Map<String, Value>,
    pub(super) reward: Option<f32>,
    pub(super) done: bool,
}

/// An error that a server reports.
#[derive(Debug)]
pub(super) struct Refusal {
    code: String,
    message: String,
    /// The errors of pydantic, if the message did not have the required form.
    errors: Vec<Value>,
}

impl Answer {
    /// Reads an answer.
    ///
    /// # Errors
    /// A text with the expected form, and the part that does not have it.
    pub(super) fn read(answer: &Value) -> Result<Self, String> {
        let expected = |expected: &str, found: Option<&Value>| {
            let found = found.map_or_else(|| answer.to_string(), Value::to_string);
            format!("expected {expected}, got `{found}`")
        };
        let data = answer.get("data").and_then(Value::as_object);
        match (answer.get("type").and_then(Value::as_str), data) {
            (Some("error"), Some(data)) => {
                let text = |key: &str| data.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
                let errors = data.get("errors").and_then(Value::as_array).cloned().unwrap_or_default();
                Ok(Self::Refusal(Refusal { code: text("code"), message: text("message"), errors }))
            }
            (Some("observation"), Some(data)) => {
                let fields = match data.get("observation") {
                    Some(Value::Object(fields)) => fields.clone(),
                    other => return Err(expected("an `observation`, an object", other)),
                };
                let reward = match data.get("reward") {
                    None | Some(Value::Null) => None,
                    Some(Value::Bool(right)) => Some(f32::from(*right)),
                    Some(other) => {
                        let number = other.as_f64().map(|number| number as f32).filter(|number| number.is_finite());
                        Some(number.ok_or_else(|| expected("a finite `reward`, true, false or null", Some(other)))?)
                    }
                };
                let done = match data.get("done") {
                    None | Some(Value::Null) => false,
                    Some(Value::Bool(done)) => *done,
                    Some(other) => return Err(expected("`done` true or false", Some(other))),
                };
                Ok(Self::Observation(Observation { fields, reward, done }))
            }
            _ => Err(expected("an object with `type`, observation or error, and `data`, an object", None)),
        }
    }
}

/// Returns the path of the field of an error of pydantic.
fn place(error: &Value) -> Vec<String> {
    let parts = error["loc"].as_array().into_iter().flatten();
    parts.map(|part| part.as_str().map_or_else(|| part.to_string(), str::to_owned)).collect()
}

impl Refusal {
    /// Returns the error for users.
    pub(super) fn text(&self, address: &Address) -> String {
        let mut text = format!("{} {}", self.code, self.message);
        for error in &self.errors {
            text += &format!("; `{}`: {}", place(error).join("."), error["msg"].as_str().unwrap_or_default());
        }
        let fix = match self.code == FULL {
            true => {
                "; all conversations of a step have a session at the same time: start the server with a larger max_concurrent_envs"
            }
            false => "",
        };
        format!("it says: {}{fix}", address.show(&text))
    }

    /// Returns `true` if the server has no action of this form.
    pub(super) fn is_invalid(&self) -> bool {
        self.code == INVALID
    }

    /// Returns the reasons why the model's text is no value of `field`; `None` if anything else is wrong.
    pub(super) fn of_text(&self, field: &str) -> Option<String> {
        let is_of_text = |error: &Value| {
            let kind = error["type"].as_str().unwrap_or_default();
            place(error).first().is_some_and(|first| first == field) && !OF_FORM.contains(&kind)
        };
        let reasons = self.errors.iter().map(|error| error["msg"].as_str().unwrap_or("it is not valid"));
        (self.is_invalid() && !self.errors.is_empty() && self.errors.iter().all(is_of_text))
            .then(|| reasons.collect::<Vec<_>>().join("; "))
    }
}

impl Observation {
    /// Returns the text that the model reads: the field `shown`, or else all fields but `metadata` as JSON. It is empty if there are none.
    pub(super) fn text(&self, shown: Option<&str>) -> Result<String, String> {
        let Some(shown) = shown else {
            let fields: Map<_, _> = self.fields.clone().into_iter().filter(|(name, _)| name != "metadata").collect();
            return Ok(if fields.is_empty() { String::new() } else { Value::Object(fields).to_string() });
        };
        match self.fields.get(shown) {
            Some(value) => Ok(text_of(value)),
            None => {
                let names: Vec<&str> = self.fields.keys().map(String::as_str).collect();
                let found = names.join(", ");
                Err(format!("expected the field `{shown}` in the observation, got the fields {found}"))
            }
        }
    }

    /// Returns the result of a tool call as a message.
    pub(super) fn result(&self, shown: Option<&str>) -> Result<Value, String> {
        let is_call = ["result", "error"].iter().any(|key| self.fields.contains_key(*key));
        if !is_call {
            return Ok(json!({"role": "tool", "content": self.text(shown)?}));
        }
        if let Some(error) = self.fields.get("error").filter(|error| !error.is_null()) {
            let text = text_of(error.get("message").unwrap_or(error));
            return Ok(json!({"role": "tool", "content": format!("error: {text}"), "is_error": true}));
        }
        let result = self.fields.get("result").unwrap_or(&Value::Null);
        let Some(parts) = result.get("content").and_then(Value::as_array) else {
            return Ok(json!({"role": "tool", "content": text_of(result)}));
        };
        // The form of MCP. The model reads no images.
        let part = |part: &Value| match part.get("text").and_then(Value::as_str) {
            Some(text) => text.to_owned(),
            None => format!("({})", part.get("type").and_then(Value::as_str).unwrap_or("not a text")),
        };
        let content = parts.iter().map(part).collect::<Vec<_>>().join("\n");
        let is_error = ["is_error", "isError"].iter().any(|key| result.get(*key) == Some(&Value::Bool(true)));
        let mut message = json!({"role": "tool", "content": content});
        if is_error {
            message["is_error"] = true.into();
        }
        Ok(message)
    }

    /// Returns the tools of a server in OpenAI's form; `None` if there are none.
    pub(super) fn tools(&self) -> Result<Option<Value>, String> {
        if let Some(error) = self.fields.get("metadata").and_then(|metadata| metadata.get("error")) {
            return Err(format!("the server cannot list its tools: {}", text_of(error)));
        }
        let Some(Value::Array(tools)) = self.fields.get("tools") else {
            return Err(format!("expected a list of `tools`, got `{}`", Value::from(self.fields.clone())));
        };
        let tool = |tool: &Value| {
            let name = tool.get("name").and_then(Value::as_str).filter(|name| !name.is_empty());
            let schema = ["input_schema", "inputSchema"].iter().find_map(|key| tool.get(*key));
            let parameters = schema.cloned().unwrap_or_else(|| json!({"type": "object"}));
            let (Some(name), true) = (name, parameters.is_object()) else {
                return Err(format!("expected a tool with `name` and `input_schema`, an object, got `{tool}`"));
            };
            let description = tool.get("description").and_then(Value::as_str).unwrap_or_default();
            let function = json!({"name": name, "description": description, "parameters": parameters});
            Ok(json!({"type": "function", "function": function}))
        };
        let tools = tools.iter().map(tool).collect::<Result<Vec<Value>, _>>()?;
        Ok((!tools.is_empty()).then(|| tools.into()))
    }
}

/// Returns a text as it is, and any other value as JSON.
fn text_of(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

/// Returns the question that starts an episode about a row. An environment takes from its columns the arguments that its `reset` has.
pub(super) fn reset(row: &Item) -> Value {
    let mut data = (*row.columns).clone();
    let prompt = match &row.prompt {
        Prompt::Text(text) | Prompt::Rendered(text) => Value::from(text.as_str()),
        Prompt::Messages { messages, .. } => Value::from(messages.clone()),
    };
    data.entry("prompt").or_insert(prompt);
    json!({"type": "reset", "data": data})
}

/// Returns the question that takes an action.
pub(super) fn step(action: &Value) -> Value {
    json!({"type": "step", "data": action})
}

/// Returns the question for the tools of a server.
pub(super) fn list_tools() -> Value {
    step(&json!({"type": "list_tools"}))
}

/// Returns the action of a tool call in OpenAI's form.
pub(super) fn call(call: &Value) -> Value {
    let function = &call["function"];
    json!({"type": "call_tool", "tool_name": function["name"], "arguments": function["arguments"]})
}
