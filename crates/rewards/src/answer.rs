//! Which part of a completion is its answer.

use crate::math::{equivalent, is_name};
use crate::reward_fn::RewardInput;
use regex::Regex;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::sync::LazyLock;

/// Which part of a completion is its answer: the key `rewards.answer_from`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AnswerFrom {
    /// The first of these that is there: `answer_tag`, `boxed`, `hashes`, what follows the last `answer is` or `answer:` up to the
    /// end of its sentence, the last formula between dollars, and else the completion itself when it is one short line, or
    /// its last number. Where mathematics is compared, a short line that is a sentence also counts as its last number.
    #[default]
    Auto,
    /// The whole completion.
    Completion,
    /// What the last `\boxed{...}` holds, braces in it included.
    Boxed,
    /// What the last `<answer>...</answer>` holds, or its `\boxed{...}` where it has one.
    AnswerTag,
    /// What follows the last `####`, up to the end of the line: GSM8K's own form.
    Hashes,
    /// The last number.
    LastNumber,
}

/// The longest completion in characters that [`AnswerFrom::Auto`] takes as an answer by itself.
const SHORT: usize = 60;

impl AnswerFrom {
    /// The answer in `text`; `None` where there is none in this form.
    ///
    /// ```
    /// use rewards::AnswerFrom;
    ///
    /// let text = "6 x 7 is 42, so the answer is \\boxed{\\frac{84}{2}}.";
    /// assert_eq!(AnswerFrom::Auto.find(text), Some("\\frac{84}{2}"));
    /// assert_eq!(AnswerFrom::Hashes.find("6 x 7 = 42\n#### 42"), Some("42"));
    /// assert_eq!(AnswerFrom::AnswerTag.find("no tag"), None);
    /// ```
    pub fn find(self, text: &str) -> Option<&str> {
        let found = match self {
            Self::Completion => Some(text),
            Self::Boxed => last_boxed(text),
            Self::AnswerTag => last_tag(text),
            Self::Hashes => last_hashes(text),
            Self::LastNumber => last_number(text),
            Self::Auto => {
                marked(text).or_else(|| if is_short(text) { Some(text) } else { last_number(text).or(Some(text)) })
            }
        };
        found.map(str::trim)
    }
}

/// The answer in a text that says where it is.
fn marked(text: &str) -> Option<&str> {
    last_tag(text)
        .or_else(|| last_boxed(text))
        .or_else(|| last_hashes(text))
        .or_else(|| last_said(text))
        .or_else(|| last_formula(text))
}

/// The last number of a short sentence, such as `It is 1,000.`, which [`AnswerFrom::Auto`] takes for an answer as a whole: what is
/// compared as mathematics may be either. `None` where no words come before it.
fn number_of_sentence(text: &str) -> Option<&str> {
    static WORD: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(r"\\?\p{Alphabetic}{2,}").expect("the pattern is a constant"));
    let number = Some(text).filter(|text| is_short(text) && marked(text).is_none()).and_then(last_number)?;
    let before = &text[..text.rfind(number)?];
    let words: Vec<&str> = WORD.find_iter(before).map(|word| word.as_str()).collect();
    // `\sqrt{12}` and `pi/2` are formulas, `3 and 4` are two answers.
    let is_formula =
        |word: &&str| word.starts_with('\\') || is_name(word) || ["and", "or"].contains(&word.to_lowercase().as_str());
    (!words.is_empty() && !words.iter().any(is_formula)).then_some(number)
}

/// Whether the completion has the reference answer as mathematics; `None` for rows without a reference answer.
pub(crate) fn is_right(from: AnswerFrom, input: &RewardInput<'_>) -> Option<bool> {
    let (reference, answer) = answer_of(from, input)?;
    let number = if from == AnswerFrom::Auto { number_of_sentence(input.completion) } else { None };
    Some(answer.as_deref().into_iter().chain(number).any(|answer| equivalent(&reference, answer)))
}

fn is_short(text: &str) -> bool {
    let text = text.trim();
    !text.contains('\n') && text.chars().count() <= SHORT
}

/// The reference answer of a row and the answer in the completion, `None` where it has none; `None` for rows without a
/// reference answer. A reference that is a whole solution, as in GSM8K and MATH, is its final answer.
pub(crate) fn answer_of<'a>(from: AnswerFrom, input: &RewardInput<'a>) -> Option<(Cow<'a, str>, Option<Cow<'a, str>>)> {
    let answer: &'a str = input.item.answer.as_deref()?;
    let reference = last_hashes(answer).or_else(|| last_boxed(answer)).unwrap_or(answer).trim();
    let found = from.find(input.completion).filter(|found| !found.is_empty());
    Some((Cow::Borrowed(reference), found.map(Cow::Borrowed)))
}

/// What the last `\boxed{...}` or `\fbox{...}` holds, with the braces in it balanced; nothing where the last one has no end.
fn last_boxed(text: &str) -> Option<&str> {
    let at = text.rfind("\\boxed").max(text.rfind("\\fbox"))?;
    let rest = &text[at + 1..];
    let rest = rest.trim_start_matches(|c: char| c.is_ascii_alphabetic()).trim_start();
    let Some(inside) = rest.strip_prefix('{') else {
        // `\boxed 5`
        return rest.split(|c: char| c == '$' || c.is_whitespace()).next().filter(|word| !word.is_empty());
    };
    let (mut depth, mut escaped) = (0usize, false);
    for (i, c) in inside.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '{' => depth += 1,
            '}' if depth == 0 => return Some(&inside[..i]),
            '}' => depth -= 1,
            _ => {}
        }
    }
    None
}

fn last_tag(text: &str) -> Option<&str> {
    let (before, _) = text.rsplit_once("</answer>")?;
    let (_, inside) = before.rsplit_once("<answer>")?;
    last_boxed(inside).or(Some(inside))
}

fn last_hashes(text: &str) -> Option<&str> {
    let (_, rest) = text.rsplit_once("####")?;
    rest.lines().map(str::trim).find(|line| !line.is_empty())
}

/// What follows the last `answer is` or `answer:`, up to the end of its sentence.
fn last_said(text: &str) -> Option<&str> {
    static SAID: LazyLock<Regex> = LazyLock::new(|| {
        let pattern = r"(?i)\banswer\s*(?:is|was|=|:|\*\*:|:\*\*)\s*:?\s*";
        Regex::new(pattern).expect("the pattern is a constant")
    });
    let said = SAID.find_iter(text).last()?;
    let rest = &text[said.end()..];
    let line = rest.lines().next().unwrap_or_default();
    // A point ends a sentence where no digit follows.
    let ends = |(i, c): &(usize, char)| *c == '.' && !line[i + 1..].starts_with(|next: char| next.is_ascii_digit());
    let end = line.char_indices().find(ends).map_or(line.len(), |(i, _)| i);
    let answer = line[..end].trim().trim_matches('*').trim();
    (!answer.is_empty()).then_some(answer)
}

/// The last `$...$`, `\(...\)` or `\[...\]`.
fn last_formula(text: &str) -> Option<&str> {
    static FORMULA: LazyLock<Regex> = LazyLock::new(|| {
        let pattern = r"(?s)\$\$(.+?)\$\$|\$([^$\n]*[^$\n\\])\$|\\\((.+?)\\\)|\\\[(.+?)\\\]";
        Regex::new(pattern).expect("the pattern is a constant")
    });
    let captures = FORMULA.captures_iter(text).last()?;
    let inside = captures.iter().skip(1).flatten().next()?.as_str();
    // `5 apples at $2 and 3 at $4` has two prices and no formula.
    (!inside.contains(char::is_whitespace) || inside.contains(['\\', '=', '^', '(', '+'])).then_some(inside)
}

/// The last number of a text with its sign, currency and percent sign: `-$1,234.50`, `25%`, `3e-4`.
pub(crate) fn last_number(text: &str) -> Option<&str> {
    static NUMBER: LazyLock<Regex> = LazyLock::new(|| {
        let pattern = r"(?:[-+\u{2212}]\s?)?(?:\\?[$\u{20ac}\u{a3}\u{a5}]\s?)?(?:[-\u{2212}])?(?:\d{1,3}(?:(?:,|\{,\}|\\!,\\!|\\,)\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s?\\?%)?";
        Regex::new(pattern).expect("the pattern is a constant")
    });
    let found = NUMBER.find_iter(text).last()?;
    let number = found.as_str();
    // The minus of `10-4` is an operator.
    let follows = text[..found.start()].ends_with(|c: char| c.is_alphanumeric() || c == ')');
    let signed = number.starts_with(['-', '+', '\u{2212}']);
    Some(if follows && signed { number.trim_start_matches(['-', '+', '\u{2212}']).trim_start() } else { number })
}

/// The value of what [`last_number`] finds, as it stands before a percent sign, and whether there is one.
pub(crate) fn parse_number(text: &str) -> Option<(f64, bool)> {
    let text = text.trim();
    let percent = text.ends_with('%');
    let plain = text.replace('\u{2212}', "-").replace("\\!", "").replace("{,}", "");
    let kept: String = plain.chars().filter(|c| c.is_ascii_alphanumeric() || ".-+".contains(*c)).collect();
    kept.parse::<f64>().ok().filter(|value| value.is_finite()).map(|value| (value, percent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_finds_its_answer() {
        for (form, text, answer) in [
            (AnswerFrom::Completion, " 5 \n", Some("5")),
            (AnswerFrom::Boxed, r"\boxed{1} then \boxed{\frac{1}{2}}.", Some(r"\frac{1}{2}")),
            (AnswerFrom::Boxed, r"\boxed{\{1, 2\}}", Some(r"\{1, 2\}")),
            (AnswerFrom::Boxed, r"$\boxed 7$", Some("7")),
            (AnswerFrom::Boxed, r"\boxed{1", None),
            (AnswerFrom::AnswerTag, "<answer>1</answer><answer> 2 </answer>", Some("2")),
            (AnswerFrom::AnswerTag, r"<answer>so \boxed{3}</answer>", Some("3")),
            (AnswerFrom::AnswerTag, "<answer>1", None),
            (AnswerFrom::Hashes, "#### 1\n#### 1,200\n", Some("1,200")),
            (AnswerFrom::Hashes, "1", None),
            (AnswerFrom::LastNumber, "from 10-4 apples", Some("4")),
            (AnswerFrom::LastNumber, "a loss of -$1,234.50!", Some("-$1,234.50")),
            (AnswerFrom::LastNumber, "about 25 %.", Some("25 %")),
            (AnswerFrom::LastNumber, "none", None),
            (AnswerFrom::Auto, "The answer is 3.5. I hope so.", Some("3.5")),
            (AnswerFrom::Auto, "**Answer:** 12 apples", Some("12 apples")),
            (AnswerFrom::Auto, "He pays $3 and then $4, and after that another 7 more of them than before", Some("7")),
            (
                AnswerFrom::Auto,
                r"Then $x=2$ and $y=\frac12$ as was asked for in the beginning of the problem",
                Some(r"y=\frac12"),
            ),
            (AnswerFrom::Auto, "42", Some("42")),
        ] {
            assert_eq!(form.find(text), answer, "{form:?} in {text}");
        }
    }

    #[test]
    fn numbers_are_read_with_separators_currency_and_percent() {
        for (text, value) in [
            ("-$1,234.50", (-1234.5, false)),
            ("25\\%", (25.0, true)),
            ("\u{2212}3", (-3.0, false)),
            (".5", (0.5, false)),
            ("10{,}000", (10000.0, false)),
            ("2e-3", (0.002, false)),
        ] {
            assert_eq!(parse_number(text), Some(value), "{text}");
        }
        assert_eq!(parse_number("abc"), None);
    }
}
