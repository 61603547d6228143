//! The filter `tojson`, which is `json.dumps` in the templates of `transformers`.

use super::python::{items, number, pairs, text};
use crate::tokenizer::marks::is_mark;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};
use std::fmt::Write;

/// How a value is written.
struct Style {
    ensure_ascii: bool,
    /// What a level is indented by; without it everything is on one line.
    indent: Option<String>,
    /// What stands between items, and between a key and its value.
    separators: (String, String),
    sort_keys: bool,
}

/// `json.dumps(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(
    value: &Value,
    ensure_ascii: Option<bool>,
    indent: Option<Value>,
    options: Kwargs,
) -> Result<Value, Error> {
    let ensure_ascii = match ensure_ascii {
        Some(given) => Some(given),
        None => options.get("ensure_ascii")?,
    };
    let indent: Option<Value> = match indent {
        Some(given) => Some(given),
        None => options.get("indent")?,
    };
    let indent = match indent.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(indent)?),
        }),
    };
    let between = if indent.is_some() { "," } else { ", " };
    let separators = match options.get::<Option<Vec<String>>>("separators")?.as_deref() {
        Some([items, keys]) => (items.clone(), keys.clone()),
        Some(other) => return Err(invalid(format!("tojson: expected two separators, got {}", other.len()))),
        None => (between.to_owned(), ": ".to_owned()),
    };
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let mut out = String::new();
    Style { ensure_ascii: ensure_ascii.unwrap_or(false), indent, separators, sort_keys }.write(value, 0, &mut out)?;
    Ok(Value::from(out))
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

impl Style {
    fn write(&self, value: &Value, level: usize, out: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(match number(value).as_str() {
                "nan" => "NaN",
                "inf" => "Infinity",
                "-inf" => "-Infinity",
                finite => finite,
            }),
            ValueKind::String => self.quoted(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = items(value).collect();
                self.list(('[', ']'), items, level, out, |item, out| self.write(&item, level + 1, out))?;
            }
            ValueKind::Map => {
                let mut pairs: Vec<(String, Value)> =
                    pairs(value).map(|(key, value)| (key_text(&key), value)).collect();
                if self.sort_keys {
                    pairs.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.list(('{', '}'), pairs, level, out, |(key, value), out| {
                    self.quoted(&key, out);
                    out.push_str(&self.separators.1);
                    self.write(&value, level + 1, out)
                })?;
            }
            other => return Err(invalid(format!("tojson: an object of type {other} is not JSON serializable"))),
        }
        Ok(())
    }

    fn list<T>(
        &self,
        brackets: (char, char),
        items: Vec<T>,
        level: usize,
        out: &mut String,
        mut write: impl FnMut(T, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(brackets.0);
        let is_empty = items.is_empty();
        for (index, item) in items.into_iter().enumerate() {
            if index > 0 {
                out.push_str(&self.separators.0);
            }
            self.line(level + 1, out);
            write(item, out)?;
        }
        if !is_empty {
            self.line(level, out);
        }
        out.push(brackets.1);
        Ok(())
    }

    /// The beginning of a line at `level`, where values have lines of their own.
    fn line(&self, level: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.push_str(&indent.repeat(level));
        }
    }

    fn quoted(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            // Writing to a string does not fail.
            let _ = match c {
                '"' => write!(out, "\\\""),
                '\\' => write!(out, "\\\\"),
                '\n' => write!(out, "\\n"),
                '\r' => write!(out, "\\r"),
                '\t' => write!(out, "\\t"),
                '\u{8}' => write!(out, "\\b"),
                '\u{c}' => write!(out, "\\f"),
                c if (c as u32) < 0x20 => write!(out, "\\u{:04x}", c as u32),
                // Marks are no part of the text and have to be found again.
                c if self.ensure_ascii && (c as u32) > 0x7e && !is_mark(c) => {
                    c.encode_utf16(&mut [0; 2]).iter().try_for_each(|unit| write!(out, "\\u{unit:04x}"))
                }
                c => write!(out, "{c}"),
            };
        }
        out.push('"');
    }
}

/// The key of an object: JSON's words for what is no string in Python.
fn key_text(key: &Value) -> String {
    match key.kind() {
        ValueKind::None => "null".into(),
        ValueKind::Bool => if key.is_true() { "true" } else { "false" }.into(),
        _ => text(key),
    }
}
