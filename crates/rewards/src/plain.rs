//! Digits and punctuation of other scripts as ASCII.

use std::borrow::Cow;

/// The zeros of Unicode's decimal digits (category Nd) outside of ASCII. The other nine digits follow each zero.
const ZEROS: &[char] = &[
    '\u{660}',
    '\u{6f0}',
    '\u{7c0}',
    '\u{966}',
    '\u{9e6}',
    '\u{a66}',
    '\u{ae6}',
    '\u{b66}',
    '\u{be6}',
    '\u{c66}',
    '\u{ce6}',
    '\u{d66}',
    '\u{de6}',
    '\u{e50}',
    '\u{ed0}',
    '\u{f20}',
    '\u{1040}',
    '\u{17e0}',
    '\u{1810}',
    '\u{1946}',
    '\u{19d0}',
    '\u{1a80}',
    '\u{1b50}',
    '\u{a8d0}',
    '\u{a9d0}',
    '\u{aa50}',
    '\u{1d7ce}',
    '\u{1d7d8}',
    '\u{1d7e2}',
    '\u{1d7ec}',
    '\u{1d7f6}',
];

/// Returns a text with ASCII characters for decimal digits, full-width letters, and the punctuation of East Asian and Arabic scripts.
pub(crate) fn plain(text: &str) -> Cow<'_, str> {
    if text.is_ascii() {
        return Cow::Borrowed(text);
    }
    let mut kept = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            // A space behind the full stop makes it the end of a sentence.
            '。' | '｡' => kept.push_str(". "),
            '、' | '،' | '٬' => kept.push(','),
            '؛' => kept.push(';'),
            '٫' => kept.push('.'),
            '٪' => kept.push('%'),
            '\u{3000}' => kept.push(' '),
            // The full-width forms of ASCII, at a fixed distance.
            '\u{ff01}'..='\u{ff5e}' => kept.extend(char::from_u32(u32::from(c) - 0xfee0)),
            c => kept.push(digit(c).unwrap_or(c)),
        }
    }
    Cow::Owned(kept)
}

/// Returns the ASCII digit with the value of a decimal digit of another script.
fn digit(c: char) -> Option<char> {
    let zero = ZEROS.iter().rev().find(|zero| **zero <= c)?;
    char::from_digit(u32::from(c) - u32::from(*zero), 10)
}
