//! `<tool_call>NAME<arg_key>NAME</arg_key><arg_value>VALUE</arg_value></tool_call>`, of GLM-4.5 and, with other tags, of Hunyuan 3.

use super::scan::{blocks, no_calls, properties, shown, typed};
use super::{Parsed, ToolCall};
use serde_json::{Map, Value};

const KEY: &str = "<arg_key>";
const VALUE: &str = "<arg_value>";

pub(super) fn parse(text: &str, tools: &Value) -> Parsed {
    let (content, blocks) = blocks(text, "<tool_call>", "</tool_call>");
    Parsed { content, calls: blocks.into_iter().map(|block| call(block, tools)).collect() }
}

/// The start of the calls of Hunyuan 3.
pub(super) const HY_V3: &str = "<tool_calls:opensource>";

/// Reads calls in tags that end with `:opensource`, and have `<tool_sep>` behind the name.
pub(super) fn parse_hy_v3(text: &str, tools: &Value) -> Parsed {
    let Some((content, behind)) = text.split_once(HY_V3) else { return no_calls(text) };
    let inside = behind.split_once("</tool_calls:opensource>").map_or(behind, |(inside, _)| inside);
    let plain = inside.replace(":opensource>", ">").replace("<tool_sep>", "");
    Parsed { content: content.trim().to_owned(), ..parse(&plain, tools) }
}

fn call(block: &str, tools: &Value) -> Result<ToolCall, String> {
    let (name, mut rest) = block.split_at(block.find(KEY).unwrap_or(block.len()));
    let name = name.trim();
    if name.is_empty() || name.contains(['{', '<', '\n']) {
        return Err(format!("expected the name of a function behind <tool_call>, got `{}`", shown(block)));
    }
    let (mut arguments, properties) = (Map::new(), properties(tools, name));
    while !rest.is_empty() {
        let expected =
            || format!("expected `<arg_key>NAME</arg_key><arg_value>VALUE</arg_value>`, got `{}`", shown(rest));
        let (key, behind) =
            rest.strip_prefix(KEY).and_then(|rest| rest.split_once("</arg_key>")).ok_or_else(expected)?;
        let behind = behind.trim_start().strip_prefix(VALUE).ok_or_else(expected)?;
        let (value, after) = behind.split_once("</arg_value>").ok_or_else(expected)?;
        let key = key.trim();
        arguments.insert(key.to_owned(), typed(value, properties.and_then(|properties| properties.get(key))));
        rest = after.trim_start();
    }
    Ok(ToolCall { id: None, name: name.to_owned(), arguments })
}
