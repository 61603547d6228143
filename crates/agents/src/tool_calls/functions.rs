//! `<function=NAME><parameter=NAME>VALUE</parameter></function>` between tags, and Llama 3.1's `<function=NAME>{"x": 1}</function>`.

use super::scan::{call, properties, shown, typed};
use super::{MOST_CALLS, Parsed, ToolCall};
use serde_json::{Map, Value};

const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";

/// Reads the functions between `start` and `end`, and, as vLLM, functions without these tags.
pub(super) fn parse(text: &str, start: &str, end: &str, tools: &Value) -> Parsed {
    let (mut content, mut calls, mut rest) = (String::new(), Vec::new(), text);
    while calls.len() < MOST_CALLS {
        let found = [start, FUNCTION].into_iter().filter_map(|tag| Some((rest.find(tag)?, tag))).min();
        let Some((at, tag)) = found else { break };
        content.push_str(&rest[..at]);
        let block = if tag == start { rest[at + tag.len()..].trim_start() } else { &rest[at..] };
        let length = length(block, start, end);
        let inside = block[..length].trim_end();
        calls.push(function(inside, tools));
        rest = &block[length..];
        rest = rest.trim_start().strip_prefix(end).unwrap_or(rest);
    }
    content.push_str(rest);
    Parsed { content: content.trim().to_owned(), calls }
}

/// Returns the length of a call: to the end of its function, or, without one, to the next tag.
fn length(block: &str, start: &str, end: &str) -> usize {
    let ends = block.find(FUNCTION_END).map(|at| at + FUNCTION_END.len());
    let next = [start, end].into_iter().filter_map(|tag| block.find(tag));
    let next_function = block.get(1..).and_then(|rest| rest.find(FUNCTION)).map(|at| at + 1);
    let next = next.chain(next_function).min().unwrap_or(block.len());
    match ends {
        Some(ends) if block.starts_with(FUNCTION) && next_function.is_none_or(|next| ends <= next) => ends,
        _ => next,
    }
}

fn function(block: &str, tools: &Value) -> Result<ToolCall, String> {
    let expected = || format!("expected `<function=NAME>`, parameters and `</function>`, got `{}`", shown(block));
    let (name, body) = block.strip_prefix(FUNCTION).and_then(|rest| rest.split_once('>')).ok_or_else(expected)?;
    let name = name.trim();
    if name.is_empty() || name.contains('<') {
        return Err(expected());
    }
    let mut rest = body.trim();
    rest = rest.strip_suffix(FUNCTION_END).unwrap_or(rest).trim();
    if rest.starts_with('{') {
        return call(name, rest);
    }
    let (mut arguments, properties) = (Map::new(), properties(tools, name));
    while !rest.is_empty() {
        let expected = || format!("expected `<parameter=NAME>VALUE</parameter>`, got `{}`", shown(rest));
        let (key, behind) = rest.strip_prefix(PARAMETER).and_then(|rest| rest.split_once('>')).ok_or_else(expected)?;
        // A value may lack its end before the next parameter.
        let ends = behind.find(PARAMETER_END).map(|at| (at, at + PARAMETER_END.len()));
        let next = behind.find(PARAMETER).map(|at| (at, at));
        let (end, after) = ends.into_iter().chain(next).min().ok_or_else(expected)?;
        // The template writes a line end before and after a value.
        let value = &behind[..end];
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let schema = properties.and_then(|properties| properties.get(key));
        arguments.insert(key.to_owned(), typed(value, schema));
        rest = behind[after..].trim_start();
    }
    Ok(ToolCall { id: None, name: name.to_owned(), arguments })
}
