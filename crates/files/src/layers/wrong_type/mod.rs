//! Errors of types: the dotted key, the expected value, and the given value.
//!
//! serde reports Rust's types, and loses the path within flattened and untagged parts. [`explain`] finds the key by setting the keys of the
//! layer one at a time.

use super::kind;
use crate::secrets::{HIDDEN, Secrets, redact};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use serde_path_to_error::Segment;

/// The length limit of a value in an error, in characters.
const LONGEST: usize = 80;

/// Returns the one-line error for a layer with an invalid value: `layer` is applied to `before`, a valid `T`, and `merged` is not valid.
pub(super) fn explain<T: DeserializeOwned>(
    error: &serde_path_to_error::Error<serde_json::Error>,
    before: &Value,
    layer: &Value,
    merged: &Value,
) -> String {
    let message = error.inner().to_string();
    let mut place: Vec<Part> = error.path().iter().filter_map(Part::of).collect();
    let is_about_value = is_about_type(&message) || message.starts_with("unknown variant ");
    // A section given for a value is itself the error: its keys are not searched.
    if is_about_value && !message.starts_with("invalid type: map") {
        let fault = leaves(layer).into_iter().find(|leaf| is_fault::<T>(before, leaf, &place, &message));
        place = fault.map_or(place, |(leaf, _)| leaf);
    }
    if let Some(field) = message.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`')) {
        place.push(Part::Key(field.to_owned()));
        return format!("key `{}`: expected a value, and the key is missing", dotted(&place));
    }
    let (key, given) = (dotted(&place), at(merged, &place));
    let mut public = merged.clone();
    redact(&mut public);
    let public = at(&public, &place).cloned().unwrap_or_default();
    let command = given.and_then(|given| command_words(given, &place));
    let shown = given.map(|given| shown(&public, given, &place, command.as_deref()));
    let Some(expected) = expected(&message) else {
        // A message of this program, or of serde about a variant name.
        let message = Secrets::of(merged).hide(&message);
        let has_value = message.contains("got ") || !message.starts_with("expected ");
        return match shown.filter(|_| !has_value) {
            Some(shown) => format!("key `{key}`: {message}, got {shown}"),
            None => format!("key `{key}`: {message}"),
        };
    };
    let (Some(given), Some(shown)) = (given, shown) else { return format!("key `{key}`: expected {expected}") };
    let expected = match expected {
        // An enum: an unknown name produces an error with the valid names.
        "string or map" => variants::<T>(merged, &place).unwrap_or_else(|| "a text or a map of keys".into()),
        expected => words(expected, given),
    };
    let example = if expected == "a list" { example(&public, given, &place, command) } else { None };
    let example = example.map_or_else(String::new, |example| format!(", e.g. `{example}`"));
    format!("key `{key}`: expected {expected}, got {shown}{example}")
}

#[derive(Clone, Debug, PartialEq)]
enum Part {
    Key(String),
    Index(usize),
}

impl Part {
    fn of(segment: &Segment) -> Option<Self> {
        match segment {
            Segment::Map { key } => Some(Self::Key(key.clone())),
            Segment::Seq { index } => Some(Self::Index(*index)),
            Segment::Enum { .. } | Segment::Unknown => None,
        }
    }
}

fn dotted(place: &[Part]) -> String {
    let mut text = String::new();
    for part in place {
        match part {
            Part::Key(key) if text.is_empty() => text.push_str(key),
            Part::Key(key) => text.push_str(&format!(".{key}")),
            Part::Index(index) => text.push_str(&format!("[{index}]")),
        }
    }
    text
}

fn at<'a>(value: &'a Value, place: &[Part]) -> Option<&'a Value> {
    place.iter().try_fold(value, |value, part| match part {
        Part::Key(key) => value.get(key),
        Part::Index(index) => value.get(index),
    })
}

/// Sets the value at `place` and creates missing sections.
fn set(root: &mut Value, place: &[Part], new: Value) {
    match place.split_first() {
        Some((Part::Key(key), below)) => {
            if !root.is_object() {
                *root = Value::Object(Map::new());
            }
            if let Value::Object(map) = root {
                set(map.entry(key.as_str()).or_insert(Value::Null), below, new);
            }
        }
        Some((Part::Index(index), below)) => {
            if let Some(entry) = root.get_mut(index) {
                set(entry, below, new);
            }
        }
        None => *root = new,
    }
}

/// Returns the values of a layer with their paths, without sections.
fn leaves(layer: &Value) -> Vec<(Vec<Part>, Value)> {
    let Value::Object(map) = layer else { return vec![(vec![], layer.clone())] };
    let below = map.iter().flat_map(|(key, value)| {
        leaves(value).into_iter().map(|(mut place, value)| {
            place.insert(0, Part::Key(key.clone()));
            (place, value)
        })
    });
    below.collect()
}

/// Returns `true` if the value of `leaf`, which is below `place`, alone causes the error `message`.
fn is_fault<T: DeserializeOwned>(
    before: &Value,
    (leaf, value): &(Vec<Part>, Value),
    place: &[Part],
    message: &str,
) -> bool {
    if leaf.len() <= place.len() || !leaf.starts_with(place) {
        return false;
    }
    let mut alone = before.clone();
    set(&mut alone, leaf, value.clone());
    T::deserialize(alone).is_err_and(|error| error.to_string() == message)
}

fn is_about_type(message: &str) -> bool {
    ["invalid type: ", "invalid value: ", "invalid length "].iter().any(|start| message.starts_with(start))
}

/// Returns serde's name of the expected type; `None` for messages that are not about types.
fn expected(message: &str) -> Option<&str> {
    message.rsplit_once(", expected ").map(|(_, expected)| expected).filter(|_| is_about_type(message))
}

/// Returns plain words for serde's name of a type.
fn words(expected: &str, given: &Value) -> String {
    let range = |most: u64| match given.as_u64().is_some_and(|given| given > most) {
        true => format!("a whole number of at most {most}"),
        false => "a whole number that is not negative".into(),
    };
    match expected {
        "u8" => range(u8::MAX.into()),
        "u16" => range(u16::MAX.into()),
        "u32" => range(u32::MAX.into()),
        "u64" | "usize" => range(u64::MAX),
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number".into(),
        "f32" | "f64" => "a number".into(),
        "a boolean" => "true or false".into(),
        "a string" | "a borrowed string" | "a character" => "a text".into(),
        "path string" => "a path".into(),
        "a sequence" => "a list".into(),
        "a map" => "a map of keys".into(),
        _ if expected.starts_with("struct ") => "a map of keys".into(),
        _ if expected.starts_with("a tuple of size ") => {
            expected.replacen("a tuple of size ", "a list of this number of values: ", 1)
        }
        _ => expected.to_owned(),
    }
}

/// Returns the valid names of the enum at `place`.
fn variants<T: DeserializeOwned>(merged: &Value, place: &[Part]) -> Option<String> {
    let mut other = merged.clone();
    set(&mut other, place, Value::from("?"));
    let message = T::deserialize(other).err()?.to_string();
    message.strip_prefix("unknown variant `?`, expected ").map(str::to_owned)
}

/// Formats the value at `place` for an error. `public` is the value without secrets, `command` are its words if it is a command.
fn shown(public: &Value, given: &Value, place: &[Part], command: Option<&[String]>) -> String {
    let is_command = given.is_string() && matches!(place.last(), Some(Part::Key(key)) if key == "command");
    let text = match (public, command) {
        (_, Some(words)) => Value::from(words.join(" ")).to_string(),
        _ if is_command => Value::from(HIDDEN).to_string(),
        (Value::Null, _) => return "nothing (null)".into(),
        (Value::Object(_) | Value::Array(_), _) => return kind(public).into(),
        (Value::String(_) | Value::Number(_) | Value::Bool(_), _) => public.to_string(),
    };
    let more = if text.chars().nth(LONGEST).is_some() { "..." } else { "" };
    let text: String = text.chars().take(LONGEST).collect();
    let kind = match given {
        Value::Bool(_) => "",
        Value::Number(_) => "the number ",
        _ => "the text ",
    };
    format!("{kind}{text}{more}")
}

/// Returns `key: [...]` with the words of a value that was given for a list; `None` if it has no words.
fn example(public: &Value, given: &Value, place: &[Part], command: Option<Vec<String>>) -> Option<String> {
    let Some(Part::Key(key)) = place.last() else { return None };
    let words = match (given, command) {
        (_, Some(words)) => words,
        (Value::String(text), None) if public == given => words_of(text),
        (Value::Number(number), None) => vec![number.to_string()],
        _ => vec![],
    };
    let words: Vec<String> = words.iter().map(|word| quoted(word)).collect();
    (!words.is_empty()).then(|| format!("{key}: [{}]", words.join(", ")))
}

/// Splits a list that was written as text: at commas, or else at blanks.
fn words_of(text: &str) -> Vec<String> {
    let inner = text.trim().trim_start_matches('[').trim_end_matches(']');
    let words: Vec<&str> = match inner.contains(',') {
        true => inner.split(',').collect(),
        false => inner.split_whitespace().collect(),
    };
    let bare = words.into_iter().map(|word| word.trim().trim_matches(['"', '\'']).to_owned());
    bare.filter(|word| !word.is_empty()).collect()
}

/// Splits a command that was written as text as a shell does, without secrets; `None` for other keys.
fn command_words(given: &Value, place: &[Part]) -> Option<Vec<String>> {
    let (Value::String(text), Some(Part::Key(key))) = (given, place.last()) else { return None };
    if key != "command" {
        return None;
    }
    let words = shlex::split(text).unwrap_or_else(|| text.split_whitespace().map(str::to_owned).collect());
    // `KEY=value judge.py` starts with a variable, not with a program.
    if words.first().is_some_and(|program| program.contains('=')) {
        return None;
    }
    let mut command = serde_json::json!({ "command": words });
    redact(&mut command);
    serde_json::from_value(command["command"].take()).ok()
}

/// Quotes a word for a YAML list if necessary.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-~+".contains(c);
    let is_special = ["true", "false", "null", "yes", "no", "~", "-"].contains(&word.to_lowercase().as_str());
    let begins = word.starts_with(|c: char| c.is_ascii_alphanumeric() || "/._".contains(c)) || word.starts_with('-');
    if !word.is_empty() && word.chars().all(is_plain) && begins && !is_special {
        word.to_owned()
    } else {
        Value::from(word).to_string()
    }
}

#[cfg(test)]
mod tests;
