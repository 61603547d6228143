//! The filter `tojson`, which is `json.dumps` in the templates of `transformers`.

use super::limits::{MAX_DEPTH, Text, invalid, too_deep};
use super::python::{argument, items, number, pairs, text};
use crate::tokenizer::marks::is_mark;
use grpo_files::LONG_INTEGER_MARK;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, State};
use std::fmt::Write;

/// The limit of indentation per level.
const MAX_INDENT: usize = 1 << 10;

/// The formatting of JSON.
struct Style {
    ensure_ascii: bool,
    /// The indentation per level; `None` writes a single line.
    indent: Option<String>,
    /// The text between items, and between a key and its value.
    separators: (String, String),
    sort_keys: bool,
}

/// Computes `json.dumps(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(
    state: &State<'_, '_>,
    value: &Value,
    ensure_ascii: Option<bool>,
    indent: Option<Value>,
    options: Kwargs,
) -> Result<Value, Error> {
    let ensure_ascii = argument(ensure_ascii, &options, "ensure_ascii")?.unwrap_or(false);
    let indent = match argument(indent, &options, "indent")?.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => match usize::try_from(indent)? {
                spaces if spaces <= MAX_INDENT => " ".repeat(spaces),
                spaces => {
                    return Err(invalid(format!("tojson: expected an indent of at most {MAX_INDENT}, got {spaces}")));
                }
            },
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
    let mut out = Text::default();
    Style { ensure_ascii, indent, separators, sort_keys }.write(value, 0, &mut out)?;
    state.consume_fuel(out.steps())?;
    Ok(Value::from(out.into_string()))
}

impl Style {
    fn write(&self, value: &Value, level: usize, out: &mut Text) -> Result<(), Error> {
        if level > MAX_DEPTH {
            return Err(too_deep());
        }
        match value.kind() {
            ValueKind::None => out.push("null"),
            ValueKind::Bool => out.push(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push(match number(value).as_str() {
                "nan" => "NaN",
                "inf" => "Infinity",
                "-inf" => "-Infinity",
                finite => finite,
            }),
            ValueKind::String => self.quoted(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                self.list(["[", "]"], items(value), level, out, |item, out| self.write(&item, level + 1, out))
            }
            ValueKind::Map => {
                let mut pairs: Vec<(String, Value)> =
                    pairs(value).map(|(key, value)| Ok((key_text(&key)?, value))).collect::<Result<_, Error>>()?;
                if self.sort_keys {
                    pairs.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.list(["{", "}"], pairs.into_iter(), level, out, |(key, value), out| {
                    self.quoted(&key, out)?;
                    out.push(&self.separators.1)?;
                    self.write(&value, level + 1, out)
                })
            }
            other => Err(invalid(format!("tojson: an object of type {other} is not JSON serializable"))),
        }
    }

    fn list<T>(
        &self,
        brackets: [&str; 2],
        items: impl Iterator<Item = T>,
        level: usize,
        out: &mut Text,
        mut write: impl FnMut(T, &mut Text) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(brackets[0])?;
        let mut is_empty = true;
        for item in items {
            if !is_empty {
                out.push(&self.separators.0)?;
            }
            is_empty = false;
            self.line(level + 1, out)?;
            write(item, out)?;
        }
        if !is_empty {
            self.line(level, out)?;
        }
        out.push(brackets[1])
    }

    /// Starts a line at `level`, if values have lines of their own.
    fn line(&self, level: usize, out: &mut Text) -> Result<(), Error> {
        let Some(indent) = &self.indent else { return Ok(()) };
        out.push("\n")?;
        (0..level).try_for_each(|_| out.push(indent))
    }

    fn quoted(&self, text: &str, out: &mut Text) -> Result<(), Error> {
        let quoted = serde_json::Value::from(text).to_string();
        if !self.ensure_ascii {
            return out.push(&quoted);
        }
        let mut ascii = String::with_capacity(quoted.len());
        for c in quoted.chars() {
            // Marks are kept unescaped, so that they can be found again.
            if c <= '~' || is_mark(c) || c == LONG_INTEGER_MARK {
                ascii.push(c);
            } else {
                // Writing to a string cannot fail.
                let _ = c.encode_utf16(&mut [0; 2]).iter().try_for_each(|unit| write!(ascii, "\\u{unit:04x}"));
            }
        }
        out.push(&ascii)
    }
}

/// Returns the key of an object as Python writes it, also for keys that are not strings.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::None => Ok("null".into()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.into()),
        _ => text(key),
    }
}
