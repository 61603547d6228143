//! Formats and sorts values like Python.

use super::limits::{MAX_DEPTH, MAX_OUTPUT, Text, WAY_OUT, invalid, steps, too_deep};
use grpo_files::LONG_INTEGER_MARK;
use minijinja::value::{ArgType, Kwargs, Tuple, Value, ValueKind};
use minijinja::{Error, Output, State};
use regex::Regex;
use std::fmt::Write;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Returns `str(value)`, and an empty text for an undefined value.
pub(super) fn text(value: &Value) -> Result<String, Error> {
    let mut out = Text::default();
    add_text(value, &mut out)?;
    Ok(out.into_string())
}

/// Returns `str(value)`, and charges for it.
pub(super) fn charged_text(state: &State<'_, '_>, value: &Value) -> Result<String, Error> {
    let mut out = Text::default();
    add_text(value, &mut out)?;
    state.consume_fuel(out.steps())?;
    Ok(out.into_string())
}

/// Adds `str(value)`.
pub(super) fn add_text(value: &Value, out: &mut Text) -> Result<(), Error> {
    match (value.kind(), value.as_str()) {
        (ValueKind::Undefined, _) => Ok(()),
        (_, Some(text)) => out.push(text),
        _ => repr(value, 0, out),
    }
}

/// Returns a formatter that writes values as Python does, and fails at [`MAX_OUTPUT`]. All written text counts, including the text of macros
/// and blocks.
pub(super) fn formatter() -> impl Fn(&mut Output<'_>, &mut State<'_, '_>, &Value) -> Result<(), Error> + Send + Sync {
    let written = AtomicUsize::new(0);
    move |out, state, value| {
        let mut made = Text::default();
        let text = match value.as_str() {
            Some(text) => text,
            None => {
                add_text(value, &mut made)?;
                state.consume_fuel(made.steps())?;
                made.as_str()
            }
        };
        if written.fetch_add(text.len(), Ordering::Relaxed).saturating_add(text.len()) > MAX_OUTPUT {
            return Err(invalid(format!("it renders more than {} MiB of text; {WAY_OUT}", MAX_OUTPUT >> 20)));
        }
        state.consume_fuel(steps(text.len()))?;
        Ok(out.write_str(text)?)
    }
}

/// Returns `repr(value)`.
pub(super) fn repr_of(value: &Value) -> Result<String, Error> {
    let mut out = Text::default();
    repr(value, 0, &mut out)?;
    Ok(out.into_string())
}

/// Returns an argument of a filter or method: the positional one, or the one of this name.
pub(super) fn argument<'a, T>(given: Option<T>, options: &'a Kwargs, name: &'a str) -> Result<Option<T>, Error>
where
    Option<T>: ArgType<'a, Output = Option<T>>,
{
    if given.is_some() { Ok(given) } else { options.get(name) }
}

/// Returns `text.splitlines(keepends)`.
pub(super) fn lines(text: &str, keeps_ends: bool) -> Vec<&str> {
    const ENDS: [char; 10] =
        ['\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}', '\u{2029}'];
    let mut lines = vec![];
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(ENDS).unwrap_or(rest.len());
        let length =
            if rest[end..].starts_with("\r\n") { 2 } else { rest[end..].chars().next().map_or(0, char::len_utf8) };
        lines.push(&rest[..if keeps_ends { end + length } else { end }]);
        rest = &rest[end + length..];
    }
    lines
}

/// Appends `repr(value)`.
fn repr(value: &Value, depth: usize, out: &mut Text) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(too_deep());
    }
    match value.kind() {
        ValueKind::None => out.push("None"),
        ValueKind::Bool => out.push(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push(&number(value)),
        ValueKind::String => out.push(&quoted(value.as_str().unwrap_or_default())),
        ValueKind::Seq => {
            let is_tuple = value.downcast_object_ref::<Tuple>().is_some();
            out.push(if is_tuple { "(" } else { "[" })?;
            let mut count = 0;
            for item in items(value) {
                if count > 0 {
                    out.push(", ")?;
                }
                repr(&item, depth + 1, out)?;
                count += 1;
            }
            out.push(match (is_tuple, count) {
                (false, _) => "]",
                (true, 1) => ",)",
                (true, _) => ")",
            })
        }
        ValueKind::Map => {
            out.push("{")?;
            for (index, (key, value)) in pairs(value).enumerate() {
                if index > 0 {
                    out.push(", ")?;
                }
                repr(&key, depth + 1, out)?;
                out.push(": ")?;
                repr(&value, depth + 1, out)?;
            }
            out.push("}")
        }
        _ => out.push_display(value),
    }
}

/// Returns the items of a list.
pub(super) fn items(value: &Value) -> impl Iterator<Item = Value> {
    value.try_iter().into_iter().flatten()
}

/// Returns the keys and values of a dictionary.
pub(super) fn pairs(value: &Value) -> impl Iterator<Item = (Value, Value)> {
    items(value).map(|key| {
        let item = value.get_item(&key).unwrap_or_default();
        (key, item)
    })
}

/// Formats a number: integers as they are, others like `repr(float)`.
pub(super) fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(number) if !value.is_integer() => float(number),
        _ => value.to_string(),
    }
}

/// Formats a float like `repr`: the shortest digits that round-trip, with an exponent below 1e-4 and from 1e16 on.
fn float(number: f64) -> String {
    // Rust has the same limits, and writes exponents without a sign and zeros.
    let text = format!("{number:?}").to_lowercase();
    match text.split_once('e') {
        Some((digits, exponent)) => format!("{digits}e{:+03}", exponent.parse::<i32>().unwrap_or_default()),
        None => text,
    }
}

/// Returns `str.isprintable` of a character: neither a separator, except the space, nor a control, format, private or unassigned one.
fn is_printable(c: char) -> bool {
    static OTHERS: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"[\p{C}\p{Z}]").ok());
    c == ' ' || OTHERS.as_ref().is_none_or(|others| !others.is_match(c.encode_utf8(&mut [0; 4])))
}

/// Quotes a string, with double quotes only if it contains single but no double ones.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        // Writing to a string cannot fail.
        let _ = match c {
            '\n' => write!(out, "\\n"),
            '\r' => write!(out, "\\r"),
            '\t' => write!(out, "\\t"),
            '\\' => write!(out, "\\\\"),
            c if c == quote => write!(out, "\\{c}"),
            ' '..='~' | LONG_INTEGER_MARK => write!(out, "{c}"),
            c if is_printable(c) => write!(out, "{c}"),
            c if c <= '\u{ff}' => write!(out, "\\x{:02x}", c as u32),
            c if c <= '\u{ffff}' => write!(out, "\\u{:04x}", c as u32),
            c => write!(out, "\\U{:08x}", c as u32),
        };
    }
    out.push(quote);
    out
}

/// Jinja's test `iterable`: returns `true` if `iter(value)` succeeds, including strings and undefined values.
pub(super) fn is_iterable(value: &Value) -> bool {
    use ValueKind::{Iterable, Map, Seq, String, Undefined};
    matches!(value.kind(), String | Seq | Map | Iterable | Undefined)
}

/// Jinja's test `sequence`: returns `true` if the value has a length and items, including dictionaries and strings.
pub(super) fn is_sequence(value: &Value) -> bool {
    use ValueKind::{Map, Seq, String, Undefined};
    matches!(value.kind(), String | Seq | Map | Undefined)
}
