//! Parsers of tool calls in the text of a model.

mod functions;
mod gemma;
mod glm;
mod harmony;
mod hermes;
mod invoke;
mod json_list;
mod llama3_json;
mod marked;
mod parser;
mod pythonic;
mod scan;

pub use parser::ToolParser;

use serde_json::{Map, Value, json};

/// The largest number of calls of a message.
const MOST_CALLS: usize = 64;

/// The deepest nesting of values, other than JSON.
const DEEPEST: usize = 32;

/// A call of a tool.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// The id that the model wrote: nine letters and digits of Mistral's formats, `functions.NAME:INDEX` of Kimi K2, any text of Solar Open's;
    /// `None` if its format has none.
    pub id: Option<String>,
    /// The name of the tool.
    pub name: String,
    /// The arguments by name. An integer beyond 64 bits is a string that [`grpo_files::long_integers_as_digits`] writes as digits.
    pub arguments: Map<String, Value>,
}

/// A message of the assistant: its text, and the tools that it calls.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parsed {
    /// The text without tool calls.
    pub content: String,
    /// The calls in order; an error for text that begins a call and is none.
    pub calls: Vec<Result<ToolCall, String>>,
}

impl ToolCall {
    /// Returns the call in OpenAI's form, with the arguments as an object.
    pub fn to_message(&self) -> Value {
        json!({"type": "function", "function": {"name": self.name, "arguments": self.arguments}})
    }

    /// Reads an object with `name`, and `arguments` or `parameters`: an object, or JSON text of one.
    fn from_json(value: &Value) -> Result<Self, String> {
        let id = value["id"].as_str().and_then(valid_id);
        let value = value.get("function").filter(|function| function.is_object()).unwrap_or(value);
        let expected = "an object with `name` and `arguments`, an object";
        let name = value["name"].as_str().filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| format!("expected {expected}, got `{}`", scan::shown(&value.to_string())))?;
        let found = ["arguments", "parameters"].iter().find_map(|key| value.get(*key));
        let arguments = match found {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(arguments)) => arguments.clone(),
            Some(Value::String(text)) => scan::arguments(name, text)?,
            Some(other) => {
                return Err(format!("expected {expected}, got `{}`", scan::shown(&other.to_string())));
            }
        };
        Ok(Self { id, name: name.to_owned(), arguments })
    }
}

/// Returns an id of a call if chat templates take it: Mistral's refuse others than nine letters and digits.
fn valid_id(id: &str) -> Option<String> {
    let is_valid = id.len() == 9 && id.chars().all(|c| c.is_ascii_alphanumeric());
    is_valid.then(|| id.to_owned())
}

#[cfg(test)]
mod tests;
