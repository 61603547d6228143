//! `<tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>`.

use super::{Parsed, ToolCall, blocks};
use serde_json::{Map, Value};

pub(super) fn parse(text: &str, tools: &Value) -> Parsed {
    let (content, blocks) = blocks(text);
    Parsed { content, calls: blocks.iter().map(|block| call(block, tools)).collect() }
}

fn call(block: &str, tools: &Value) -> Result<ToolCall, String> {
    let expected = || format!("expected `<function=NAME>`, parameters and `</function>`, got `{}`", shown(block));
    let (name, body) = block.strip_prefix("<function=").and_then(|rest| rest.split_once('>')).ok_or_else(expected)?;
    let mut rest = body.trim().strip_suffix("</function>").ok_or_else(expected)?.trim();
    let mut arguments = Map::new();
    while !rest.is_empty() {
        let parameter = rest.strip_prefix("<parameter=").and_then(|rest| rest.split_once('>'));
        let (key, (value, after)) = parameter
            .and_then(|(key, rest)| Some((key, rest.split_once("</parameter>")?)))
            .ok_or_else(|| format!("expected `<parameter=NAME>VALUE</parameter>`, got `{}`", shown(rest)))?;
        // The template writes a line end before and after a value.
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        arguments.insert(key.to_owned(), typed(value, schema(tools, name, key)));
        rest = after.trim_start();
    }
    Ok(ToolCall { name: name.to_owned(), arguments })
}

/// Returns the JSON schema of a parameter.
fn schema<'a>(tools: &'a Value, name: &str, key: &str) -> Option<&'a Value> {
    let functions = tools.as_array()?.iter().map(|tool| tool.get("function").unwrap_or(tool));
    let function = functions.into_iter().find(|function| function["name"] == name)?;
    function.get("parameters")?.get("properties")?.get(key)
}

/// Returns the value of a parameter: a text, unless its type is another and the text is JSON.
fn typed(text: &str, schema: Option<&Value>) -> Value {
    let is_text = schema.is_none_or(|schema| schema.get("type").is_none_or(|kind| kind == "string"));
    let parsed = if is_text { None } else { serde_json::from_str(text.trim()).ok() };
    parsed.unwrap_or_else(|| Value::from(text))
}

fn shown(text: &str) -> String {
    text.chars().take(80).collect()
}
