//! A name and JSON arguments between tokens of their own, of DeepSeek V3 and V3.1, Kimi K2 and Solar Open.

use super::scan::{call, no_calls, shown};
use super::{MOST_CALLS, Parsed, ToolCall};

pub(super) const DEEPSEEK_CALLS: &str = "<｜tool▁calls▁begin｜>";
const CALLS_END: &str = "<｜tool▁calls▁end｜>";
const CALL: &str = "<｜tool▁call▁begin｜>";
const CALL_END: &str = "<｜tool▁call▁end｜>";
const SEPARATOR: &str = "<｜tool▁sep｜>";

pub(super) const KIMI_CALLS: &str = "<|tool_calls_section_begin|>";
pub(super) const KIMI_CALL: &str = "<|tool_call_begin|>";
pub(super) const SOLAR_CALLS: &str = "<|tool_calls|>";
const SOLAR_NAME: &str = "<|tool_call:name|>";
/// The longest id of a call.
const LONGEST_ID: usize = 64;

/// The tags around the calls of a message, around a call, and between its name and its arguments.
struct Tags {
    calls: [&'static str; 2],
    call: [&'static str; 2],
    separator: &'static str,
}

const DEEPSEEK: Tags = Tags { calls: [DEEPSEEK_CALLS, CALLS_END], call: [CALL, CALL_END], separator: SEPARATOR };
const KIMI_K2: Tags = Tags {
    calls: [KIMI_CALLS, "<|tool_calls_section_end|>"],
    call: [KIMI_CALL, "<|tool_call_end|>"],
    separator: "<|tool_call_argument_begin|>",
};

const SOLAR_OPEN: Tags = Tags {
    calls: [SOLAR_CALLS, "<|calls|>"],
    call: ["<|tool_call:begin|>", "<|tool_call:end|>"],
    separator: "<|tool_call:args|>",
};

/// Reads calls of DeepSeek V3: a kind, the name, and the arguments in a block of code.
pub(super) fn parse_deepseek_v3(text: &str) -> Parsed {
    parse(text, &DEEPSEEK, |_, behind| {
        let (name, json) = behind.split_once("```json").ok_or_else(|| {
            format!("expected a name and a block of JSON behind {SEPARATOR}, got `{}`", shown(behind))
        })?;
        call(name, json.trim_end().trim_end_matches("```"))
    })
}

/// Reads calls of DeepSeek V3.1: the name, and the arguments.
pub(super) fn parse_deepseek_v31(text: &str) -> Parsed {
    parse(text, &DEEPSEEK, call)
}

/// Reads calls of Kimi K2: `functions.NAME:INDEX`, and the arguments.
pub(super) fn parse_kimi_k2(text: &str) -> Parsed {
    parse(text, &KIMI_K2, |id, json| {
        let id = id.trim();
        let name = id.rsplit_once(':').filter(|(_, index)| index.parse::<u64>().is_ok()).map(|(name, _)| name);
        let name =
            name.ok_or_else(|| format!("expected functions.NAME:INDEX behind {KIMI_CALL}, got `{}`", shown(id)))?;
        let read = call(name.strip_prefix("functions.").unwrap_or(name), json)?;
        Ok(ToolCall { id: Some(id.to_owned()).filter(|id| id.len() <= LONGEST_ID), ..read })
    })
}

/// Reads calls of Solar Open: an id, the name, and the arguments.
pub(super) fn parse_solar_open(text: &str) -> Parsed {
    parse(text, &SOLAR_OPEN, |before, json| {
        let (id, name) = before
            .split_once(SOLAR_NAME)
            .ok_or_else(|| format!("expected an id, {SOLAR_NAME} and a name, got `{}`", shown(before)))?;
        let id = Some(id.trim().to_owned()).filter(|id| !id.is_empty() && id.len() <= LONGEST_ID);
        Ok(ToolCall { id, ..call(name, json)? })
    })
}

/// Reads calls: `read` gets the texts before and behind the separator. Text behind the calls is no content, as in vLLM.
fn parse(text: &str, tags: &Tags, read: impl Fn(&str, &str) -> Result<ToolCall, String>) -> Parsed {
    let Some((content, behind)) = text.split_once(tags.calls[0]) else { return no_calls(text) };
    let mut inside = behind.split_once(tags.calls[1]).map_or(behind, |(inside, _)| inside);
    let mut calls = Vec::new();
    while let Some((_, block)) = inside.split_once(tags.call[0])
        && calls.len() < MOST_CALLS
    {
        let (block, next) = block.split_once(tags.call[1]).unwrap_or((block, ""));
        calls.push(match block.split_once(tags.separator) {
            Some((before, behind)) => read(before, behind),
            None => Err(format!("expected {} in the tool call, got `{}`", tags.separator, shown(block))),
        });
        inside = next;
    }
    if calls.is_empty() {
        calls.push(Err(format!("expected {} behind {}, got `{}`", tags.call[0], tags.calls[0], shown(behind))));
    }
    Parsed { content: content.trim().to_owned(), calls }
}
