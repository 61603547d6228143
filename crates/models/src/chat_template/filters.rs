//! Jinja's filters `indent`, `int` and `float`, and the filter around the iterable of a loop.

use super::limits::{MAX_WIDTH, Text, invalid};
use super::python::argument;
use super::{bounds, python};
use minijinja::value::{Kwargs, Rest, Value, ValueKind, from_args};
use minijinja::{Error, State};

/// Returns `indent(s, width=4, first=False, blank=False)`.
pub(super) fn indent(state: &State<'_, '_>, value: &Value, args: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    let (width, first, blank): (Option<Value>, Option<bool>, Option<bool>) = from_args(&args)?;
    let width = argument(width, &options, "width")?;
    let first = argument(first, &options, "first")?.unwrap_or(false);
    let blank = argument(blank, &options, "blank")?.unwrap_or(false);
    options.assert_all_used()?;
    let indentation = match &width {
        None => " ".repeat(4),
        Some(width) => match width.as_str() {
            Some(text) => text.to_owned(),
            None => match usize::try_from(i64::try_from(width.clone())?.max(0)) {
                Ok(spaces) if spaces <= MAX_WIDTH => " ".repeat(spaces),
                _ => return Err(invalid(format!("indent: expected a width of at most {MAX_WIDTH}, got {width}"))),
            },
        },
    };
    // With this line end, which Jinja also adds, an empty last line is included.
    let text = python::charged_text(state, value)? + "\n";
    let mut out = Text::default();
    for (index, line) in python::lines(&text, false).into_iter().enumerate() {
        if index > 0 {
            out.push("\n")?;
        }
        if if index == 0 { first } else { blank || !line.is_empty() } {
            out.push(&indentation)?;
        }
        out.push(line)?;
    }
    state.consume_fuel(out.steps())?;
    Ok(Value::from(out.into_string()))
}

/// Returns `int(value, default=0, base=10)`.
pub(super) fn int(value: &Value, default: Option<Value>, base: Option<u32>, options: Kwargs) -> Result<Value, Error> {
    let default = argument(default, &options, "default")?.unwrap_or_else(|| Value::from(0));
    let base = argument(base, &options, "base")?.unwrap_or(10);
    options.assert_all_used()?;
    Ok(match value.as_str() {
        Some(text) => match whole(text, base) {
            Some(number) => Value::from(number),
            None => number(text).filter(|n| n.is_finite()).map_or(default, |n| Value::from(n.trunc() as i128)),
        },
        None if value.is_integer() => value.clone(),
        None if value.kind() == ValueKind::Bool => Value::from(i64::from(value.is_true())),
        None => match f64::try_from(value.clone()) {
            Ok(number) if number.is_finite() => Value::from(number.trunc() as i128),
            _ => default,
        },
    })
}

/// Returns `float(value, default=0.0)`.
pub(super) fn float(value: &Value, default: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let default = argument(default, &options, "default")?.unwrap_or_else(|| Value::from(0.0));
    options.assert_all_used()?;
    let number = match value.as_str() {
        Some(text) => number(text),
        None if value.kind() == ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        None => f64::try_from(value.clone()).ok(),
    };
    Ok(number.map_or(default, Value::from))
}

/// Parses Python's `int(text, base)`: digits with single underscores between them, and a prefix such as `0x` for its base or for base 0.
fn whole(text: &str, base: u32) -> Option<i128> {
    let text = text.trim();
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", text.strip_prefix('+').unwrap_or(text)),
    };
    let lower = digits.to_ascii_lowercase();
    let prefixed = [("0x", 16), ("0o", 8), ("0b", 2)]
        .into_iter()
        .find(|(prefix, of)| lower.starts_with(prefix) && (base == *of || base == 0));
    let (digits, base) = match prefixed {
        Some((prefix, base)) => (&lower[prefix.len()..], base),
        None => (lower.as_str(), if base == 0 { 10 } else { base }),
    };
    if !(2..=36).contains(&base) {
        return None;
    }
    i128::from_str_radix(&format!("{sign}{}", ungrouped(digits)?), base).ok()
}

/// Parses Python's `float(text)`.
fn number(text: &str) -> Option<f64> {
    let text = ungrouped(text.trim())?;
    let plain = text.trim_start_matches(['+', '-']).to_ascii_lowercase();
    if text.len() - plain.len() > 1 {
        return None;
    }
    let is_name = ["inf", "infinity", "nan"].contains(&plain.as_str());
    let is_number = plain.starts_with(|c: char| c.is_ascii_digit() || c == '.');
    if is_name || is_number { text.parse().ok() } else { None }
}

/// Removes the underscores of a number; `None` if one is not between two digits.
fn ungrouped(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    let is_digit = |at: Option<usize>| at.and_then(|at| bytes.get(at)).is_some_and(u8::is_ascii_alphanumeric);
    let mut underscores = (0..bytes.len()).filter(|at| bytes[*at] == b'_');
    underscores.all(|at| is_digit(at.checked_sub(1)) && is_digit(Some(at + 1))).then(|| text.replace('_', ""))
}

/// Returns the items of a loop: iterators become lists, because minijinja does not know their length and cannot set `loop.last`.
pub(super) fn listed(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        state.consume_fuel(text.chars().count() as u64)?;
        return Ok(text.chars().map(|c| Value::from(c.to_string())).collect());
    }
    bounds::listed(state, value)
}
