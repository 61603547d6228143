//! Python's string methods that minijinja lacks or implements differently.

use super::limits::{MAX_OUTPUT, Text, invalid, steps, too_long};
use super::python::{self, argument};
use minijinja::value::{Kwargs, Tuple, Value, from_args};
use minijinja::{Error, State};

/// Returns the result of `text.method(*args)`; `None` for a method that is not in this module.
pub(super) fn method(state: &State<'_, '_>, text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let tuple = |parts: [&str; 3]| Value::from(Tuple::from(parts.map(Value::from).to_vec()));
    Ok(Some(match method {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "partition" => {
            let separator = separator(args)?;
            match text.split_once(separator) {
                Some((before, behind)) => tuple([before, separator, behind]),
                None => tuple([text, "", ""]),
            }
        }
        "rpartition" => {
            let separator = separator(args)?;
            match text.rsplit_once(separator) {
                Some((before, behind)) => tuple([before, separator, behind]),
                None => tuple(["", "", text]),
            }
        }
        "split" | "rsplit" => split(state, text, method == "rsplit", args)?,
        "splitlines" => {
            let (keeps_ends, options): (Option<bool>, Kwargs) = from_args(args)?;
            let keeps_ends = argument(keeps_ends, &options, "keepends")?.unwrap_or(false);
            options.assert_all_used()?;
            let lines = python::lines(text, keeps_ends);
            state.consume_fuel(lines.len() as u64)?;
            lines.into_iter().map(Value::from).collect()
        }
        "zfill" => {
            let (width,): (i64,) = from_args(args)?;
            let sign = text.len() - text.strip_prefix(['+', '-']).unwrap_or(text).len();
            let zeros = missing(state, text, width)?;
            Value::from(format!("{}{}{}", &text[..sign], "0".repeat(zeros), &text[sign..]))
        }
        "ljust" | "rjust" | "center" => {
            let (width, fill): (i64, Option<char>) = from_args(args)?;
            let (fill, missing) = (fill.unwrap_or(' '), missing(state, text, width)?);
            let left = match method {
                "ljust" => 0,
                "rjust" => missing,
                // Like CPython: if the width is odd, the extra character is on the left.
                _ => missing / 2 + (missing & usize::try_from(width).unwrap_or(0) & 1),
            };
            let fill = |count: usize| std::iter::repeat_n(fill, count).collect::<String>();
            Value::from(format!("{}{text}{}", fill(left), fill(missing - left)))
        }
        "expandtabs" => {
            let (size, options): (Option<i64>, Kwargs) = from_args(args)?;
            let size = argument(size, &options, "tabsize")?.unwrap_or(8);
            options.assert_all_used()?;
            Value::from(expanded(text, usize::try_from(size).unwrap_or(0))?)
        }
        "casefold" => {
            let () = from_args(args)?;
            // Full case folding, except for letters that fold to neither their lower case nor ss.
            Value::from(text.to_lowercase().replace('ß', "ss").replace('ς', "σ"))
        }
        "swapcase" => {
            let () = from_args(args)?;
            let swapped = text.chars().flat_map(|c| -> Vec<char> {
                if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() }
            });
            Value::from(swapped.collect::<String>())
        }
        "find" | "rfind" | "index" | "rindex" => {
            let found = position(text, method.starts_with('r'), args)?;
            match found {
                None if method.ends_with("index") => {
                    return Err(invalid(format!("{method}: substring not found")));
                }
                found => Value::from(found.map_or(-1, |at| at as i64)),
            }
        }
        _ => return Ok(predicate(text, method, args)?.map(Value::from)),
    }))
}

/// Returns the result of `text.method(*args)` for a method that tests the text; `None` for another method.
fn predicate(text: &str, method: &str, args: &[Value]) -> Result<Option<bool>, Error> {
    let holds = match method {
        "isdecimal" => !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()),
        "isidentifier" => {
            text.starts_with(|c: char| c.is_alphabetic() || c == '_')
                && text.chars().all(|c| c.is_alphanumeric() || c == '_')
        }
        "isprintable" => text.chars().all(|c| c == ' ' || !(c.is_control() || c.is_whitespace())),
        "istitle" => {
            let (mut is_title, mut is_inside, mut has_case) = (true, false, false);
            for c in text.chars() {
                let (upper, lower) = (c.is_uppercase(), c.is_lowercase());
                is_title &= if is_inside { !upper } else { !lower };
                (is_inside, has_case) = (upper || lower, has_case || upper || lower);
            }
            is_title && has_case
        }
        _ => return Ok(None),
    };
    let () = from_args(args)?;
    Ok(Some(holds))
}

fn separator(args: &[Value]) -> Result<&str, Error> {
    let (separator,): (&str,) = from_args(args)?;
    match separator {
        "" => Err(invalid("an empty separator")),
        separator => Ok(separator),
    }
}

/// Returns the number of characters that `text` needs to be `width` characters long.
fn missing(state: &State<'_, '_>, text: &str, width: i64) -> Result<usize, Error> {
    let width = usize::try_from(width).unwrap_or(0);
    if width > MAX_OUTPUT / 4 {
        return Err(too_long());
    }
    state.consume_fuel(steps(width))?;
    Ok(width.saturating_sub(text.chars().count()))
}

/// Returns `text.split(sep=None, maxsplit=-1)`, or `rsplit`.
fn split(state: &State<'_, '_>, text: &str, from_right: bool, args: &[Value]) -> Result<Value, Error> {
    let (separator, most, options): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let separator = argument(separator, &options, "sep")?;
    let most = argument(most, &options, "maxsplit")?.unwrap_or(-1);
    options.assert_all_used()?;
    let most = usize::try_from(most).unwrap_or(usize::MAX - 1);
    let separator = separator.filter(|separator| !separator.is_none());
    let mut parts: Vec<&str> = match separator.as_ref().map(|separator| separator.as_str()) {
        Some(Some("")) => return Err(invalid("split: an empty separator")),
        Some(Some(separator)) if from_right => text.rsplitn(most + 1, separator).collect(),
        Some(Some(separator)) => text.splitn(most + 1, separator).collect(),
        Some(None) => return Err(invalid("split: expected a text as separator")),
        None => words(text, from_right, most),
    };
    state.consume_fuel(parts.len() as u64)?;
    if from_right {
        parts.reverse();
    }
    Ok(parts.into_iter().map(Value::from).collect())
}

/// Splits a text into at most `most + 1` words; the last one is the rest. From the right, they are in reverse order.
fn words(text: &str, from_right: bool, most: usize) -> Vec<&str> {
    let mut parts = vec![];
    let mut rest = if from_right { text.trim_end() } else { text.trim_start() };
    while !rest.is_empty() {
        if parts.len() == most {
            parts.push(rest);
            break;
        }
        let end = if from_right { rest.rfind(char::is_whitespace) } else { rest.find(char::is_whitespace) };
        let (word, behind) = match (end, from_right) {
            (None, _) => (rest, ""),
            (Some(end), false) => (&rest[..end], rest[end..].trim_start()),
            (Some(end), true) => {
                let space = rest[end..].chars().next().map_or(0, char::len_utf8);
                (&rest[end + space..], rest[..end].trim_end())
            }
        };
        parts.push(word);
        rest = behind;
    }
    parts
}

/// Returns the position of `what` between the characters `start` and `end`, in characters.
fn position(text: &str, is_last: bool, args: &[Value]) -> Result<Option<usize>, Error> {
    let (what, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
    let length = text.chars().count() as i64;
    let place = |at: i64| usize::try_from(if at < 0 { (at + length).max(0) } else { at.min(length) }).unwrap_or(0);
    let (start, end) = (start.unwrap_or(0), place(end.unwrap_or(length)));
    if start > length || place(start) > end {
        return Ok(None);
    }
    let start = place(start);
    let byte = |at: usize| text.char_indices().nth(at).map_or(text.len(), |(at, _)| at);
    let inner = &text[byte(start)..byte(end)];
    let found = if is_last { inner.rfind(what) } else { inner.find(what) };
    Ok(found.map(|at| start + inner[..at].chars().count()))
}

/// Returns `text.expandtabs(size)`.
fn expanded(text: &str, size: usize) -> Result<String, Error> {
    if size > 1 << 10 {
        return Err(too_long());
    }
    let (mut out, mut column) = (Text::default(), 0);
    for c in text.chars() {
        match c {
            '\t' => {
                let spaces = if size == 0 { 0 } else { size - column % size };
                out.push(&" ".repeat(spaces))?;
                column += spaces;
            }
            c => {
                out.push(c.encode_utf8(&mut [0; 4]))?;
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    Ok(out.into_string())
}
