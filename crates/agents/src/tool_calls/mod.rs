//! Parsers of tool calls in the text of a model.

mod hermes;
mod json_list;
mod llama3_json;
mod pythonic;
mod qwen3_coder;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// The largest number of calls of a message.
const MOST_CALLS: usize = 64;

/// A format of tool calls, by vLLM's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolParser {
    /// `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`, of Hermes, Qwen2.5 and Qwen3.
    Hermes,
    /// `<tool_call><function=f><parameter=x>1</parameter></function></tool_call>`, of Qwen3-Coder and Qwen3.5.
    #[serde(rename = "qwen3_coder")]
    Qwen3Coder,
    /// `{"name": "f", "parameters": {"x": 1}}` as the whole message, of Llama 3.1 and later.
    #[serde(rename = "llama3_json")]
    Llama3Json,
    /// `[f(x=1)]` as the whole message, of Llama 3.2 and Llama 4.
    Pythonic,
    /// `[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]`, or `[TOOL_CALLS]f[ARGS]{"x": 1}`, of Mistral.
    Mistral,
    /// `<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]`, of Granite 3.
    Granite,
    /// `functools[{"name": "f", "arguments": {"x": 1}}]`, of Phi-4-mini.
    #[serde(rename = "phi4_mini_json")]
    Phi4MiniJson,
    /// `<function_calls>`, a call `f(x=1)` per line, `</function_calls>`, of OLMo 3.
    #[serde(rename = "olmo3")]
    Olmo3,
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// The name of the tool.
    pub name: String,
    /// The arguments by name.
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

    /// Reads an object with `name` and arguments under one of `keys`.
    fn from_json(value: &Value, keys: &[&str]) -> Result<Self, String> {
        let name = value.get("name").and_then(Value::as_str);
        let arguments = keys.iter().find_map(|key| value.get(*key));
        match (name, arguments) {
            (Some(name), Some(Value::Object(arguments))) => {
                Ok(Self { name: name.to_owned(), arguments: arguments.clone() })
            }
            (Some(name), None) => Ok(Self { name: name.to_owned(), arguments: Map::new() }),
            _ => Err(format!("expected an object with `name` and `{}`, an object", keys[0])),
        }
    }
}

impl ToolParser {
    /// Every parser.
    pub const ALL: [Self; 8] = [
        Self::Hermes,
        Self::Qwen3Coder,
        Self::Llama3Json,
        Self::Pythonic,
        Self::Mistral,
        Self::Granite,
        Self::Phi4MiniJson,
        Self::Olmo3,
    ];

    /// Returns `true` if the tags of calls are special tokens, so that the text must be decoded with them.
    pub fn has_special_tags(self) -> bool {
        matches!(self, Self::Mistral | Self::Granite)
    }

    /// Finds the tool calls in a message of the assistant. `tools` are the functions as JSON schemas; `qwen3_coder` takes the types of
    /// arguments from them.
    ///
    /// ```
    /// use agents::ToolParser;
    ///
    /// let text = "I compute.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>";
    /// let parsed = ToolParser::Hermes.parse(text, &serde_json::json!([]));
    /// assert_eq!((parsed.content.as_str(), parsed.calls.len()), ("I compute.", 1));
    /// assert_eq!(parsed.calls[0].as_ref().unwrap().name, "add");
    /// ```
    pub fn parse(self, text: &str, tools: &Value) -> Parsed {
        let mut parsed = match self {
            Self::Hermes => hermes::parse(text),
            Self::Qwen3Coder => qwen3_coder::parse(text, tools),
            Self::Llama3Json => llama3_json::parse(text),
            Self::Pythonic => pythonic::parse(text),
            Self::Mistral => json_list::parse_mistral(text),
            Self::Granite => json_list::parse(text, &["<|tool_call|>", "<tool_call>"]),
            Self::Phi4MiniJson => json_list::parse(text, &["functools"]),
            Self::Olmo3 => pythonic::parse_olmo3(text),
        };
        parsed.calls.truncate(MOST_CALLS);
        parsed
    }

    /// Returns the parser that finds the call `of` in a message that a chat template has rendered; `None` if none does.
    pub fn of_rendered(text: &str, of: &ToolCall, tools: &Value) -> Option<Self> {
        Self::ALL.into_iter().find(|parser| parser.parse(text, tools).calls == [Ok(of.clone())])
    }
}

/// Splits a text at blocks `<tool_call>...</tool_call>`: the text outside, and the inside of each block. A last block may lack its end.
fn blocks(text: &str) -> (String, Vec<&str>) {
    const START: &str = "<tool_call>";
    const END: &str = "</tool_call>";
    let (mut content, mut blocks, mut rest) = (String::new(), Vec::new(), text);
    while let Some((before, behind)) = rest.split_once(START) {
        content.push_str(before);
        let (inside, after) = behind.split_once(END).unwrap_or((behind, ""));
        blocks.push(inside.trim());
        rest = after;
    }
    content.push_str(rest);
    (content.trim().to_owned(), blocks)
}

#[cfg(test)]
mod tests;
