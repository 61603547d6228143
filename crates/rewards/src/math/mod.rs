//! Whether two answers are the same mathematics.
//!
//! Text becomes tokens (`lex`), tokens a `Form`: a value, a tuple or an interval, a set, a union, a relation, a matrix, or words
//! (`parse`). Forms are compared part by part (`same`); values exactly where they are fractions of integers (`expr`), and otherwise at
//! some points (`sample`), which is how `(x+1)^2` is `x^2+2x+1` without any algebra.

mod expr;
mod expression;
mod form;
mod lex;
mod parse;
mod same;
mod sample;

use form::Form;
pub(crate) use lex::is_name;
use lex::{Commas, clean};

/// The longest answer in characters that is read as mathematics; longer ones are compared as text.
const MAX_LENGTH: usize = 1000;

/// Returns `true` if `answer` says what `reference` says, for the answers that occur in GSM8K and MATH.
///
/// Fractions, mixed numbers, decimals (to six places, where one of the two is a decimal; repeating ones exactly), percent, powers,
/// roots, pi, factorials, binomials, floors, scientific notation, thousands separators, units, currencies and degrees (which do not
/// count), polynomials, equations (`x = 5` and `f(3) = 5` are 5), inequalities, intervals and unions, tuples (in order), sets and lists
/// (in any order), matrices, plus or minus, complex numbers, and words. Text that cannot be read as mathematics is compared without case,
/// white space and punctuation.
///
/// ```
/// use rewards::math::equivalent;
///
/// assert!(equivalent("\\frac{3}{4}", "0.75") && equivalent("2\\sqrt{2}", "\\sqrt{8}"));
/// assert!(equivalent("1,234 \\text{ dollars}", "\\$1234.00") && equivalent("\\{1, 2\\}", "2, 1"));
/// assert!(!equivalent("(1, 2)", "(2, 1)") && !equivalent("0.33", "\\frac{1}{3}"));
/// ```
pub fn equivalent(reference: &str, answer: &str) -> bool {
    Answer::new(reference).is(answer)
}

/// A reference answer that was read, to compare answers with.
pub(crate) struct Answer {
    text: String,
    readings: Vec<Form>,
}

impl Answer {
    pub(crate) fn new(text: &str) -> Self {
        let text = clean(text);
        let readings = if text.chars().count() <= MAX_LENGTH { readings(&text) } else { Vec::new() };
        Self { text, readings }
    }

    /// Returns `true` if `answer` says what this one says.
    pub(crate) fn is(&self, answer: &str) -> bool {
        let reference = &self.text;
        if answer.len() > 8 * MAX_LENGTH + reference.len() {
            return false;
        }
        let answer = Self::new(answer);
        if reference.is_empty() || answer.text.is_empty() {
            return false;
        }
        let squeeze = |text: &str| text.split_whitespace().collect::<String>();
        if squeeze(reference) == squeeze(&answer.text) {
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
        // Where punctuation means nothing.
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

/// Returns `true` if `comma` is written with a decimal comma and is the decimal `point`: `1,25` and `1.25`.
fn same_decimal(comma: &str, point: &str) -> bool {
    let is_decimal = |text: &str, mark: char| {
        let digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        text.trim_start_matches('-').split_once(mark).is_some_and(|(whole, decimals)| digits(whole) && digits(decimals))
    };
    is_decimal(comma, ',') && is_decimal(point, '.') && comma.replace(',', ".") == point
}

/// Reads a text in each way that it may be meant: `1,234` is a number, or two.
fn readings(text: &str) -> Vec<Form> {
    let mut readings: Vec<Form> = parse::form(text, Commas::Thousands).into_iter().collect();
    if text.contains(',') {
        readings.extend(parse::form(text, Commas::List));
    }
    readings
}
