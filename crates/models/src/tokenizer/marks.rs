//! Marks around special-token strings in a user's text, so that they are encoded as text.
//!
//! A template renders special tokens and the user's text into one string. The marks distinguish the two, even if the template cuts or
//! joins texts. The ids equal those of `transformers` with `sanitize_control_tokens=True`.

use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::Value;

/// The marks before and after a string: private-use characters, which do not occur in texts.
const START: char = '\u{f0000}';
const END: char = '\u{f0001}';

/// Returns `true` if `c` is a mark.
pub(crate) fn is_mark(c: char) -> bool {
    matches!(c, START | END)
}

/// The special-token strings.
pub(crate) struct SpecialStrings {
    strings: AhoCorasick,
}

/// A part of a marked text.
#[derive(Debug, PartialEq)]
pub(crate) enum Piece<'a> {
    /// Text in which special tokens are parsed.
    Template(&'a str),
    /// A marked string, which is encoded as text.
    Marked(&'a str),
}

impl SpecialStrings {
    pub(crate) fn new(strings: &[String]) -> Result<Self, aho_corasick::BuildError> {
        let strings = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(strings)?;
        Ok(Self { strings })
    }

    /// Returns `true` if `text` contains a special-token string.
    pub(crate) fn is_in(&self, text: &str) -> bool {
        self.strings.is_match(text)
    }

    /// Returns the first special-token string in `text`.
    pub(crate) fn first<'a>(&self, text: &'a str) -> Option<&'a str> {
        self.strings.find(text).map(|found| &text[found.range()])
    }

    /// Returns `true` if any string in `value`, except keys of objects, contains a special-token string.
    pub(crate) fn is_in_value(&self, value: &Value) -> bool {
        match value {
            Value::String(text) => self.is_in(text),
            Value::Array(items) => items.iter().any(|item| self.is_in_value(item)),
            Value::Object(fields) => fields.values().any(|value| self.is_in_value(value)),
            _ => false,
        }
    }

    /// Returns `text` with marks around each special-token string. Marks in the input are removed, so that they cannot be forged.
    pub(crate) fn mark(&self, text: &str) -> String {
        let text = text.replace(is_mark, "");
        let mut out = String::with_capacity(text.len() + 16);
        let mut end = 0;
        for found in self.strings.find_iter(&text) {
            out.push_str(&text[end..found.start()]);
            out.push(START);
            out.push_str(&text[found.range()]);
            out.push(END);
            end = found.end();
        }
        out.push_str(&text[end..]);
        out
    }

    /// Returns `value` with marks around the special-token strings of every string, except keys of objects.
    pub(crate) fn mark_value(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.mark(text)),
            Value::Array(items) => items.iter().map(|item| self.mark_value(item)).collect(),
            Value::Object(fields) => {
                Value::Object(fields.iter().map(|(key, value)| (key.clone(), self.mark_value(value))).collect())
            }
            other => other.clone(),
        }
    }

    /// Splits a marked text into parts. A mark without its partner, which a template has cut off, still separates two parts, so that the texts
    /// on both sides cannot join into a special token.
    pub(crate) fn pieces<'a>(&self, text: &'a str) -> Vec<Piece<'a>> {
        let mut pieces = vec![];
        let mut rest = text;
        while let Some(at) = rest.find(is_mark) {
            pieces.push(Piece::Template(&rest[..at]));
            rest = &rest[at..];
            let inside = rest.strip_prefix(START).and_then(|inside| inside.split_once(END));
            match inside {
                Some((string, behind)) if self.is_whole(string) => {
                    pieces.push(Piece::Marked(string));
                    rest = behind;
                }
                _ => rest = &rest[START.len_utf8()..],
            }
        }
        pieces.push(Piece::Template(rest));
        pieces
    }

    /// Returns `true` if the whole `text` is a special-token string.
    fn is_whole(&self, text: &str) -> bool {
        self.strings.find(text).is_some_and(|found| found.range() == (0..text.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marked_special_strings_are_recovered_exactly() {
        let special = SpecialStrings::new(&["<|im|>".into(), "<|im|>2".into()]).unwrap();
        let marked = special.mark("a<|im|>2b\u{f0001}<|im|>");
        assert_eq!(marked, "a\u{f0000}<|im|>2\u{f0001}b\u{f0000}<|im|>\u{f0001}");
        let pieces = special.pieces(&marked);
        use Piece::{Marked, Template};
        assert_eq!(pieces, [Template("a"), Marked("<|im|>2"), Template("b"), Marked("<|im|>"), Template("")]);
        // Cut by a template: not a marked string, and the parts do not join.
        let cut = special.pieces("x\u{f0000}<|i\u{f0001}m|>");
        assert_eq!(cut, [Template("x"), Template("<|i"), Template("m|>")]);
        assert_eq!(special.pieces("plain"), [Template("plain")]);
    }
}
