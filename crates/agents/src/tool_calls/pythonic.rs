//! `[f(x=1), g(y='a')]` as the whole message: calls with keyword arguments, whose values are Python literals. OLMo 3 writes a call per line
//! between tags.

use super::{Parsed, ToolCall};
use serde_json::{Map, Number, Value};

/// The deepest nesting of values.
const DEEPEST: usize = 32;

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

/// Reads `<function_calls>`, calls separated by white space, and `</function_calls>`.
pub(super) fn parse_olmo3(text: &str) -> Parsed {
    let Some((before, behind)) = text.split_once("<function_calls>") else {
        return Parsed { content: text.trim().to_owned(), calls: Vec::new() };
    };
    let (inside, after) = behind.split_once("</function_calls>").unwrap_or((behind, ""));
    let (mut reader, mut calls) = (Reader { text: inside.trim(), at: 0 }, Vec::new());
    while !reader.rest().is_empty() {
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
        let is_there = self.rest().starts_with(next);
        self.at += if is_there { next.len_utf8() } else { 0 };
        is_there
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
        Ok(ToolCall { name, arguments })
    }

    fn calls(&mut self) -> Result<Vec<ToolCall>, String> {
        let mut calls = Vec::new();
        loop {
            calls.push(self.call()?);
            let goes_on = self.take(',');
            if !self.take(']') {
                if goes_on {
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
        let number = digits.parse::<i64>().ok().map(Value::from).or_else(float);
        let number = number.ok_or_else(|| self.unexpected("a number"))?;
        self.at += length;
        Ok(number)
    }

    fn text_in(&mut self, quote: char) -> Result<String, String> {
        let (mut text, mut chars) = (String::new(), self.rest().char_indices().skip(1));
        while let Some((at, c)) = chars.next() {
            match c {
                _ if c == quote => {
                    self.at += at + c.len_utf8();
                    return Ok(text);
                }
                '\\' => match chars.next() {
                    Some((_, 'n')) => text.push('\n'),
                    Some((_, 't')) => text.push('\t'),
                    Some((_, 'r')) => text.push('\r'),
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
