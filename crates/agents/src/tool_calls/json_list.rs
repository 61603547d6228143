//! A tag and a JSON list of calls: `functools[{"name": "f", "arguments": {}}]`. Newer versions of Mistral repeat the tag, with the name of the
//! function and its arguments.

use super::{Parsed, ToolCall};
use serde_json::{Deserializer, Map, Value};

/// The tag of Mistral.
const TOOL_CALLS: &str = "[TOOL_CALLS]";
/// The tags between a name and its arguments in some versions of Mistral.
const CALL_ID: &str = "[CALL_ID]";
const ARGS: &str = "[ARGS]";

/// Reads a list behind the first of `tags` that a list follows.
pub(super) fn parse(text: &str, tags: &[&str]) -> Parsed {
    let found = tags.iter().find_map(|tag| {
        let (before, behind) = text.split_once(tag)?;
        behind.trim_start().starts_with('[').then_some((before, behind))
    });
    let Some((before, behind)) = found else {
        return Parsed { content: text.trim().to_owned(), calls: Vec::new() };
    };
    let (calls, after) = list(behind);
    Parsed { content: format!("{before}{after}").trim().to_owned(), calls }
}

/// Reads `[TOOL_CALLS]` with a list, or with `NAME{...}`, `NAME[ARGS]{...}` or `NAME[CALL_ID]ID[ARGS]{...}`, each time.
pub(super) fn parse_mistral(text: &str) -> Parsed {
    let Some((before, mut rest)) = text.split_once(TOOL_CALLS) else {
        return Parsed { content: text.trim().to_owned(), calls: Vec::new() };
    };
    if rest.trim_start().starts_with('[') {
        let (calls, after) = list(rest);
        return Parsed { content: format!("{before}{after}").trim().to_owned(), calls };
    }
    let mut calls = Vec::new();
    let after = loop {
        match named(rest) {
            Ok((call, behind)) => {
                calls.push(Ok(call));
                match behind.trim_start().strip_prefix(TOOL_CALLS) {
                    Some(next) => rest = next,
                    None => break behind,
                }
            }
            Err(error) => {
                calls.push(Err(error));
                break "";
            }
        }
    };
    Parsed { content: format!("{before}{after}").trim().to_owned(), calls }
}

/// Reads a JSON list of calls, and returns the text behind it.
fn list(text: &str) -> (Vec<Result<ToolCall, String>>, &str) {
    let mut values = Deserializer::from_str(text).into_iter::<Vec<Value>>();
    match values.next() {
        Some(Ok(list)) => {
            let calls = list.iter().map(|value| ToolCall::from_json(value, &["arguments", "parameters"])).collect();
            (calls, &text[values.byte_offset()..])
        }
        Some(Err(error)) => (vec![Err(format!("the list of tool calls is no JSON: {error}"))], ""),
        None => (vec![Err("expected a JSON list of tool calls".into())], ""),
    }
}

/// Reads the name of a function and its arguments, and returns the text behind them.
fn named(text: &str) -> Result<(ToolCall, &str), String> {
    let text = text.trim_start();
    let legal = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    let (name, mut rest) = text.split_at(text.find(|c| !legal(c)).unwrap_or(text.len()));
    if name.is_empty() {
        return Err("expected the name of a function behind [TOOL_CALLS]".into());
    }
    if let Some(behind) = rest.strip_prefix(CALL_ID) {
        rest = behind.trim_start_matches(|c: char| c.is_ascii_alphanumeric());
    }
    rest = rest.strip_prefix(ARGS).unwrap_or(rest);
    let mut values = Deserializer::from_str(rest).into_iter::<Map<String, Value>>();
    let arguments = match values.next() {
        Some(Ok(arguments)) => arguments,
        Some(Err(error)) => return Err(format!("the arguments of `{name}` are no JSON object: {error}")),
        None => return Err(format!("expected the arguments of `{name}`, a JSON object")),
    };
    Ok((ToolCall { name: name.to_owned(), arguments }, &rest[values.byte_offset()..]))
}
