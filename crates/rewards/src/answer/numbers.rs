//! Finds numbers in prose.

use crate::math::unit_length;
use crate::patterns::regex;
use std::ops::Range;

/// Digits with thousands separators, a decimal point and an exponent.
const DIGITS: &str = r"(?:\d{1,2}(?:,\d{2})+,\d{3}(?:\.\d+)?|\d{1,3}(?:(?:,|\{,\}|\\!,\\!|,\\!|\\,)\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?";
const SIGN: &str = r"(?:[-+\u{2212}]\s?)?";
const CURRENCY: &str = r"(?:\\?\p{Sc}\s?)?";

/// Returns the pattern with the constants for their names.
fn with_constants(pattern: &str) -> String {
    pattern.replace("POWER", POWER).replace("DIGITS", DIGITS).replace("SIGN", SIGN).replace("CURRENCY", CURRENCY)
}

/// Returns the last number of a text with its sign, currency and percent sign, or the last fraction or ratio: `-$1,234.50`, `25%`, `3e-4`,
/// `3/4`, `1 1/2`, `10:30`.
pub(super) fn last_number(text: &str) -> Option<&str> {
    regex!(NUMBER, with_constants(r"SIGNCURRENCYSIGN(?:\d+\s\d+/\d+|DIGITS(?:(?:[/:]|\s/\s)DIGITS)*)(?:\s?\\?%)?"));
    let found = NUMBER.find_iter(text).last()?;
    Some(without_operator(text, found.range()))
}

/// Returns the range of the number at the start of a text, after spaces.
pub(super) fn first_number(text: &str) -> Option<Range<usize>> {
    regex!(FIRST, with_constants(r"^\s*SIGNCURRENCYSIGNDIGITS"));
    FIRST.find(text).map(|found| found.range())
}

/// A power of ten behind a number: `\times 10^{-19}`, `x10^8`, `×10⁻¹⁹`.
const POWER: &str =
    r"(?:\s?(?:[×·*xX]|\\times|\\cdot)\s?10\s?(?:(?:\^|\*\*)\s?\{?\s?[-+\u{2212}]?\d+\s?\}?|[⁻⁺]?[⁰¹²³⁴-⁹]+))?";
/// A number, or a calculation with numbers.
const VALUE: &str = r"SIGNCURRENCYSIGN(?:\d+\s(?:and\s)?\d+/\d+|\d*\s?[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]|(?:DIGITS)?\s?(?:π|√\s?\(?\d+\)?)|DIGITSPOWER)(?:\s?%)?(?:(?:\s?\*\*\s?|\s?[-+*/×÷·\u{2212}]\s?|\s:\s|[:^])CURRENCYSIGN(?:DIGITS|(?:DIGITS)?(?:π|√\s?\(?\d+\)?))(?:\s?%)?)*(?:\s?\\?%)?";
/// The text between the values of a list.
const JOINING: &str = r"(?:\s*[,;]\s*(?:and\s|or\s)?|\s+(?:and|or)\s+|\s*[和或及与]\s*)";

/// Returns the range of the first value of a text, or of the list of values there: `3 and 5`, `3; 8`.
pub(super) fn first_values(text: &str) -> Option<Range<usize>> {
    regex!(VALUES, with_constants(&format!("{VALUE}(?:{JOINING}{VALUE})*")));
    VALUES.find(text).map(|found| found.range())
}

/// Returns the range of a list of values that ends at `end`, after a verb or a colon: `3 and 8` of `The solutions are 3 and 8`.
pub(super) fn values_before(text: &str, end: usize) -> Option<Range<usize>> {
    regex!(LIST, with_constants(&format!(r"(?:\b(?:are|were|be|either)|[:是为])\s*({VALUE}(?:{JOINING}{VALUE})+)$")));
    let found = LIST.captures(window(text, end))?.get(1)?;
    Some(end - found.len()..end)
}

/// Returns the range of a ratio in words that ends at `end`: `2 to 3` of `The ratio is 2 to 3`.
pub(super) fn ratio_before(text: &str, end: usize) -> Option<Range<usize>> {
    regex!(RATIO, with_constants(&format!(r"(?i)\b(?:ratios?|odds|proportions?)\b.*?({VALUE}(?:\s+to\s+{VALUE})+)$")));
    let found = RATIO.captures(&text[..end])?.get(1)?;
    Some(found.range())
}

/// Returns the range of an inequality, or of a list of equations or inequalities, that ends at `end`: `x = 1 or x = 2`, `1 < x <= 5`.
pub(super) fn relations_before(text: &str, end: usize) -> Option<Range<usize>> {
    const SIGN_OF: &str = r"\s*(?:<=|>=|[=<>≤≥≠])\s*";
    regex!(
        RELATIONS,
        with_constants(
            &format!(r"(?:ITEM)(?:{JOINING}(?:ITEM))*$",)
                .replace("ITEM", &format!(r"\b(?:{VALUE}{SIGN_OF})?[A-Za-z](?:_\w|[₀-₉])?{SIGN_OF}{VALUE}"))
        )
    );
    let found = RELATIONS.find(window(text, end))?.as_str();
    let is_equation = found.matches('=').count() == 1 && !found.contains(['<', '>', '≤', '≥', '≠']);
    (!is_equation).then_some(end - found.len()..end)
}

const INSIDE: &str = r"[-+\u{2212}\d.,;/:\s∞π√]|infinity|infty|inf\b|pi\b|sqrt";
const GROUP: &str = r"[(\[{](?:INSIDE)*[,;](?:INSIDE)*[)\]}]|\{(?:INSIDE)+\}";
const UNION: &str = r"\s*(?:∪|\bU\b|\bor\b|\band\b|,)\s*";
regex!(GROUPS, format!("(?:{GROUP})(?:{UNION}(?:{GROUP}))*").replace("INSIDE", INSIDE));

/// Returns the range of the first set, interval, point or union of these in a text.
pub(super) fn first_group(text: &str) -> Option<Range<usize>> {
    GROUPS.find(text).map(|found| found.range())
}

/// Returns the range of a set, an interval, a point or a union of these around the last number of a text, which ends at `end`: `[1, 2)` of
/// `The range is [1, 2)`.
pub(super) fn group_around(text: &str, end: usize) -> Option<Range<usize>> {
    // Brackets behind other words are a remark: `There are 3 (1, 2, 4)`.
    regex!(
        NAMED,
        r"(?i)(?:\b(?:is|are|was|be|at|in|to|equals?|points?|vertex|vector|vertices|interval|set|range|domain|pairs?|solutions?|coordinates|center|centre|triples?|as)|[=:∈是为])\s*$"
    );
    let start = end.saturating_sub(WINDOW);
    let start = (start..=end).find(|at| text.is_char_boundary(*at))?;
    let found = GROUPS.find_iter(&text[start..]).map(|found| start + found.start()..start + found.end());
    let found = found.filter(|found| found.start < end && found.end >= end).last()?;
    // No number comes later.
    let is_last = !text[found.end..].contains(|c: char| c.is_ascii_digit());
    (is_last && NAMED.is_match(&text[..found.start])).then_some(found)
}

/// The length in bytes of the text in which a list of values is searched.
const WINDOW: usize = 200;

fn window(text: &str, end: usize) -> &str {
    let mut from = end.saturating_sub(WINDOW);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    &text[from..end]
}

/// Returns the range of the last number of a text, or of the calculation that ends with it: `3/4`, `2 * 3`, `$400 + $60`, `25π`, `2^3`.
pub(super) fn last_value_range(text: &str) -> Option<Range<usize>> {
    regex!(LAST, with_constants(VALUE));
    /// The number of values at the end that may be exponents of a unit.
    const EXPONENTS: usize = 8;
    let found: Vec<Range<usize>> = LAST.find_iter(text).map(|found| found.range()).collect();
    // The 2 of `9.8 m/s^2` is in the unit.
    let (mut last, mut end_of_unit) = (None, 0);
    for found in found.into_iter().rev().take(EXPONENTS).rev() {
        if found.start >= end_of_unit {
            end_of_unit = found.end + unit_length(&text[found.end..]);
            last = Some(found);
        }
    }
    let found = last?;
    let value = without_operator(text, found.clone());
    Some(found.end - value.len()..found.end)
}

/// Returns the number without a leading sign that is an operator, such as the minus of `x-4`.
fn without_operator(text: &str, number: Range<usize>) -> &str {
    let follows = text[..number.start].ends_with(|c: char| c.is_alphanumeric() || c == ')');
    let number = &text[number];
    let signs = ['-', '+', '\u{2212}'];
    if follows && number.starts_with(signs) { number.trim_start_matches(signs).trim_start() } else { number }
}

/// Returns the number that a text consists of, without currency, percent sign, units and words: `$1,234.50`, `x = 72`, `5 apples`. `None`
/// for several numbers or a calculation: `3/4`, `10:30`, `2\sqrt{3}`, `1.5 \times 10^3`.
pub(crate) fn plain_number(text: &str) -> Option<&str> {
    // Digits, operators, and commands except spaces, signs and wrappers of words.
    regex!(OTHER, r"[\d/^*:_|!<>≤≥≠√π×÷·½¼¾²³]|\\(?:[[:alpha:]]+)");
    regex!(
        HARMLESS,
        r"^\\(?:text|textbf|textnormal|mathrm|mbox|quad|qquad|left|right|boxed|circ|approx|displaystyle)$"
    );
    regex!(
        UNIT,
        r"\s*(?:\\[[:alpha:]]+\{[^{}\d]*\}|\b(?:mm|cm|dm|m|km|in|ft|yd|mi|units?|inch(?:es)?|feet|met(?:er|re)s?)\.?)\s*\^\s*(?:[23]|\{[23]\})|\^\s*\{?\\circ\}?"
    );
    // The exponent of a unit is not a number, and only a sentence or a unit comes before it.
    let text = UNIT.find_iter(text).last().map_or(text, |unit| &text[..unit.start()]);
    let number = last_number(text)?;
    let start = text.rfind(number)?;
    if number.contains(['/', ':']) {
        return None;
    }
    let (before, after) = (&text[..start], &text[start + number.len()..]);
    // The left side of `f(3) = 7` is not another number.
    let before = before.rsplit_once('=').map_or(before, |(_, before)| before);
    let is_harmless = |text: &str, is_unit: bool| {
        OTHER
            .find_iter(text)
            .all(|other| HARMLESS.is_match(other.as_str()) || is_unit && ["/", "²", "³"].contains(&other.as_str()))
    };
    let is_operator =
        before.trim_end().ends_with(['+', '-', '(', '[']) || after.trim_start().starts_with(['+', '-', '=']);
    let is_factor =
        after.starts_with(|c: char| "xyzabnkr".contains(c)) && !after[1..].starts_with(|c: char| c.is_alphabetic());
    (!is_operator && !is_factor && is_harmless(before, false) && is_harmless(after, true)).then_some(number)
}

/// Parses a number from [`plain_number`]. Returns its value before the percent sign, and `true` if there is such a sign.
pub(crate) fn parse_number(text: &str) -> Option<(f64, bool)> {
    let text = text.trim();
    let percent = text.ends_with('%');
    let plain = text.replace('\u{2212}', "-").replace("\\!", "").replace("{,}", "");
    let kept: String = plain.chars().filter(|c| c.is_ascii_alphanumeric() || ".-+".contains(*c)).collect();
    kept.parse::<f64>().ok().filter(|value| value.is_finite()).map(|value| (value, percent))
}
