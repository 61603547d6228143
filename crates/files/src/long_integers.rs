//! Integers beyond 64 bits in JSON values, which [`serde_json::Value`] would round to floats.
//!
//! Such an integer is a string in a value: a mark and the digits. [`mark_long_integers`] prepares JSON for parsing, and
//! [`long_integers_as_digits`] replaces the strings with digits in JSON that was written.

use serde_json::Value;
use std::borrow::Cow;

/// The mark before the digits of an integer beyond 64 bits in a string: a private-use character, which does not occur in texts.
pub const LONG_INTEGER_MARK: char = '\u{f0002}';

/// The number of digits of the shortest integer that may not fit 64 bits.
const LONG: usize = 19;

/// Returns the value of an integer of any length; `None` for other texts.
///
/// ```
/// use grpo_files::{long_integer, long_integers_as_digits};
///
/// assert_eq!(long_integer("-12"), Some((-12).into()));
/// let digits = "123456789012345678901234567890";
/// assert_eq!(long_integers_as_digits(long_integer(digits).unwrap().to_string()), digits);
/// assert_eq!(long_integer("1.5"), None);
/// ```
pub fn long_integer(text: &str) -> Option<Value> {
    let is_negative = text.starts_with('-');
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let digits = digits.trim_start_matches('0');
    let sign = if is_negative { "-" } else { "" };
    let text = format!("{sign}{digits}");
    let small = text.parse::<i64>().map(Value::from).or_else(|_| text.parse::<u64>().map(Value::from));
    Some(match small {
        Ok(value) => value,
        Err(_) if digits.is_empty() => 0.into(),
        Err(_) => Value::String(format!("{LONG_INTEGER_MARK}{text}")),
    })
}

/// Replaces integers beyond 64 bits in JSON with marked strings, so that parsing keeps their digits.
pub fn mark_long_integers(json: &str) -> Cow<'_, str> {
    let has_long = json.as_bytes().split(|byte| !byte.is_ascii_digit()).any(|digits| digits.len() >= LONG);
    if !has_long {
        return Cow::Borrowed(json);
    }
    let (mut marked, mut rest) = (String::with_capacity(json.len() + 8), json);
    // Strings and numbers are copied in turn. A number ends at the first character that cannot be part of one.
    while let Some(at) = rest.find(|c: char| c == '"' || c == '-' || c.is_ascii_digit()) {
        let (before, token) = rest.split_at(at);
        marked.push_str(before);
        let length = match token.starts_with('"') {
            true => length_of_text(token),
            false => token.find(|c: char| !(c.is_ascii_digit() || "+-.eE".contains(c))).unwrap_or(token.len()),
        };
        let (token, behind) = token.split_at(length);
        if is_long(token) {
            marked.extend(["\"", LONG_INTEGER_MARK.encode_utf8(&mut [0; 4]), token, "\""]);
        } else {
            marked.push_str(token);
        }
        rest = behind;
    }
    Cow::Owned(marked + rest)
}

/// Returns the digits of an integer beyond 64 bits; `None` for other strings.
pub fn long_digits(text: &str) -> Option<&str> {
    text.strip_prefix(LONG_INTEGER_MARK).filter(|digits| is_long(digits))
}

/// Replaces the marked strings in a value with their digits as plain strings.
pub fn long_integers_as_text(value: &mut Value) {
    match value {
        Value::String(text) => {
            if let Some(digits) = long_digits(text) {
                *text = digits.to_owned();
            }
        }
        Value::Array(items) => items.iter_mut().for_each(long_integers_as_text),
        Value::Object(fields) => fields.values_mut().for_each(long_integers_as_text),
        _ => {}
    }
}

/// Replaces the marked strings in a text, with or without quotes around them, with their digits. JSON then has numbers.
pub fn long_integers_as_digits(text: String) -> String {
    if !text.contains(LONG_INTEGER_MARK) {
        return text;
    }
    let (mut out, mut rest) = (String::with_capacity(text.len()), &text[..]);
    while let Some((before, behind)) = rest.split_once(LONG_INTEGER_MARK) {
        let end = behind.find(|c: char| !(c.is_ascii_digit() || c == '-')).unwrap_or(behind.len());
        let (digits, after) = behind.split_at(end);
        if !is_long(digits) {
            out.push_str(before);
            out.push(LONG_INTEGER_MARK);
            rest = behind;
            continue;
        }
        let quote = ['"', '\''].into_iter().find(|quote| before.ends_with(*quote) && after.starts_with(*quote));
        out.push_str(quote.map_or(before, |_| &before[..before.len() - 1]));
        out.push_str(digits);
        rest = quote.map_or(after, |_| &after[1..]);
    }
    out + rest
}

/// Returns `true` for the JSON of an integer that does not fit 64 bits.
fn is_long(token: &str) -> bool {
    let digits = token.strip_prefix('-').unwrap_or(token);
    digits.len() >= LONG
        && !digits.starts_with('0')
        && digits.bytes().all(|byte| byte.is_ascii_digit())
        && token.parse::<i64>().is_err()
        && token.parse::<u64>().is_err()
}

/// Returns the length in bytes of the JSON string at the start of `text`, including quotes; the length of `text` if the string is not
/// closed.
fn length_of_text(text: &str) -> usize {
    let mut bytes = text.bytes().enumerate().skip(1);
    while let Some((at, byte)) = bytes.next() {
        match byte {
            b'\\' => _ = bytes.next(),
            b'"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn long_integers_keep_their_digits_through_parsing_and_writing() {
        for json in [
            r#"{"a":123456789012345678901234567890,"b":[-98765432109876543210,1],"c":"99999999999999999999999"}"#,
            r#"{"a":18446744073709551615,"b":-9223372036854775808,"c":1.5,"d":"x\"12345678901234567890123\""}"#,
            "12345678901234567890123",
        ] {
            let value: Value = serde_json::from_str(&mark_long_integers(json)).unwrap();
            assert_eq!(long_integers_as_digits(value.to_string()), json);
        }
        let float: Value = serde_json::from_str(&mark_long_integers("[12345678901234567890.5]")).unwrap();
        assert!(float[0].is_f64());
        let mut value: Value = serde_json::from_str(&mark_long_integers("[12345678901234567890123]")).unwrap();
        assert_eq!(long_digits(value[0].as_str().unwrap()), Some("12345678901234567890123"));
        long_integers_as_text(&mut value);
        assert_eq!(value, json!(["12345678901234567890123"]));
    }

    #[test]
    fn forged_marks_give_no_broken_json() {
        for text in ["\u{f0002}", "\u{f0002}1", "\u{f0002}-", "\u{f0002}00000000000000000000000", "\u{f0002}1-1"] {
            let json = json!({"a": text}).to_string();
            assert_eq!(long_integers_as_digits(json.clone()), json);
        }
        let doubled = long_integers_as_digits(json!(["\u{f0002}\u{f0002}12345678901234567890123"]).to_string());
        assert!(serde_json::from_str::<Value>(&doubled).is_ok(), "{doubled}");
    }

    #[test]
    fn texts_of_integers_are_values() {
        for (text, value) in [("7", json!(7)), ("+7", json!(7)), ("-0", json!(0)), ("007", json!(7))] {
            assert_eq!(long_integer(text), Some(value), "{text}");
        }
        for text in ["", "-", "1.0", "1e3", "x", "1_0", "--1"] {
            assert_eq!(long_integer(text), None, "{text}");
        }
        let long = long_integer("-00123456789012345678901").unwrap().to_string();
        assert_eq!(long_integers_as_digits(long), "-123456789012345678901");
    }
}
