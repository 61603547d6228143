//! Answers in JSON objects, also in the syntax of Python.

use grpo_files::{long_digits, mark_long_integers};
use serde_json::Value;

/// The maximum length in bytes of an object.
const MAX_LENGTH: usize = 100_000;

/// The names of the answer's key, in lower case and without punctuation. The first of them that an object has counts.
const KEYS: &[&str] =
    &["finalanswer", "answer", "finalresult", "result", "final", "ans", "solution", "output", "response", "value"];

/// The maximum number of objects within each other.
const MAX_DEPTH: usize = 4;

/// Returns the value of the key `answer`, `result` or another name of [`KEYS`] of a JSON object: the whole text, the last block of code, or
/// the end of the text. The value may be an object with such a key. Quotes may be single, and the commands of LaTeX need no second backslash.
/// The items of a list are separated by commas, and an answer that is null or an object without such a key is empty.
pub(super) fn json_answer(text: &str) -> Option<String> {
    let text = without_tokens(text.trim());
    let blocks = text.split("```").skip(1).step_by(2).map(|block| block.trim_start_matches("json"));
    let answer = |text: &str| of_object(text.trim());
    answer(text).or_else(|| blocks.filter_map(answer).last()).or_else(|| answer(&text[start_of_last_object(text)?..]))
}

/// Removes special tokens such as `<|im_end|>` from the end of a text.
fn without_tokens(text: &str) -> &str {
    let start = text.strip_suffix("|>").and_then(|rest| rest.rfind("<|"));
    start.map_or(text, |start| without_tokens(text[..start].trim_end()))
}

fn of_object(text: &str) -> Option<String> {
    if !text.starts_with('{') || text.len() > MAX_LENGTH {
        return None;
    }
    let object: Value = serde_json::from_str(&mark_long_integers(&strict(text))).ok()?;
    let mut answer = value_of_answer(&object)?;
    for _ in 0..MAX_DEPTH {
        let Some(inside) = value_of_answer(answer) else { break };
        answer = inside;
    }
    Some(match answer {
        Value::Array(items) => items.iter().map(shown).collect::<Vec<_>>().join(", "),
        value => shown(value),
    })
}

/// Returns the value of the answer's key of an object.
fn value_of_answer(object: &Value) -> Option<&Value> {
    let object = object.as_object()?;
    let name = |key: &str| key.chars().filter(|c| c.is_alphanumeric()).collect::<String>().to_lowercase();
    KEYS.iter().find_map(|wanted| object.iter().find(|(key, _)| name(key) == *wanted).map(|(_, value)| value))
}

fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => with_commands(long_digits(text).unwrap_or(text)),
        Value::Number(number) => number.to_string(),
        Value::Bool(value) => value.to_string(),
        Value::Null | Value::Array(_) | Value::Object(_) => String::new(),
    }
}

/// Returns the position of the brace that opens the object at the end of a text.
fn start_of_last_object(text: &str) -> Option<usize> {
    let mut depth = 0usize;
    for (at, byte) in text.bytes().enumerate().rev().take(MAX_LENGTH) {
        match byte {
            b'}' => depth += 1,
            b'{' if depth <= 1 => return (depth == 1).then_some(at),
            b'{' => depth -= 1,
            _ if depth == 0 => return None,
            _ => {}
        }
    }
    None
}

/// Rewrites an object of Python or JavaScript as JSON: single quotes, `None`, `True` and keys without quotes. A backslash that begins no
/// escape of JSON is doubled.
fn strict(text: &str) -> String {
    let (mut json, mut chars, mut quote) = (String::with_capacity(text.len()), text.chars().peekable(), None);
    let mut word = String::new();
    while let Some(c) = chars.next() {
        if let Some(open) = quote {
            match c {
                '\\' => match chars.peek() {
                    Some('\'') => json.extend(chars.next()),
                    Some(escaped @ ('"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' | 'u')) => {
                        json.extend(['\\', *escaped]);
                        chars.next();
                    }
                    _ => json.push_str("\\\\"),
                },
                c if c == open => {
                    json.push('"');
                    quote = None;
                }
                '"' => json.push_str("\\\""),
                '\n' => json.push_str("\\n"),
                c => json.push(c),
            }
            continue;
        }
        if c.is_alphanumeric() || "_+-.".contains(c) {
            word.push(c);
            continue;
        }
        match std::mem::take(&mut word).as_str() {
            "None" => json.push_str("null"),
            "True" => json.push_str("true"),
            "False" => json.push_str("false"),
            name if c == ':' && !name.is_empty() => json.extend(["\"", name, "\""]),
            other => json.push_str(other),
        }
        match c {
            '\'' | '"' => {
                quote = Some(c);
                json.push('"');
            }
            c => json.push(c),
        }
    }
    json + &word
}

/// Restores the commands of LaTeX whose backslash and first letter are an escape of JSON: `\frac`, `\beta`, `\text`, `\rho` and `\neq`.
fn with_commands(text: &str) -> String {
    let (mut kept, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(c) = rest.chars().next() {
        rest = &rest[c.len_utf8()..];
        let is_name = rest.starts_with(|c: char| c.is_ascii_lowercase());
        match c {
            '\u{c}' => kept.push_str("\\f"),
            '\u{8}' => kept.push_str("\\b"),
            '\t' if is_name => kept.push_str("\\t"),
            '\r' if is_name => kept.push_str("\\r"),
            '\n' if rest.starts_with("eq") => kept.push_str("\\n"),
            c => kept.push(c),
        }
    }
    kept
}
