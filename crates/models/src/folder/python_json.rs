//! JSON as Python's `json` module writes it, with `Infinity`, `-Infinity` and `NaN`.

use serde::de::DeserializeOwned;
use serde_json::Error;
use std::borrow::Cow;

/// Parses JSON that may contain `Infinity`, `-Infinity` and `NaN`. They become strings: a field that must be a number is then refused with
/// its name, and unused fields do no harm.
///
/// # Errors
/// The errors of [`serde_json::from_slice`].
pub fn from_python_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(&as_json(bytes))
}

/// Returns the text with quotes around these numbers.
pub(crate) fn as_json(bytes: &[u8]) -> Cow<'_, [u8]> {
    const WORDS: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];
    let has_word = WORDS[1..].iter().any(|word| bytes.windows(word.len()).any(|part| part == *word));
    if !has_word {
        return Cow::Borrowed(bytes);
    }
    let mut out = Vec::with_capacity(bytes.len() + 16);
    let (mut at, mut in_text) = (0, false);
    while let Some(&byte) = bytes.get(at) {
        let word = WORDS.iter().find(|word| !in_text && bytes[at..].starts_with(word));
        let length = match (word, byte) {
            (Some(word), _) => {
                out.push(b'"');
                out.extend_from_slice(word);
                out.push(b'"');
                at += word.len();
                continue;
            }
            (None, b'\\') if in_text => 2.min(bytes.len() - at),
            _ => 1,
        };
        in_text ^= byte == b'"';
        out.extend_from_slice(&bytes[at..at + length]);
        at += length;
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn python_json_numbers_become_strings() {
        let read = |text: &str| from_python_json::<Value>(text.as_bytes());
        let text = r#"{"a": [0.0, Infinity, -Infinity], "NaN": NaN, "t": "an \"Infinity\\", "u": "NaN", "n": -1}"#;
        let expected = json!({
            "a": [0.0, "Infinity", "-Infinity"], "NaN": "NaN", "t": "an \"Infinity\\", "u": "NaN", "n": -1
        });
        assert_eq!(read(text).unwrap(), expected);
        assert_eq!(read("[Infinity]").unwrap(), json!(["Infinity"]));
        for broken in ["{\"a\": Infinity", "[Infinit]", "[InfinityNaN]", "\"Infinity", "[\"\\"] {
            assert!(read(broken).is_err(), "{broken}");
        }
    }
}
