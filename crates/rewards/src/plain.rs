//! Digits and punctuation of other scripts as ASCII.

use crate::patterns::regex;
use regex::Captures;
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
    // `۰/۵` is no fraction of 0.
    regex!(ZERO, r"(^|[^۰-۹/])۰/([۰-۹])");
    let text = &*ZERO.replace_all(text, "${1}۰٫$2");
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
            '∶' => kept.push(':'),
            '\u{ffe5}' => kept.push('¥'),
            '℃' => kept.push_str("°C"),
            '℉' => kept.push_str("°F"),
            // Circled numbers.
            '①'..='⑳' => kept.push_str(&(u32::from(c) - 0x245f).to_string()),
            // The full-width forms of ASCII, at a fixed distance.
            '\u{ff01}'..='\u{ff5e}' => kept.extend(char::from_u32(u32::from(c) - 0xfee0)),
            c => kept.push(digit(c).unwrap_or(c)),
        }
    }
    if kept.contains("分之") {
        kept = with_fractions(&kept).into_owned();
    }
    Cow::Owned(kept)
}

/// Returns a text with decimal points for the slashes between Persian digits: `۱۲/۵` is 12.5, or 12 fifths. `None` for a text without them.
pub(crate) fn with_persian_decimals(text: &str) -> Option<String> {
    regex!(DECIMAL, r"([۰-۹])/([۰-۹]+)([^۰-۹/]|$)");
    match DECIMAL.replace_all(text, "$1٫$2$3") {
        Cow::Owned(decimals) => Some(decimals),
        Cow::Borrowed(_) => None,
    }
}

/// Rewrites Chinese fractions: `四分之三` becomes `3/4`, `百分之五十` becomes `50%`.
fn with_fractions(text: &str) -> Cow<'_, str> {
    const NUMBER: &str = r"([〇零一二两三四五六七八九十百千万亿]+|\d+(?:\.\d+)?)";
    regex!(FRACTION, format!("{NUMBER}分之{NUMBER}"));
    FRACTION.replace_all(text, |found: &Captures<'_>| {
        let number = |text: &str| chinese_number(text).map_or(text.to_owned(), |number| number.to_string());
        match (&found[1], number(&found[2])) {
            ("百", above) => format!("{above}%"),
            (below, above) => format!("{above}/{}", number(below)),
        }
    })
}

/// Returns the number that a text in Chinese numerals is: 24 of `二十四`.
pub(crate) fn chinese_number(text: &str) -> Option<u64> {
    /// Digits in the order of their values.
    const DIGITS: &str = "零一二三四五六七八九";
    // The sum so far, the part below 10,000, and the digit before its power of ten.
    let (mut sum, mut part, mut digit) = (0u64, 0u64, None);
    for c in text.chars() {
        let c = match c {
            '〇' => '零',
            '两' => '二',
            c => c,
        };
        if let Some(value) = DIGITS.chars().position(|digit| digit == c) {
            // `二四` is no number.
            if digit.is_some_and(|digit| digit != 0) {
                return None;
            }
            digit = Some(value as u64);
            continue;
        }
        match c {
            '十' => part += digit.take().filter(|digit| *digit != 0).unwrap_or(1) * 10,
            '百' => part += digit.take()? * 100,
            '千' => part += digit.take()? * 1000,
            '万' | '亿' => {
                let factor = if c == '万' { 10_000 } else { 100_000_000 };
                sum = (sum + part + digit.take().unwrap_or(0)).checked_mul(factor)?;
                part = 0;
            }
            _ => return None,
        }
    }
    (!text.is_empty()).then_some(sum + part + digit.unwrap_or(0))
}

/// Returns the ASCII digit with the value of a decimal digit of another script.
fn digit(c: char) -> Option<char> {
    let zero = ZEROS.iter().rev().find(|zero| **zero <= c)?;
    char::from_digit(u32::from(c) - u32::from(*zero), 10)
}
