//! `<invoke name="NAME"><parameter name="NAME">VALUE</parameter></invoke>` between tags, with a prefix in the tags of DeepSeek and Muse.

use super::scan::{json, properties, shown, typed};
use super::{MOST_CALLS, Parsed, ToolCall};
use serde_json::{Map, Value};

/// The tags of a format.
pub(super) struct Tags {
    pub(super) start: &'static str,
    pub(super) end: &'static str,
    invoke: &'static str,
    invoke_end: &'static str,
    parameter: &'static str,
    parameter_end: &'static str,
}

/// The tags of MiniMax M2.
pub(super) const MINIMAX_M2: Tags = Tags {
    start: "<minimax:tool_call>",
    end: "</minimax:tool_call>",
    invoke: "<invoke name=",
    invoke_end: "</invoke>",
    parameter: "<parameter name=",
    parameter_end: "</parameter>",
};
/// The tags of DeepSeek V3.2.
pub(super) const DEEPSEEK_V32: Tags = Tags {
    start: "<｜DSML｜function_calls>",
    end: "</｜DSML｜function_calls>",
    invoke: "<｜DSML｜invoke name=",
    invoke_end: "</｜DSML｜invoke>",
    parameter: "<｜DSML｜parameter name=",
    parameter_end: "</｜DSML｜parameter>",
};
/// The tags of DeepSeek V4.
pub(super) const DEEPSEEK_V4: Tags =
    Tags { start: "<｜DSML｜tool_calls>", end: "</｜DSML｜tool_calls>", ..DEEPSEEK_V32 };

/// The tags of Muse.
pub(super) const MUSE_GLIMMER: Tags = Tags {
    start: "<atem:function_calls>",
    end: "</atem:function_calls>",
    invoke: "<atem:invoke name=",
    invoke_end: "</atem:invoke>",
    parameter: "<atem:parameter name=",
    parameter_end: "</atem:parameter>",
};

pub(super) fn parse(text: &str, tags: &Tags, tools: &Value) -> Parsed {
    let (mut content, mut calls, mut rest) = (String::new(), Vec::new(), text);
    while let Some((before, behind)) = rest.split_once(tags.start) {
        content.push_str(before);
        let (mut inside, after) = behind.split_once(tags.end).unwrap_or((behind, ""));
        if !inside.contains(tags.invoke) {
            calls.push(Err(format!("expected `{}\"NAME\">` in the tool call, got `{}`", tags.invoke, shown(inside))));
        }
        while let Some((_, block)) = inside.split_once(tags.invoke) {
            let (block, next) = block.split_once(tags.invoke_end).unwrap_or((block, ""));
            calls.push(invoke(block, tags, tools));
            inside = next;
            if calls.len() >= MOST_CALLS {
                return Parsed { content, calls };
            }
        }
        rest = after;
    }
    content.push_str(rest);
    Parsed { content: content.trim().to_owned(), calls }
}

fn invoke(block: &str, tags: &Tags, tools: &Value) -> Result<ToolCall, String> {
    let (name, _, mut rest) = attributes(block)
        .ok_or_else(|| format!("expected a name in quotes and `>` behind `{}`, got `{}`", tags.invoke, shown(block)))?;
    let (mut arguments, properties) = (Map::new(), properties(tools, name));
    rest = rest.trim();
    while !rest.is_empty() {
        let expected =
            || format!("expected `{}\"NAME\">VALUE{}`, got `{}`", tags.parameter, tags.parameter_end, shown(rest));
        let behind = rest.strip_prefix(tags.parameter).ok_or_else(expected)?;
        let (key, others, behind) = attributes(behind).ok_or_else(expected)?;
        // A value may lack its end before the next parameter.
        let ends = behind.find(tags.parameter_end).map(|at| (at, at + tags.parameter_end.len()));
        let next = behind.find(tags.parameter).map(|at| (at, at));
        let (end, after) = ends.into_iter().chain(next).min().ok_or_else(expected)?;
        let value = &behind[..end];
        // DeepSeek writes which values are texts.
        let value = match others.trim() {
            r#"string="true""# => Value::from(value),
            r#"string="false""# => json(value.trim()).unwrap_or_else(|_| Value::from(value)),
            _ => typed(value, properties.and_then(|properties| properties.get(key))),
        };
        arguments.insert(key.to_owned(), value);
        rest = behind[after..].trim_start();
    }
    Ok(ToolCall { id: None, name: name.to_owned(), arguments })
}

/// Reads a name, with or without quotes, other attributes, and `>`: returns the name, the other attributes, and the text behind.
fn attributes(text: &str) -> Option<(&str, &str, &str)> {
    let quote = text.chars().next().filter(|c| "\"'".contains(*c));
    let (name, rest) = match quote {
        Some(quote) => text[1..].split_once(quote)?,
        None => text.split_at(text.find(|c: char| c == '>' || c.is_whitespace())?),
    };
    let (others, behind) = rest.split_once('>')?;
    (!name.trim().is_empty()).then_some((name.trim(), others, behind))
}
