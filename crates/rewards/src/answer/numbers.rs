//! Numbers in prose.

use regex::Regex;
use std::ops::Range;
use std::sync::LazyLock;

/// Digits with thousands separators, a decimal point and an exponent.
const DIGITS: &str =
    r"(?:\d{1,3}(?:(?:,|\{,\}|\\!,\\!|,\\!|\\,)\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?";
const SIGN: &str = r"(?:[-+\u{2212}]\s?)?";
const CURRENCY: &str = r"(?:\\?[$\u{20ac}\u{a3}\u{a5}]\s?)?";

fn pattern(pattern: &str) -> Regex {
    let pattern = pattern.replace("DIGITS", DIGITS).replace("SIGN", SIGN).replace("CURRENCY", CURRENCY);
    Regex::new(&pattern).expect("the pattern is a constant")
}

/// The last number of a text with its sign, currency and percent sign, or the last fraction or ratio: `-$1,234.50`, `25%`, `3e-4`, `3/4`,
/// `1 1/2`, `10:30`.
pub(super) fn last_number(text: &str) -> Option<&str> {
    static NUMBER: LazyLock<Regex> =
        LazyLock::new(|| pattern(r"SIGNCURRENCYSIGN(?:\d+\s\d+/\d+|DIGITS(?:(?:[/:]|\s/\s)DIGITS)*)(?:\s?\\?%)?"));
    let found = NUMBER.find_iter(text).last()?;
    Some(without_operator(text, found.range()))
}

/// The number that a text begins with, behind spaces.
pub(super) fn first_number(text: &str) -> Option<Range<usize>> {
    static FIRST: LazyLock<Regex> = LazyLock::new(|| pattern(r"^\s*SIGNCURRENCYSIGNDIGITS"));
    FIRST.find(text).map(|found| found.range())
}

/// The last number of a text, or the last calculation that ends with it: `3/4`, `2 * 3`, `$400 + $60`, `25π`, `2^3`.
pub(super) fn last_value_range(text: &str) -> Option<Range<usize>> {
    static VALUE: LazyLock<Regex> = LazyLock::new(|| {
        pattern(
            r"SIGNCURRENCYSIGN(?:\d+\s\d+/\d+|(?:DIGITS)?\s?(?:π|√\s?\(?\d+\)?)|DIGITS)(?:\s?%)?(?:(?:\s?[-+*/×÷·\u{2212}]\s?|[:^])CURRENCYSIGN(?:DIGITS|(?:DIGITS)?(?:π|√\s?\(?\d+\)?))(?:\s?%)?)*(?:\s?\\?%)?",
        )
    });
    let found = VALUE.find_iter(text).last()?;
    let value = without_operator(text, found.range());
    Some(found.end() - value.len()..found.end())
}

/// A number without the sign before it that is an operator: the minus of `x-4`.
fn without_operator(text: &str, number: Range<usize>) -> &str {
    let follows = text[..number.start].ends_with(|c: char| c.is_alphanumeric() || c == ')');
    let number = &text[number];
    let signs = ['-', '+', '\u{2212}'];
    if follows && number.starts_with(signs) { number.trim_start_matches(signs).trim_start() } else { number }
}

/// The number that a text is, with currency, percent sign, units and words around it: `$1,234.50`, `x = 72`, `5 apples`. `None` where it is
/// more than one number or a calculation: `3/4`, `10:30`, `2\sqrt{3}`, `1.5 \times 10^3`.
pub(crate) fn plain_number(text: &str) -> Option<&str> {
    static OTHER: LazyLock<Regex> = LazyLock::new(|| {
        // Digits, operators, and commands other than spaces, signs and those around words.
        let pattern = r"[\d/^*:_|!<>≤≥≠√π×÷·½¼¾²³]|\\(?:[[:alpha:]]+)";
        Regex::new(pattern).expect("the pattern is a constant")
    });
    const HARMLESS: &[&str] = &[
        "\\text",
        "\\textbf",
        "\\textnormal",
        "\\mathrm",
        "\\mbox",
        "\\quad",
        "\\qquad",
        "\\left",
        "\\right",
        "\\boxed",
        "\\circ",
        "\\approx",
        "\\displaystyle",
    ];
    static UNIT: LazyLock<Regex> = LazyLock::new(|| {
        let pattern = r"\s*(?:\\[[:alpha:]]+\{[^{}\d]*\}|\b(?:mm|cm|dm|m|km|in|ft|yd|mi|units?|inch(?:es)?|feet|met(?:er|re)s?)\.?)\s*\^\s*(?:[23]|\{[23]\})|\^\s*\{?\\circ\}?";
        Regex::new(pattern).expect("the pattern is a constant")
    });
    // The power of a unit is no number, and only a sentence or a unit follows it.
    let text = UNIT.find_iter(text).last().map_or(text, |unit| &text[..unit.start()]);
    let number = last_number(text)?;
    let start = text.rfind(number)?;
    if number.contains(['/', ':']) {
        return None;
    }
    let (before, after) = (&text[..start], &text[start + number.len()..]);
    // The left side of `f(3) = 7` is no other number.
    let before = before.rsplit_once('=').map_or(before, |(_, before)| before);
    let is_harmless = |text: &str, is_unit: bool| {
        OTHER
            .find_iter(text)
            .all(|other| HARMLESS.contains(&other.as_str()) || is_unit && ["/", "²", "³"].contains(&other.as_str()))
    };
    let is_operator =
        before.trim_end().ends_with(['+', '-', '(', '[']) || after.trim_start().starts_with(['+', '-', '=']);
    let is_factor =
        after.starts_with(|c: char| "xyzabnkr".contains(c)) && !after[1..].starts_with(|c: char| c.is_alphabetic());
    (!is_operator && !is_factor && is_harmless(before, false) && is_harmless(after, true)).then_some(number)
}

/// The value of what [`plain_number`] finds, as it stands before a percent sign, and whether there is one.
pub(crate) fn parse_number(text: &str) -> Option<(f64, bool)> {
    let text = text.trim();
    let percent = text.ends_with('%');
    let plain = text.replace('\u{2212}', "-").replace("\\!", "").replace("{,}", "");
    let kept: String = plain.chars().filter(|c| c.is_ascii_alphanumeric() || ".-+".contains(*c)).collect();
    kept.parse::<f64>().ok().filter(|value| value.is_finite()).map(|value| (value, percent))
}
