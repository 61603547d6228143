//! Whether two answers are the same mathematics.
//!
//! Text becomes tokens (`lex`), tokens a `Form`: a value, a tuple or an interval, a set, a union, a relation, a matrix, or words
//! (`parse`). Forms are compared part by part (`same`); values exactly where they are fractions of integers, and otherwise at
//! some points, which is how `(x+1)^2` is `x^2+2x+1` without any algebra (`expr`).

mod expr;
mod expression;
mod form;
mod lex;
mod parse;
mod same;

use form::Form;
use lex::clean;
pub(crate) use lex::is_name;

/// The longest answer in characters that is read as mathematics; longer ones are compared as text.
const MAX_LENGTH: usize = 1000;

/// Whether `answer` says what `reference` says, for the answers that occur in GSM8K and MATH.
///
/// Fractions, mixed numbers, decimals (to six places, where one of the two is a decimal), percent, powers, roots, pi, scientific
/// notation, thousands separators, units, currencies and degrees (which do not count), polynomials, equations (`x = 5` is 5),
/// inequalities, intervals and unions, tuples (in order), sets and lists (in any order), matrices, plus or minus, complex numbers,
/// and words. Text that cannot be read as mathematics is compared without case, white space and punctuation.
///
/// ```
/// use rewards::math::equivalent;
///
/// assert!(equivalent("\\frac{3}{4}", "0.75") && equivalent("2\\sqrt{2}", "\\sqrt{8}"));
/// assert!(equivalent("1,234 \\text{ dollars}", "\\$1234.00") && equivalent("\\{1, 2\\}", "2, 1"));
/// assert!(!equivalent("(1, 2)", "(2, 1)") && !equivalent("0.33", "\\frac{1}{3}"));
/// ```
pub fn equivalent(reference: &str, answer: &str) -> bool {
    let (reference, answer) = (clean(reference), clean(answer));
    if reference.is_empty() || answer.is_empty() {
        return false;
    }
    let squeeze = |text: &str| text.split_whitespace().collect::<String>();
    if squeeze(&reference) == squeeze(&answer) {
        return true;
    }
    if reference.chars().count().max(answer.chars().count()) > MAX_LENGTH {
        return false;
    }
    // `1,234` is a number, or two; whichever makes both the same is meant.
    let readings = |text: &str| -> Vec<Form> {
        let mut readings: Vec<Form> = parse::form(text, true).into_iter().collect();
        if text.contains(',') {
            readings.extend(parse::form(text, false));
        }
        readings
    };
    let (references, answers) = (readings(&reference), readings(&answer));
    if references.iter().any(|a| answers.iter().any(|b| same::same(a, b))) {
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
        text.contains(['=', '+', '-', '*', '/', '^', '<', '>']) || text.replace("\\text", "").contains('\\')
    };
    is_words(&reference) && !has_operator(&reference) && !has_operator(&answer) && words(&reference) == words(&answer)
}
