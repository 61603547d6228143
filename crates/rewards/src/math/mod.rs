//! Mathematical equivalence of two answers.
//!
//! Text is split into tokens (`lex`), which are parsed to a `Form`: a value, a tuple or interval, a set, a union, a relation, a matrix, or
//! words (`parse`). Forms are compared recursively (`same`). Values are compared exactly if they are fractions of integers (`expr`), and
//! otherwise at sample points (`sample`), so that `(x+1)^2` equals `x^2+2x+1` without symbolic algebra.

mod clean;
mod environment;
mod expr;
mod expression;
mod form;
mod lex;
mod parse;
mod roman;
mod same;
mod sample;
mod set;
mod time;
mod units;

use crate::patterns::regex;
use crate::plain::{chinese_number, plain};
use clean::{bare, clean, with_scale, without_scale};
pub(crate) use environment::name as environment_name;
use form::Form;
use lex::Commas;
pub(crate) use lex::is_name;
use time::Time;
use units::Unit;
pub(crate) use units::length as unit_length;

/// The maximum length in characters of an answer that is parsed; longer answers are compared as text.
const MAX_LENGTH: usize = 1000;

/// Returns `true` if `answer` is equivalent to `reference`, for the kinds of answers in GSM8K and MATH.
///
/// Supports fractions, mixed numbers, decimals (compared to six places if one side is a decimal; repeating decimals exactly), percent,
/// powers, roots, pi, factorials, binomials, floors, scientific notation, thousands separators, units, currencies and degrees (which count
/// only if both answers have one), times of day, Roman numerals, ratios, polynomials, equations (`x = 5` and `f(3) = 5` are 5), inequalities, intervals and unions, tuples (in order), sets and lists
/// (in any order), matrices, plus-minus, complex numbers, and words. Text that cannot be parsed is compared without case, white space and
/// punctuation.
///
/// ```
/// use grpo_rewards::math::equivalent;
///
/// assert!(equivalent("\\frac{3}{4}", "0.75") && equivalent("2\\sqrt{2}", "\\sqrt{8}"));
/// assert!(equivalent("1,234 \\text{ dollars}", "\\$1234.00") && equivalent("\\{1, 2\\}", "2, 1"));
/// assert!(!equivalent("(1, 2)", "(2, 1)") && !equivalent("0.33", "\\frac{1}{3}"));
/// ```
pub fn equivalent(reference: &str, answer: &str) -> bool {
    Answer::new(reference).is(answer)
}

/// A parsed reference answer.
pub(crate) struct Answer {
    whole: Parsed,
    /// The value without the unit at its end, and the unit.
    value: Option<(Parsed, Unit)>,
    time: Option<Time>,
    /// The value of a Roman numeral.
    roman: Option<u32>,
    /// The answer without a word for a power of ten, such as `million`.
    unscaled: Option<Box<Answer>>,
}

impl Answer {
    pub(crate) fn new(text: &str) -> Self {
        let bare = bare(text);
        match with_scale(&bare) {
            Some(scaled) => {
                let unscaled = Some(Box::new(Self::of_bare(text, &without_scale(&bare))));
                Self { unscaled, ..Self::of_bare(text, &scaled) }
            }
            None => Self::of_bare(text, &bare),
        }
    }

    fn of_bare(text: &str, bare: &str) -> Self {
        let value = units::split(bare).map(|(value, unit)| (Parsed::new(value), unit));
        let mut whole = Parsed::new(bare);
        if let Some(system) = environment::system(&plain(text.trim_matches(|c: char| c.is_whitespace() || c == '$'))) {
            whole.readings.extend(readings(&clean(&system)));
        }
        // `$1$ and $1/2$` are two values.
        if let Some(mixed) = mixed_number(bare).filter(|_| text.matches('$').count() <= 2) {
            whole.readings.extend(readings(&clean(&mixed)));
        }
        Self { whole, value, time: Time::new(bare), roman: roman::value(bare), unscaled: None }
    }

    /// Returns `true` if `answer` is equivalent to this reference. An answer with another unit is not; a reference without a unit has any.
    pub(crate) fn is(&self, answer: &str) -> bool {
        if answer.len() > 8 * MAX_LENGTH + self.whole.text.len() {
            return false;
        }
        let answer = Self::new(answer);
        let unscaled = match (&self.unscaled, &answer.unscaled) {
            (Some(a), None) => a.is_same(&answer),
            (None, Some(b)) => self.is_same(b),
            _ => false,
        };
        unscaled || self.is_same(&answer)
    }

    fn is_same(&self, answer: &Self) -> bool {
        match (&self.time, &answer.time) {
            (Some(a), Some(b)) if a.is_no_ratio() || b.is_certain() => return a.is_same(b),
            (Some(a), None) if !a.is_certain() && a.is_no_ratio() => return self.whole.is_text(&answer.whole),
            _ => {}
        }
        let is_number = |roman: Option<u32>, other: &Self| roman.is_some() && other.whole.text.parse().ok() == roman;
        if is_number(self.roman, answer) || is_number(answer.roman, self) {
            return true;
        }
        let without_units = match (&self.value, &answer.value) {
            (Some((_, a)), Some((_, b))) if !a.is_same(b) => return false,
            (Some((a, _)), Some((b, _))) => a.is(b),
            (Some((a, unit)), None) => unit.is_certain && a.is(&answer.whole),
            (None, Some((b, _))) => self.whole.is(b),
            (None, None) => false,
        };
        without_units || self.whole.is(&answer.whole)
    }
}

/// A cleaned text and its forms.
struct Parsed {
    text: String,
    readings: Vec<Form>,
}

impl Parsed {
    fn new(bare: &str) -> Self {
        let text = chinese_number(bare).map_or_else(|| clean(bare), |number| number.to_string());
        let readings = if text.chars().count() <= MAX_LENGTH { readings(&text) } else { Vec::new() };
        Self { text, readings }
    }

    /// Returns `true` for the same text without white space, except between digits.
    fn is_text(&self, answer: &Self) -> bool {
        let squeeze = |text: &str| {
            text.split_whitespace().fold(String::with_capacity(text.len()), |mut kept, part| {
                let is_digit = |c: char| c.is_ascii_digit();
                if kept.ends_with(is_digit) && part.starts_with(is_digit) {
                    kept.push(' ');
                }
                kept + part
            })
        };
        squeeze(&self.text) == squeeze(&answer.text)
    }

    fn is(&self, answer: &Self) -> bool {
        let reference = &self.text;
        if reference.is_empty() || answer.text.is_empty() {
            return false;
        }
        if self.is_text(answer) {
            return true;
        }
        if same_decimal(reference, &answer.text) || same_decimal(&answer.text, reference) {
            return true;
        }
        if self.readings.iter().any(|a| answer.readings.iter().any(|b| same::same(a, b))) {
            return true;
        }
        let words = |text: &str| -> String {
            let letters = text.to_lowercase().replace("\\text", "");
            letters.chars().filter(|c| c.is_alphanumeric()).collect()
        };
        // The comparison of words ignores punctuation, so it is limited to texts without digits and operators.
        let is_words = |text: &str| {
            !text.contains(|c: char| c.is_ascii_digit()) && text.chars().filter(|c| c.is_alphabetic()).count() > 1
        };
        let has_operator = |text: &str| {
            text.contains(['=', '+', '-', '*', '/', '^', '<', '>', '|', '!', '['])
                || text.replace("\\text", "").contains('\\')
        };
        is_words(reference)
            && !has_operator(reference)
            && !has_operator(&answer.text)
            && words(reference) == words(&answer.text)
    }
}

/// Returns `true` if `comma` is the decimal `point`, written with a decimal comma: `1,25` and `1.25`.
fn same_decimal(comma: &str, point: &str) -> bool {
    let is_decimal = |text: &str, mark: char| {
        let digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        text.trim_start_matches('-').split_once(mark).is_some_and(|(whole, decimals)| digits(whole) && digits(decimals))
    };
    // `1,234` is a number with a separator of thousands.
    let is_thousands = |text: &str| {
        let (whole, rest) = text.trim_start_matches('-').split_once(',').unwrap_or_default();
        rest.len() == 3 && (1..=3).contains(&whole.len()) && !whole.starts_with('0')
    };
    is_decimal(comma, ',') && is_decimal(point, '.') && !is_thousands(comma) && comma.replace(',', ".") == point
}

/// Rewrites a mixed number in words: `1 and 1/2` becomes `1\frac{1}{2}`. `None` for other texts.
fn mixed_number(bare: &str) -> Option<String> {
    regex!(
        MIXED,
        r"^([-\u{2212}]?\d+)(?:\s|~|\\[ ,;])*(?:and|\\(?:text|mathrm|textrm)\s*\{\s*and\s*\})(?:\s|~|\\[ ,;])*(?:(\d+)\s*/\s*(\d+)|\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\})((?:\s|~|\\[ ,;])*(?:\p{Alphabetic}{2,}[\p{Alphabetic}\s]*|\\(?:text|mathrm|textrm)\s*\{[^{}\d]*\})?)$"
    );
    let found = Some(bare).filter(|bare| bare.contains("and")).and_then(|bare| MIXED.captures(bare))?;
    let part = |i: usize| found.get(i).or(found.get(i + 2)).map_or("", |part| part.as_str());
    let (above, below) = (part(2), part(3));
    let is_proper = above.parse::<u32>().ok()? < below.parse::<u32>().ok()?;
    is_proper.then(|| format!("{}\\frac{{{above}}}{{{below}}}{}", &found[1], &found[6]))
}

/// Parses a text in each possible way: `1,234` is one number or a list of two.
fn readings(text: &str) -> Vec<Form> {
    let mut readings: Vec<Form> = parse::form(text, Commas::Thousands).into_iter().collect();
    if text.contains(',') {
        readings.extend(parse::form(text, Commas::List));
    }
    readings
}
