//! Answers that are Roman numerals, such as `XIV`.

use crate::patterns::regex;

/// Numerals with their values, in descending order. A Roman number is a sum of these values.
const NUMERALS: [(&str, u32); 13] = [
    ("M", 1000),
    ("CM", 900),
    ("D", 500),
    ("CD", 400),
    ("C", 100),
    ("XC", 90),
    ("L", 50),
    ("XL", 40),
    ("X", 10),
    ("IX", 9),
    ("V", 5),
    ("IV", 4),
    ("I", 1),
];

/// Returns the value of a text that is a Roman numeral of at least two capital letters, below 4000: 14 of `XIV` and `\mathrm{XIV}`. One
/// letter is a variable.
pub(super) fn value(text: &str) -> Option<u32> {
    regex!(NUMERAL, r"^(?:\\(?:text|mathrm|textrm|textbf|mathbf|rm)\s*\{\s*([IVXLCDM]{2,15})\s*\}|([IVXLCDM]{2,15}))$");
    let found = NUMERAL.captures(text)?;
    let numeral = found.get(1).or(found.get(2))?.as_str();
    let (mut rest, mut sum) = (numeral, 0);
    for (part, value) in NUMERALS {
        while let Some(behind) = rest.strip_prefix(part) {
            (rest, sum) = (behind, sum + value);
        }
    }
    // `IIII` and `VX` are not written so.
    (rest.is_empty() && numeral_of(sum) == numeral).then_some(sum)
}

/// Returns the numeral of a number.
fn numeral_of(mut number: u32) -> String {
    let mut numeral = String::new();
    for (part, value) in NUMERALS {
        while number >= value {
            numeral.push_str(part);
            number -= value;
        }
    }
    numeral
}
