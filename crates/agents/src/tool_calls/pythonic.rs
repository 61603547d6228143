//! `[f(x=1), g(y='a')]` as the whole message: calls with keyword arguments, whose values are Python literals. OLMo 3 writes a call per line
//! between tags, LFM2 a list between tags.

use super::scan::no_calls;
use super::{DEEPEST, MOST_CALLS, Parsed, ToolCall, json_list};
use grpo_files::long_integer;
use serde_json::{Map, Number, Value};

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

/// Returns the value of a text that is a Python literal.
pub(super) fn literal(text: &str) -> Option<Value> {
    let mut reader = Reader { text, at: 0 };
    let value = reader.value(0).ok()?;
    reader.skip_space();
    reader.rest().is_empty().then_some(value)
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

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Reader<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn skip_space(&mut self) {
        self.at = self.text.len() - self.rest().trim_start().len();
    }

    /// Takes `next` behind white space, if it is there.
    fn take(&mut self, next: char) -> bool {
        self.skip_space();
        let is_next = self.rest().starts_with(next);
        self.at += if is_next { next.len_utf8() } else { 0 };
        is_next
    }

    fn expect(&mut self, next: char) -> Result<(), String> {
        if self.take(next) { Ok(()) } else { Err(self.unexpected(&format!("`{next}`"))) }
    }

    fn unexpected(&self, expected: &str) -> String {
        let found: String = self.rest().chars().take(20).collect();
        format!("expected {expected} in the tool call, got `{found}`")
    }

    fn name(&mut self) -> Option<&'a str> {
        self.skip_space();
        let rest = self.rest();
        let legal = |c: char| c.is_ascii_alphanumeric() || "_.".contains(c);
        let length = rest.find(|c| !legal(c)).unwrap_or(rest.len());
        let name = &rest[..length];
        let begins = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
        self.at += if begins { length } else { 0 };
        begins.then_some(name)
    }

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

    fn value(&mut self, depth: usize) -> Result<Value, String> {
        if depth > DEEPEST {
            return Err(format!("expected at most {DEEPEST} nested values in the tool call"));
        }
        self.skip_space();
        match self.rest().chars().next() {
            Some(quote @ ('"' | '\'')) => self.text_in(quote).map(Value::from),
            Some('[') => {
                self.at += 1;
                let mut list = Vec::new();
                while !self.take(']') {
                    list.push(self.value(depth + 1)?);
                    if !self.take(',') {
                        self.expect(']')?;
                        break;
                    }
                }
                Ok(list.into())
            }
            Some('{') => {
                self.at += 1;
                let mut fields = Map::new();
                while !self.take('}') {
                    let Value::String(key) = self.value(depth + 1)? else {
                        return Err(self.unexpected("keys that are texts"));
                    };
                    self.expect(':')?;
                    let value = self.value(depth + 1)?;
                    fields.insert(key, value);
                    if !self.take(',') {
                        self.expect('}')?;
                        break;
                    }
                }
                Ok(fields.into())
            }
            Some(first) if first.is_ascii_digit() || "+-.".contains(first) => self.number(),
            _ => match self.name() {
                Some("True" | "true") => Ok(true.into()),
                Some("False" | "false") => Ok(false.into()),
                Some("None" | "null") => Ok(Value::Null),
                _ => Err(self.unexpected("a literal")),
            },
        }
    }

    fn number(&mut self) -> Result<Value, String> {
        let rest = self.rest();
        let length = rest.find(|c: char| !(c.is_ascii_digit() || "+-.eE_".contains(c))).unwrap_or(rest.len());
        let digits = rest[..length].replace('_', "");
        let digits = digits.strip_prefix('+').unwrap_or(&digits);
        let float = || digits.parse().ok().and_then(Number::from_f64).map(Value::from);
        let number = long_integer(digits).or_else(float);
        let number = number.ok_or_else(|| self.unexpected("a number"))?;
        self.at += length;
        Ok(number)
    }

    /// Returns `true` if what follows `length` bytes can follow a text.
    fn closes(&self, length: usize) -> bool {
        let next = self.rest()[length..].trim_start().chars().next();
        next.is_none_or(|next| ",)]}:".contains(next))
    }

    fn text_in(&mut self, quote: char) -> Result<String, String> {
        let (mut text, mut chars) = (String::new(), self.rest().char_indices().skip(1));
        while let Some((at, c)) = chars.next() {
            match c {
                // LFM2's template writes quotes within texts without a backslash.
                _ if c == quote && self.closes(at + c.len_utf8()) => {
                    self.at += at + c.len_utf8();
                    return Ok(text);
                }
                '\\' => match chars.next() {
                    Some((_, 'n')) => text.push('\n'),
                    Some((_, 't')) => text.push('\t'),
                    Some((_, 'r')) => text.push('\r'),
                    Some((_, '\n')) => {}
                    Some((_, kind @ ('x' | 'u' | 'U'))) => {
                        let count = match kind {
                            'x' => 2,
                            'u' => 4,
                            _ => 8,
                        };
                        let digits: String = chars.by_ref().take(count).map(|(_, c)| c).collect();
                        let code = u32::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == count);
                        let Some(c) = code.and_then(char::from_u32) else {
                            return Err(
                                self.unexpected(&format!("{count} hexadecimal digits of a character behind \\{kind}"))
                            );
                        };
                        text.push(c);
                    }
                    Some((_, c @ ('\\' | '\'' | '"'))) => text.push(c),
                    Some((_, c)) => text.extend(['\\', c]),
                    None => break,
                },
                c => text.push(c),
            }
        }
        Err(self.unexpected(&format!("a text that ends with {quote}")))
    }
}
