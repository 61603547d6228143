//! Parsers of tool calls in the text of a model.

mod functions;
mod gemma;
mod glm;
mod harmony;
mod hermes;
mod invoke;
mod json_list;
mod literal;
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
}

#[cfg(test)]
mod tests;
