//! A JSON object per call between tags: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

use super::scan::{blocks, json, json_at_start, no_calls};
use super::{MOST_CALLS, Parsed, ToolCall};
use serde_json::Value;

/// Reads a call between each pair of tags.
pub(super) fn parse(text: &str, start: &str, end: &str) -> Parsed {
    let (content, blocks) = blocks(text, start, end);
    let call = |block: &str| ToolCall::from_json(&json(block)?);
    Parsed { content, calls: blocks.into_iter().map(call).collect() }
}

/// Reads the JSON objects, one behind the other, or the list of calls between `<tool_calls>` and `</tool_calls>`.
pub(super) fn parse_list(text: &str) -> Parsed {
    let (content, blocks) = blocks(text, "<tool_calls>", "</tool_calls>");
    if blocks.is_empty() {
        return no_calls(text);
    }
    let mut calls = Vec::new();
    for block in blocks {
        let mut rest = block;
        while let Some(value) = json_at_start(rest) {
            match value {
                Ok((Value::Array(list), behind)) => {
                    calls.extend(list.iter().map(ToolCall::from_json));
                    rest = behind;
                }
                Ok((value, behind)) => {
                    calls.push(ToolCall::from_json(&value));
                    rest = behind;
                }
                Err(error) => {
                    calls.push(Err(format!("the tool call is no JSON: {error}")));
                    break;
                }
            }
            if calls.len() >= MOST_CALLS {
                return Parsed { content, calls };
            }
        }
    }
    Parsed { content, calls }
}
