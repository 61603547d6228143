//! Changes a field of a JSON file without reformatting the rest.

use serde_json::Value;
use std::ops::Range;

/// Returns `text`, a JSON object, with `value` in its field `key`. Order, indentation and numbers of all other fields are kept; a missing
/// field becomes the first.
pub(super) fn with_field(text: &str, key: &str, value: &Value) -> String {
    match span(text, key) {
        Some(range) => format!("{}{value}{}", &text[..range.start], &text[range.end..]),
        None => {
            let Some(brace) = text.find('{') else { return text.to_owned() };
            let comma = if text[brace + 1..].trim_start().starts_with('}') { "" } else { "," };
            format!("{}\n  {}: {value}{comma}{}", &text[..=brace], Value::from(key), &text[brace + 1..])
        }
    }
}

/// Returns `text` with `value` in the field `key` of the object in its field `outer`, like [`with_field`]; unchanged without this object.
pub(super) fn with_field_of(text: &str, outer: &str, key: &str, value: &Value) -> String {
    let Some(Range { start, end }) = span(text, outer) else { return text.to_owned() };
    format!("{}{}{}", &text[..start], with_field(&text[start..end], key, value), &text[end..])
}

/// Returns `text`, a JSON object, without the field `key`. All other fields are kept as they are.
pub(super) fn without_field(text: &str, key: &str) -> String {
    let Some(value) = span(text, key) else { return text.to_owned() };
    let Some(start) = text[..value.start].rfind(&Value::from(key).to_string()) else { return text.to_owned() };
    let (before, after) = (&text[..start], &text[value.end..]);
    match after.trim_start().strip_prefix(',') {
        Some(rest) => format!("{before}{}", rest.trim_start()),
        None => {
            let before = before.trim_end();
            format!("{}{after}", before.strip_suffix(',').unwrap_or(before))
        }
    }
}

/// Returns the range of a field's value of the outermost object in `text`, which is valid JSON.
fn span(text: &str, key: &str) -> Option<Range<usize>> {
    let (mut depth, mut in_text, mut escaped) = (0, false, false);
    // The start of the current string, the last string (a possible key), and the start of the value.
    let (mut opened, mut last, mut value) = (0, "", None);
    for (place, byte) in text.bytes().enumerate() {
        if in_text {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => {
                    in_text = false;
                    last = &text[opened..=place];
                }
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => (in_text, opened) = (true, place),
            b':' if depth == 1
                && value.is_none()
                && serde_json::from_str::<String>(last).is_ok_and(|name| name == key) =>
            {
                value = Some(place + 1);
            }
            b',' | b'}' if depth == 1 && value.is_some() => {
                let start = value?;
                let inner = &text[start..place];
                let leading = inner.len() - inner.trim_start().len();
                return Some(start + leading..start + inner.trim_end().len());
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth -= 1,
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn replacing_a_json_field_keeps_the_rest_of_the_text() {
        let text = "{\n  \"b\": {\"dtype\": [1, \"}\"]},\n  \"dtype\" :\t\"float32\" ,\n  \"eps\": 1e-06, \"s\": \"\\\"dtype\\\": 2\"\n}\n";
        let changed = with_field(text, "dtype", &json!("bfloat16"));
        assert_eq!(changed, text.replace("\"float32\"", "\"bfloat16\""));
        assert_eq!(with_field(text, "b", &json!(null)), text.replace("{\"dtype\": [1, \"}\"]}", "null"));
        assert_eq!(with_field("{\"a\": 1}", "a", &json!(true)), "{\"a\": true}");
        assert_eq!(with_field("{\"a\": 1}", "d", &json!("x")), "{\n  \"d\": \"x\",\"a\": 1}");
        let nested = with_field_of(text, "b", "dtype", &json!(1));
        assert_eq!(nested, text.replace("[1, \"}\"]", "1"));
        assert_eq!(with_field_of(text, "c", "dtype", &json!(1)), text);
        assert_eq!(with_field("{ }", "d", &json!(1)), "{\n  \"d\": 1 }");
    }
}
