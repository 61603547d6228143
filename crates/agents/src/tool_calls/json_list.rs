//! A tag and a JSON list of calls: `functools[{"name": "f", "arguments": {}}]`. Newer versions of Mistral repeat the tag, with the name of the
//! function and its arguments.

use super::scan::{json_at_start, no_calls, shown, valid_id};
use super::{MOST_CALLS, Parsed, ToolCall};
use serde_json::{Value, json};

/// The tag of Mistral.
const TOOL_CALLS: &str = "[TOOL_CALLS]";
/// The tags between a name and its arguments in some versions of Mistral.
const CALL_ID: &str = "[CALL_ID]";
const ARGS: &str = "[ARGS]";

/// The tag of Granite 3.
pub(super) const GRANITE: &str = "<|tool_call|>";
/// The tags of Command R7B and A.
pub(super) const COHERE: [&str; 2] = ["<|START_ACTION|>", "<|END_ACTION|>"];
/// The tags of Apertus.
pub(super) const APERTUS: [&str; 2] = ["<|tools_prefix|>", "<|tools_suffix|>"];

/// Reads a list of objects with `tool_name` and `parameters`. The ids in it are numbers of calls.
pub(super) fn parse_cohere(text: &str) -> Parsed {
    parse_between(text, COHERE, |value| match value["tool_name"].as_str() {
        Some(name) => ToolCall::from_json(&json!({"name": name, "parameters": value["parameters"]})),
        None => ToolCall::from_json(value),
    })
}

/// Reads a list of objects whose only key is the name of a function.
pub(super) fn parse_apertus(text: &str) -> Parsed {
    parse_between(text, APERTUS, |value| match value.as_object().map(|calls| calls.iter().collect::<Vec<_>>()) {
        Some(calls) if calls.len() == 1 => ToolCall::from_json(&json!({"name": calls[0].0, "arguments": calls[0].1})),
        _ => Err(format!("expected an object with the name of a function, got `{}`", shown(&value.to_string()))),
    })
}

/// Reads a list between tags. `read` gets each of its values.
fn parse_between(text: &str, [start, end]: [&str; 2], read: impl Fn(&Value) -> Result<ToolCall, String>) -> Parsed {
    let Some((content, behind)) = text.split_once(start) else { return no_calls(text) };
    let (inside, after) = behind.split_once(end).unwrap_or((behind, ""));
    let calls = match json_at_start(inside) {
        Some(Ok((Value::Array(list), _))) => list.iter().map(read).collect(),
        Some(Err(error)) => vec![Err(format!("the list of tool calls is no JSON: {error}"))],
        _ => vec![Err(format!("expected a JSON list behind {start}"))],
    };
    Parsed { content: format!("{content}{after}").trim().to_owned(), calls }
}

/// Reads a list behind the first of `tags` that a list follows.
pub(super) fn parse(text: &str, tags: &[&str]) -> Parsed {
    let found = tags.iter().find_map(|tag| {
        let (before, behind) = text.split_once(tag)?;
        behind.trim_start().starts_with('[').then_some((before, behind))
    });
    let Some((before, behind)) = found else {
        return no_calls(text);
    };
    let (calls, after) = list(behind);
    Parsed { content: format!("{before}{after}").trim().to_owned(), calls }
}

/// Reads `[TOOL_CALLS]` with a list, or with `NAME{...}`, `NAME[ARGS]{...}` or `NAME[CALL_ID]ID[ARGS]{...}`, each time.
pub(super) fn parse_mistral(text: &str) -> Parsed {
    let Some((before, mut rest)) = text.split_once(TOOL_CALLS) else {
        return no_calls(text);
    };
    if rest.trim_start().starts_with('[') {
        let (calls, after) = list(rest);
        return Parsed { content: format!("{before}{after}").trim().to_owned(), calls };
    }
    let mut calls = Vec::new();
    let after = loop {
        if calls.len() >= MOST_CALLS {
            break "";
        }
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

/// Reads a JSON list of calls as the whole message, in a block of code, or behind the tags of other formats, of xLAM. Other JSON is an answer.
pub(super) fn parse_xlam(text: &str) -> Parsed {
    let trimmed = text.trim();
    let fenced = ["```json", "```"].into_iter().map(|fence| (fence, "```"));
    let tagged = [(TOOL_CALLS, "\n"), ("<tool_call>", "</tool_call>")];
    for (start, end) in fenced.chain(tagged) {
        for (at, _) in trimmed.match_indices(start).take(MOST_CALLS) {
            let behind = &trimmed[at + start.len()..];
            let (inside, after) = match behind.split_once(end) {
                Some(found) => found,
                None if end == "\n" => (behind, ""),
                None => break,
            };
            if let Some(Ok((Value::Array(calls), rest))) = json_at_start(inside)
                && rest.trim().is_empty()
                && calls.iter().all(is_call)
            {
                let content = format!("{}{after}", &trimmed[..at]).trim().to_owned();
                return Parsed { content, calls: calls.iter().map(ToolCall::from_json).collect() };
            }
        }
    }
    match json_at_start(trimmed).filter(|_| trimmed.starts_with('[')) {
        Some(Ok((Value::Array(calls), rest))) if rest.trim().is_empty() && calls.iter().all(is_call) => {
            Parsed { content: String::new(), calls: calls.iter().map(ToolCall::from_json).collect() }
        }
        Some(Err(error)) if ["{", "\"name\"", "\"arguments\""].iter().all(|part| trimmed.contains(part)) => {
            Parsed { content: String::new(), calls: vec![Err(format!("the list of tool calls is no JSON: {error}"))] }
        }
        _ => no_calls(text),
    }
}

fn is_call(value: &Value) -> bool {
    value["name"].is_string() && value.get("arguments").is_some()
}

/// Reads a JSON list of calls, and returns the text behind it.
pub(super) fn list(text: &str) -> (Vec<Result<ToolCall, String>>, &str) {
    match json_at_start(text) {
        Some(Ok((Value::Array(list), behind))) => (list.iter().map(ToolCall::from_json).collect(), behind),
        Some(Err(error)) => (vec![Err(format!("the list of tool calls is no JSON: {error}"))], ""),
        _ => (vec![Err("expected a JSON list of tool calls".into())], ""),
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
    let mut id = None;
    if let Some(behind) = rest.strip_prefix(CALL_ID) {
        rest = behind.trim_start_matches(|c: char| c.is_ascii_alphanumeric());
        id = valid_id(&behind[..behind.len() - rest.len()]);
    }
    rest = rest.strip_prefix(ARGS).unwrap_or(rest);
    match json_at_start(rest) {
        Some(Ok((Value::Object(arguments), behind))) => Ok((ToolCall { id, name: name.to_owned(), arguments }, behind)),
        Some(Ok((other, _))) => {
            Err(format!("the arguments of `{name}` are no JSON object, but `{}`", shown(&other.to_string())))
        }
        Some(Err(error)) => Err(format!("the arguments of `{name}` are no JSON object: {error}")),
        None => Err(format!("expected the arguments of `{name}`, a JSON object")),
    }
}
