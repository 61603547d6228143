//! `<|tool_call>call:NAME{key:VALUE}<tool_call|>`: values are numbers, `true`, `false`, `null`, lists, objects, and texts between `<|"|>`.

use super::scan::{blocks, json, properties, shown, typed};
use super::{DEEPEST, Parsed, ToolCall};
use serde_json::{Map, Value};

/// The tags of a version of the format.
pub(super) struct Tags {
    pub(super) start: &'static str,
    end: &'static str,
    quote: &'static str,
}

pub(super) const GEMMA4: Tags = Tags { start: "<|tool_call>", end: "<tool_call|>", quote: "<|\"|>" };
pub(super) const FUNCTION_GEMMA: Tags =
    Tags { start: "<start_function_call>", end: "<end_function_call>", quote: "<escape>" };

pub(super) fn parse(text: &str, tags: &Tags, tools: &Value) -> Parsed {
    let (content, blocks) = blocks(text, tags.start, tags.end);
    Parsed { content, calls: blocks.into_iter().map(|block| call(block, tags, tools)).collect() }
}

fn call(block: &str, tags: &Tags, tools: &Value) -> Result<ToolCall, String> {
    let expected = || format!("expected `call:NAME{{KEY:VALUE}}` in the tool call, got `{}`", shown(block));
    let (name, rest) = block.strip_prefix("call:").and_then(|rest| rest.split_once('{')).ok_or_else(expected)?;
    let name = name.trim();
    if name.is_empty() {
        return Err(expected());
    }
    let mut reader = Reader { rest, quote: tags.quote };
    let mut arguments = reader.fields(0)?;
    if !reader.rest.trim().is_empty() {
        return Err(format!("expected the end of the tool call, got `{}`", shown(reader.rest.trim())));
    }
    for (key, value) in &mut arguments {
        if let Some(schema) = properties(tools, name).and_then(|properties| properties.get(key)) {
            convert(value, schema, 0);
        }
    }
    Ok(ToolCall { id: None, name: name.to_owned(), arguments })
}

/// Converts texts to the types of a schema, and other values whose schema has texts to texts.
fn convert(value: &mut Value, schema: &Value, depth: usize) {
    if depth > DEEPEST {
        return;
    }
    match value {
        Value::Array(items) => items.iter_mut().for_each(|item| convert(item, &schema["items"], depth + 1)),
        Value::Object(fields) => {
            fields.iter_mut().for_each(|(key, value)| convert(value, &schema["properties"][key], depth + 1));
        }
        _ if schema.is_null() => {}
        Value::String(text) if grpo_files::long_digits(text).is_none() => *value = typed(text, Some(schema)),
        Value::Number(_) | Value::Bool(_) if schema["type"] == "string" => *value = value.to_string().into(),
        Value::Number(_) if schema["type"] == "boolean" => *value = typed(&value.to_string(), Some(schema)),
        _ => {}
    }
}

struct Reader<'a> {
    rest: &'a str,
    quote: &'static str,
}

impl<'a> Reader<'a> {
    /// Takes `next` behind white space, if it is there.
    fn take(&mut self, next: &str) -> bool {
        let behind = self.rest.trim_start().strip_prefix(next);
        self.rest = behind.unwrap_or(self.rest);
        behind.is_some()
    }

    fn unexpected(&self, expected: &str) -> String {
        format!("expected {expected} in the tool call, got `{}`", shown(self.rest))
    }

    /// Returns the text up to the next quote.
    fn text(&mut self) -> Result<&'a str, String> {
        let (text, behind) = self.rest.split_once(self.quote).ok_or_else(|| self.unexpected(self.quote))?;
        self.rest = behind;
        Ok(text)
    }

    /// Reads fields behind `{`, and `}`.
    fn fields(&mut self, depth: usize) -> Result<Map<String, Value>, String> {
        let mut fields = Map::new();
        while !self.take("}") {
            let key = match self.take(self.quote) {
                true => self.text()?,
                false => {
                    let rest = self.rest.trim_start();
                    let end = rest.find([':', '}', '{', ',']).filter(|end| rest[*end..].starts_with(':'));
                    let (key, behind) = rest.split_at(end.ok_or_else(|| self.unexpected("`KEY:`"))?);
                    self.rest = behind;
                    key.trim()
                }
            };
            if !self.take(":") {
                return Err(self.unexpected("`:`"));
            }
            let value = self.value(depth)?;
            fields.insert(key.to_owned(), value);
            if !self.take(",") && !self.rest.trim_start().starts_with('}') {
                return Err(self.unexpected("`,` or `}`"));
            }
        }
        Ok(fields)
    }

    fn value(&mut self, depth: usize) -> Result<Value, String> {
        if depth > DEEPEST {
            return Err(format!("expected at most {DEEPEST} nested values in the tool call"));
        }
        if self.take(self.quote) {
            return Ok(self.text()?.into());
        }
        if self.take("{") {
            return Ok(self.fields(depth + 1)?.into());
        }
        if self.take("[") {
            let mut list = Vec::new();
            while !self.take("]") {
                list.push(self.value(depth + 1)?);
                if !self.take(",") && !self.rest.trim_start().starts_with(']') {
                    return Err(self.unexpected("`,` or `]`"));
                }
            }
            return Ok(list.into());
        }
        let end = self.rest.find([',', '}', ']']).ok_or_else(|| self.unexpected("a value and `}`"))?;
        let (text, behind) = self.rest.split_at(end);
        let text = text.trim();
        if text.is_empty() {
            return Err(self.unexpected("a value"));
        }
        self.rest = behind;
        // A text without quotes is a text.
        Ok(json(text).unwrap_or_else(|_| text.into()))
    }
}
