//! `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

use super::{Parsed, ToolCall, blocks};

pub(super) fn parse(text: &str) -> Parsed {
    let (content, blocks) = blocks(text);
    let call = |block: &&str| {
        let value = serde_json::from_str(block).map_err(|error| format!("the tool call is no JSON: {error}"))?;
        ToolCall::from_json(&value, &["arguments"])
    };
    Parsed { content, calls: blocks.iter().map(call).collect() }
}
