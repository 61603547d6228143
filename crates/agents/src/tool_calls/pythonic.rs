//! `[f(x=1), g(y='a')]` as the whole message: calls with keyword arguments, whose values are Python literals. OLMo 3 writes a call per line
//! between tags, LFM2 a list between tags.

use super::literal::Reader;
use super::scan::no_calls;
use super::{MOST_CALLS, Parsed, ToolCall, json_list};
use serde_json::Map;

/// The start of the list of tools in prompts of LFM2.
pub(super) const LFM2_TOOLS: &str = "<|tool_list_start|>";
/// The tags of LFM2.
pub(super) const LFM2: [&str; 2] = ["<|tool_call_start|>", "<|tool_call_end|>"];
/// The tags that Llama 4 may write around its calls.
pub(super) const LLAMA4: [&str; 2] = ["<|python_start|>", "<|python_end|>"];

pub(super) fn parse(text: &str) -> Parsed {
    let trimmed = text.trim();
    let mut reader = Reader { text: trimmed, at: 0 };
    // A message that is a list of other things is an answer.
    let begins = reader.take('[') && reader.name().is_some() && reader.take('(');
    if !begins {
        return Parsed { content: trimmed.to_owned(), calls: Vec::new() };
    }
    let mut reader = Reader { text: trimmed, at: 1 };
    let calls = match reader.calls() {
        Ok(calls) => calls.into_iter().map(Ok).collect(),
        Err(error) => vec![Err(error)],
    };
    Parsed { content: String::new(), calls }
}

/// Reads a list of calls, which may be between tags.
pub(super) fn parse_llama4(text: &str) -> Parsed {
    match text.trim_start().strip_prefix(LLAMA4[0]) {
        Some(rest) => parse(&rest.replace(LLAMA4[1], "")),
        None => parse(text),
    }
}

/// Reads a list of calls, or a JSON list of them, between tags.
pub(super) fn parse_lfm2(text: &str) -> Parsed {
    let Some((before, behind)) = text.split_once(LFM2[0]) else { return no_calls(text) };
    let (inside, after) = behind.split_once(LFM2[1]).unwrap_or((behind, ""));
    // The model may repeat its calls, and ends them again.
    let after = after.rsplit_once(LFM2[1]).map_or(after, |(_, after)| after);
    let inside = inside.trim();
    let calls = match inside.strip_prefix('[').is_some_and(|rest| rest.trim_start().starts_with('{')) {
        true => json_list::list(inside).0,
        false => {
            let mut reader = Reader { text: inside, at: 0 };
            match reader.expect('[').and_then(|()| reader.calls()) {
                Ok(calls) => calls.into_iter().map(Ok).collect(),
                Err(error) => vec![Err(error)],
            }
        }
    };
    let parts = [before.trim(), after.trim()];
    Parsed { content: parts.iter().filter(|part| !part.is_empty()).copied().collect::<Vec<_>>().join("\n"), calls }
}

/// Reads `<function_calls>`, calls separated by white space, and `</function_calls>`.
pub(super) fn parse_olmo3(text: &str) -> Parsed {
    let Some((before, behind)) = text.split_once("<function_calls>") else {
        return Parsed { content: text.trim().to_owned(), calls: Vec::new() };
    };
    let (inside, after) = behind.split_once("</function_calls>").unwrap_or((behind, ""));
    let (mut reader, mut calls) = (Reader { text: inside.trim(), at: 0 }, Vec::new());
    while !reader.rest().is_empty() && calls.len() < MOST_CALLS {
        let call = reader.call();
        let is_broken = call.is_err();
        calls.push(call);
        if is_broken {
            break;
        }
        reader.skip_space();
    }
    if calls.is_empty() {
        calls.push(Err("expected a call between <function_calls> and </function_calls>".into()));
    }
    Parsed { content: format!("{before}{after}").trim().to_owned(), calls }
}

/// Calls, with arguments that are literals.
impl Reader<'_> {
    fn call(&mut self) -> Result<ToolCall, String> {
        let name = self.name().ok_or_else(|| self.unexpected("the name of a function"))?.to_owned();
        self.expect('(')?;
        let mut arguments = Map::new();
        while !self.take(')') {
            let key = self.name().ok_or_else(|| self.unexpected("the name of an argument"))?.to_owned();
            self.expect('=')?;
            let value = self.value(0)?;
            arguments.insert(key, value);
            if !self.take(',') {
                self.expect(')')?;
                break;
            }
        }
        Ok(ToolCall { id: None, name, arguments })
    }

    fn calls(&mut self) -> Result<Vec<ToolCall>, String> {
        let mut calls = Vec::new();
        loop {
            calls.push(self.call()?);
            let has_comma = self.take(',');
            if !self.take(']') {
                if has_comma {
                    continue;
                }
                return Err(self.unexpected("`]`"));
            }
            self.skip_space();
            return if self.rest().is_empty() { Ok(calls) } else { Err(self.unexpected("the end")) };
        }
    }
}
