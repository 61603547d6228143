//! Finds the answer in a completion.

mod boxes;
mod formulas;
mod json;
mod letters;
mod numbers;
mod sentence;

use crate::math::Answer;
use crate::patterns::regex;
use crate::plain::{chinese_number, plain, with_persian_decimals};
use crate::reward_fn::RewardInput;
use crate::thoughts::behind_thoughts;
use boxes::{end_of_last_box, last_boxes, last_hashes, last_tag};
use grpo_data::Item;
use json::json_answer;
pub(crate) use letters::label;
use letters::lone_letter;
use numbers::last_number;
pub(crate) use numbers::{parse_number, plain_number};
use sentence::{final_answer, is_short, last_said, last_value_of, values_of_sentence};
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use std::borrow::Cow;

/// The part of a completion that is its answer: the key `rewards.answer_from`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AnswerFrom {
    /// The first of these that exists: `answer_tag`, `boxed`, `hashes`, the sentence after the last `answer is` or `answer:`, the
    /// completion itself if it is one short line without a formula, and otherwise the value of the last sentence that has one: its last
    /// formula between dollars, or its last number or calculation.
    #[default]
    Auto,
    /// The whole completion.
    Completion,
    /// The contents of the last `\boxed{...}`, including inner braces; several boxes separated by a comma, `and` or `or` are one answer.
    Boxed,
    /// The contents of the last `<answer>...</answer>`, or of the `\boxed{...}` in it.
    AnswerTag,
    /// The line after the last `####`, the format of GSM8K.
    Hashes,
    /// The last number or fraction.
    LastNumber,
}

impl AnswerFrom {
    /// Returns the answer in `text`; `None` if there is none in this form.
    ///
    /// ```
    /// use grpo_rewards::AnswerFrom;
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
                Cow::Borrowed(text) => match without_bold(text) {
                    Cow::Borrowed(text) => unmarked(text).map(Cow::Borrowed),
                    Cow::Owned(text) => unmarked(&text).map(|found| Cow::Owned(found.to_owned())),
                },
                Cow::Owned(text) => unmarked(&without_bold(&text)).map(|found| Cow::Owned(found.to_owned())),
            }),
        };
        found.map(|found| match found {
            Cow::Borrowed(found) => Cow::Borrowed(found.trim()),
            owned => owned,
        })
    }

    /// Returns the letter of multiple choice that `text` chooses, from the first part with a letter, in the order of [`AnswerFrom::Auto`].
    fn letter(self, text: &str) -> Option<char> {
        let of = |part: Cow<'_, str>| label(&part).or_else(|| lone_letter(&part)).or_else(|| letters::chosen(&part));
        match self {
            Self::Auto => json_answer(text)
                .map(Cow::Owned)
                .or_else(|| last_tag(text))
                .and_then(of)
                .or_else(|| last_boxes(text).and_then(|boxes| label(&boxes).or_else(|| lone_letter(&boxes))))
                .or_else(|| last_hashes(text).and_then(|line| of(line.into())))
                .or_else(|| letters::chosen(text))
                .or_else(|| {
                    Some(text).filter(|text| is_short(text)).and_then(|text| label(text).or_else(|| lone_letter(text)))
                }),
            from => from.find(text).and_then(of),
        }
    }
}

/// Returns the number in Chinese numerals of a sentence without digits: 24 of `一共有二十四个`.
fn numeral_of_sentence(text: &str) -> Option<String> {
    regex!(NUMERAL, r"(?:^|[有是为剩要得共需:]\s*)([〇零一二两三四五六七八九十百千万亿]+)(?:[^分样]|$)");
    if text.contains(|c: char| c.is_ascii_digit()) {
        return None;
    }
    let numeral = NUMERAL.captures_iter(text).last()?;
    Some(chinese_number(&numeral[1])?.to_string())
}

fn marked(text: &str) -> Option<Cow<'_, str>> {
    if let Some(answer) = json_answer(text) {
        return Some(Cow::Owned(answer));
    }
    // A final answer after the last box takes precedence.
    let boxes = || match end_of_last_box(text).and_then(|end| final_answer(&text[end..])) {
        Some(said) => Some(Cow::Borrowed(said)),
        None => last_boxes(text),
    };
    let said = || last_hashes(text).or_else(|| last_said(text)).map(Cow::Borrowed);
    last_tag(text).or_else(boxes).or_else(said)
}

/// Writes a comma for `and` in a list of several values, which is no mixed number: `The roots are 1 and 1/2`.
fn with_lists(text: &str) -> Cow<'_, str> {
    regex!(
        SEVERAL,
        r"(?i)(\b(?:are|were|either|both|between|roots?|solutions?|zeros?|values|numbers|fractions)\b[^.\n]*?\d\s*\$?)\s+and\s+(\$?\s*(?:\d+\s*/|\\[dt]?frac))"
    );
    SEVERAL.replace_all(text, "$1, $2")
}

/// Removes the calculations that GSM8K puts before their results: `48/2=<<48/2=24>>24`.
fn without_calculations(text: &str) -> Cow<'_, str> {
    regex!(CALCULATION, r"<<[^<>\n]*>>");
    CALCULATION.replace_all(text, "")
}

/// Removes the marks of bold text, but no power: `2**3`.
fn without_bold(text: &str) -> Cow<'_, str> {
    regex!(BOLD, r"\*\*([^*\n]+)\*\*");
    BOLD.replace_all(text, "$1")
}

fn unmarked(text: &str) -> Option<&str> {
    if is_short(text) && formulas::formulas(text).is_empty() { Some(text) } else { last_value_of(text).or(Some(text)) }
}

/// The rule that finds the answer of a completion: the keys `rewards.answer_from` and `rewards.answer_after_think`.
#[derive(Clone, Copy, Debug, SmartDefault, PartialEq, Eq)]
pub struct AnswerRule {
    /// The part of the completion that is its answer.
    pub from: AnswerFrom,
    /// `true` if only the text after the last thought counts, such as after `</think>`.
    #[default(true)]
    pub after_think: bool,
}

impl AnswerRule {
    pub(crate) fn find(&self, input: &RewardInput<'_>) -> Option<String> {
        self.find_in(&self.part(input))
    }

    fn find_in(&self, text: &str) -> Option<String> {
        let found = self.from.find(text)?.into_owned();
        (!found.is_empty()).then_some(found)
    }

    /// Returns the part of a completion in which the answer is searched, with ASCII digits and punctuation.
    fn part<'a>(&self, input: &RewardInput<'a>) -> Cow<'a, str> {
        plain(self.visible(input))
    }

    fn visible<'a>(&self, input: &RewardInput<'a>) -> &'a str {
        // A completion that reached the length limit within the thoughts that the prompt has opened.
        let is_open = input.opens_think && input.truncated && input.conversation.is_none();
        if self.after_think { behind_thoughts(input.completion, is_open) } else { input.completion }
    }

    /// Returns the answer of a completion and, if the answer is a sentence, the values that the sentence may have.
    pub(crate) fn readings(&self, input: &RewardInput<'_>) -> Vec<String> {
        let text = self.visible(input);
        let decimals = with_persian_decimals(text).map(|decimals| self.readings_of(&plain(&decimals)));
        let mut readings = self.readings_of(&with_lists(&plain(text)));
        readings.extend(decimals.into_iter().flatten());
        readings
    }

    fn readings_of(&self, text: &str) -> Vec<String> {
        let Some(found) = self.find_in(text) else { return Vec::new() };
        let is_sentence = match self.from {
            AnswerFrom::Completion | AnswerFrom::LastNumber => false,
            // In a box, `72!` is a factorial, and only words with a verb are a sentence.
            _ => found.contains(" is ") || last_boxes(text).is_none_or(|boxes| boxes.trim() != found),
        };
        let plain = if is_sentence { found.replace("**", "") } else { String::new() };
        let numeral = Some(&plain).filter(|plain| !plain.is_empty()).and_then(|plain| numeral_of_sentence(plain));
        let values: Vec<String> = values_of_sentence(&plain).into_iter().map(str::to_owned).collect();
        std::iter::once(found).chain(values).chain(numeral).collect()
    }

    pub(crate) fn letter(&self, input: &RewardInput<'_>) -> Option<char> {
        self.from.letter(&self.part(input))
    }
}

/// Returns `true` if the answer of the completion is mathematically equivalent to a reference answer of its row, or is its letter of
/// multiple choice; `None` for rows without a reference answer.
pub(crate) fn is_right(rule: AnswerRule, input: &RewardInput<'_>) -> Option<bool> {
    let references = references(input.item)?;
    let readings = rule.readings(input);
    let is_letter = |reference: &str| label(reference).is_some_and(|letter| rule.letter(input) == Some(letter));
    Some(references.iter().any(|reference| {
        let right = Answer::new(reference);
        readings.iter().any(|reading| right.is(reading)) || is_letter(reference)
    }))
}

/// Returns the reference answers of a row; `None` if it has none. For a whole solution, as in GSM8K and MATH, this is its final answer.
pub(crate) fn references(item: &Item) -> Option<Vec<String>> {
    /// The maximum length in characters of a reference answer that is not a solution.
    const LONGEST: usize = 300;
    let written = |answer: &str| {
        [Some(plain(answer).into_owned()), with_persian_decimals(answer).map(|text| plain(&text).into_owned())]
    };
    let short = item.answers().flat_map(|answer| written(answer).into_iter().flatten()).map(|answer| {
        let marked = last_hashes(&answer).map(Cow::Borrowed).or_else(|| last_boxes(&answer));
        let solution = || if answer.chars().count() > LONGEST { AnswerFrom::Auto.find(&answer) } else { None };
        marked.or_else(solution).unwrap_or(Cow::Borrowed(answer.trim())).into_owned()
    });
    let short: Vec<String> = short.collect();
    (!short.is_empty()).then_some(short)
}
