//! Which part of a completion is its answer.

mod boxes;
mod formulas;
mod letters;
mod numbers;
mod sentence;

use crate::math::Answer;
use crate::reward_fn::RewardInput;
use boxes::{end_of_last_box, last_boxes, last_hashes, last_tag};
use data::Item;
use numbers::last_number;
pub(crate) use numbers::{parse_number, plain_number};
use regex::Regex;
use sentence::{final_answer, is_short, last_said, last_value_of, values_of_sentence};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::sync::LazyLock;

/// Which part of a completion is its answer: the key `rewards.answer_from`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AnswerFrom {
    /// The first of these that is there: `answer_tag`, `boxed`, `hashes`, the sentence behind the last `answer is` or `answer:`, the
    /// completion itself where it is one short line without a formula, and else the value of the last sentence that has one: its last
    /// formula between dollars, or its last number or calculation.
    #[default]
    Auto,
    /// The whole completion.
    Completion,
    /// The contents of the last `\boxed{...}`, braces in it included; several boxes with a comma, `and` or `or` between them are one answer.
    Boxed,
    /// The contents of the last `<answer>...</answer>`, or of its `\boxed{...}` where it has one.
    AnswerTag,
    /// The line behind the last `####`, GSM8K's format.
    Hashes,
    /// The last number or fraction.
    LastNumber,
}

impl AnswerFrom {
    /// The answer in `text`; `None` where there is none in this form.
    ///
    /// ```
    /// use rewards::AnswerFrom;
    ///
    /// let find = |from: AnswerFrom, text| from.find(text).map(|found| found.into_owned());
    /// let text = "6 x 7 is 42, so the answer is \\boxed{\\frac{84}{2}}.";
    /// assert_eq!(find(AnswerFrom::Auto, text).as_deref(), Some("\\frac{84}{2}"));
    /// assert_eq!(find(AnswerFrom::Hashes, "6 x 7 = 42\n#### 42").as_deref(), Some("42"));
    /// assert_eq!(find(AnswerFrom::Boxed, "\\boxed{1} and \\boxed{2}").as_deref(), Some("1, 2"));
    /// assert_eq!(find(AnswerFrom::AnswerTag, "no tag"), None);
    /// ```
    pub fn find(self, text: &str) -> Option<Cow<'_, str>> {
        let found = match self {
            Self::Completion => Some(text.into()),
            Self::Boxed => last_boxes(text),
            Self::AnswerTag => last_tag(text),
            Self::Hashes => last_hashes(text).map(Cow::Borrowed),
            Self::LastNumber => last_number(text).map(Cow::Borrowed),
            Self::Auto => marked(text).or_else(|| match without_calculations(text) {
                Cow::Borrowed(text) => unmarked(text).map(Cow::Borrowed),
                Cow::Owned(text) => unmarked(&text).map(|found| Cow::Owned(found.to_owned())),
            }),
        };
        found.map(|found| match found {
            Cow::Borrowed(found) => Cow::Borrowed(found.trim()),
            owned => owned,
        })
    }

    /// Returns the letter of multiple choice that `text` chooses, at the first place in the order of [`AnswerFrom::Auto`] with a letter.
    fn letter(self, text: &str) -> Option<char> {
        let of = |part: Cow<'_, str>| letters::label(&part).or_else(|| letters::chosen(&part));
        match self {
            Self::Auto => last_tag(text)
                .and_then(of)
                .or_else(|| last_boxes(text).and_then(|boxes| letters::label(&boxes)))
                .or_else(|| last_hashes(text).and_then(|line| of(line.into())))
                .or_else(|| letters::chosen(text))
                .or_else(|| Some(text).filter(|text| is_short(text)).and_then(letters::label)),
            from => from.find(text).and_then(of),
        }
    }
}

/// The answer in a text that says where it is.
fn marked(text: &str) -> Option<Cow<'_, str>> {
    // A final answer behind the last box is the later one.
    let boxes = || match end_of_last_box(text).and_then(|end| final_answer(&text[end..])) {
        Some(said) => Some(Cow::Borrowed(said)),
        None => last_boxes(text),
    };
    let said = || last_hashes(text).or_else(|| last_said(text)).map(Cow::Borrowed);
    last_tag(text).or_else(boxes).or_else(said)
}

/// The text without the calculations that GSM8K puts before their results: `48/2=<<48/2=24>>24`.
fn without_calculations(text: &str) -> Cow<'_, str> {
    static CALCULATION: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(r"<<[^<>\n]*>>").expect("the pattern is a constant"));
    CALCULATION.replace_all(text, "")
}

/// The answer in a text that does not.
fn unmarked(text: &str) -> Option<&str> {
    if is_short(text) && formulas::formulas(text).is_empty() { Some(text) } else { last_value_of(text).or(Some(text)) }
}

/// How the answer of a completion is found: the keys `rewards.answer_from` and `rewards.answer_after_think`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerRule {
    /// The part of the completion that is its answer.
    pub from: AnswerFrom,
    /// Only what follows the last `</think>` counts, where there is one.
    pub after_think: bool,
}

impl Default for AnswerRule {
    fn default() -> Self {
        Self { from: AnswerFrom::Auto, after_think: true }
    }
}

impl AnswerRule {
    /// The answer of a completion as text.
    pub(crate) fn find<'a>(&self, completion: &'a str) -> Option<Cow<'a, str>> {
        self.from.find(self.part(completion)).filter(|found| !found.is_empty())
    }

    /// The part of a completion in which the answer is searched.
    fn part<'a>(&self, completion: &'a str) -> &'a str {
        let behind = completion.rsplit_once("</think>").filter(|_| self.after_think);
        behind.map_or(completion, |(_, behind)| behind)
    }

    /// Returns the answer of a completion and, if the answer is a sentence, the values that the sentence may have.
    pub(crate) fn readings(&self, completion: &str) -> Vec<String> {
        let text = self.part(completion);
        let Some(found) = self.from.find(text).filter(|found| !found.is_empty()) else { return Vec::new() };
        let is_sentence = match self.from {
            AnswerFrom::Completion | AnswerFrom::LastNumber => false,
            // `72!` in a box is a factorial, and words in a box need a verb.
            _ => found.contains(" is ") || last_boxes(text).is_none_or(|boxes| boxes.trim() != found),
        };
        let plain = if is_sentence { found.replace("**", "") } else { String::new() };
        let values: Vec<String> = values_of_sentence(&plain).into_iter().map(str::to_owned).collect();
        std::iter::once(found.into_owned()).chain(values).collect()
    }

    /// The letter of multiple choice that a completion chooses.
    pub(crate) fn letter(&self, completion: &str) -> Option<char> {
        self.from.letter(self.part(completion))
    }
}

/// Returns `true` if the completion has a right answer of its row as mathematics, or its letter of multiple choice; `None` for rows without a right
/// answer.
pub(crate) fn is_right(rule: AnswerRule, input: &RewardInput<'_>) -> Option<bool> {
    let references = references(input.item)?;
    let readings = rule.readings(input.completion);
    let is_letter =
        |reference: &str| letters::label(reference).is_some_and(|letter| rule.letter(input.completion) == Some(letter));
    Some(references.iter().any(|reference| {
        let right = Answer::new(reference);
        readings.iter().any(|reading| right.is(reading)) || is_letter(reference)
    }))
}

/// The right answers of a row; `None` where it has none. A right answer that is a whole solution, as in GSM8K and MATH, is its final answer.
pub(crate) fn references(item: &Item) -> Option<Vec<Cow<'_, str>>> {
    /// The longest answer in characters that is no solution.
    const LONGEST: usize = 300;
    let right = item.answers();
    let short = right.map(|answer| {
        let marked = last_hashes(answer).map(Cow::Borrowed).or_else(|| last_boxes(answer));
        let solution = || if answer.chars().count() > LONGEST { AnswerFrom::Auto.find(answer) } else { None };
        marked.or_else(solution).unwrap_or(Cow::Borrowed(answer.trim()))
    });
    let short: Vec<Cow<'_, str>> = short.collect();
    (!short.is_empty()).then_some(short)
}

/// The letter of multiple choice that a right answer is.
pub(crate) fn letter_of(reference: &str) -> Option<char> {
    letters::label(reference)
}
