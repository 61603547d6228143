//! Answers in sentences: finds the sentence that is the answer, and its value.

use super::formulas::{formulas, inside};
use super::numbers::{
    first_group, first_number, first_values, group_around, last_value_range, ratio_before, relations_before,
    values_before,
};
use crate::math::{is_name, unit_length};
use crate::patterns::regex;
use std::ops::Range;

/// The maximum length of a sentence that is an answer, in bytes.
const WINDOW: usize = 2000;

/// Returns the rest of the sentence after the last `answer is` or `answer:`.
pub(super) fn last_said(text: &str) -> Option<&str> {
    regex!(
        SAID,
        r"(?i)(?:答案|综上)\s*(?:应该|应|就)?\s*(?:是|为|[:=])\s*:?\s*|(?:^|\s)答\s*:\s*|(?:答案|故|应|因此|所以|综上|本题)\s*[选填](?:择)?\s*:?\s*|(?:respuesta|réponse|antwort|resposta|risposta|ответ|đáp án|cevap|الإجابة|الجواب|جواب|پاسخ|उत्तर|答え|정답|답)(?:\s+\p{Alphabetic}+){0,2}?\s*(?:\s(?:es|est|ist|é|è|هي|هو)\s|は|은|는|:)\s*|\banswers?\b(?:\s+(?:to|of|for)\b[^.:\n]{0,100}?)?\s*\**\s*(?:is|are|was|were|will be|would be|must be|should be|=|:)\**\s*:?\**\s*"
    );
    regex!(NOT, r"(?i)^not\b");
    let said = SAID.find_iter(text).filter(|said| !NOT.is_match(&text[said.end()..])).last()?;
    let marks = |c: char| "*\"'\u{201c}\u{201d}".contains(c);
    let answer = first_sentence(&text[said.end()..]).trim().trim_start_matches("\\\"").trim_end_matches("\\\"");
    let answer = answer.trim_matches(marks).trim();
    (!answer.is_empty()).then_some(answer)
}

/// Returns the rest of the sentence after the last `final answer is` or `Final Answer:`, if it has a value.
pub(super) fn final_answer(text: &str) -> Option<&str> {
    regex!(FINAL, r"(?i)\bfinal\s+answer\b");
    let start = FINAL.find(text)?.start();
    last_said(&text[start..]).filter(|said| said.contains(|c: char| c.is_ascii_digit() || c == '$'))
}

/// Returns the first sentence of a text. It ends at a full stop that is not in a number or a formula, or at the end of the line.
fn first_sentence(text: &str) -> &str {
    let text = text.trim_start();
    let mut window = text.len().min(WINDOW);
    while !text.is_char_boundary(window) {
        window -= 1;
    }
    let text = &text[..window];
    let formulas = formulas(text);
    let within = |i: usize| formulas.iter().any(|formula| formula.contains(&i));
    let ends = |&(i, c): &(usize, char)| {
        let next = text[i + c.len_utf8()..].chars().next();
        let is_end = match c {
            '\n' => true,
            '.' => {
                next.is_none_or(|next| next.is_whitespace() || "*\"'\u{201d})]<".contains(next))
                    && !text[i + 1..].starts_with(". ")
            }
            '!' | '?' => next.is_some_and(char::is_whitespace) && text[..i].ends_with(|c: char| c.is_alphabetic()),
            '<' => text[i..].starts_with("<|") || text[i..].starts_with("</"),
            _ => false,
        };
        is_end && !within(i)
    };
    let end = text.char_indices().find(ends).map_or(text.len(), |(i, _)| i);
    &text[..end]
}

// Matches the end of a sentence.
regex!(END, r"\n|[.!?]\s");

/// Returns the value of the last sentence that has one: its last formula, or else the result of its last equation, or its last number or
/// calculation.
pub(super) fn last_value_of(text: &str) -> Option<&str> {
    let mut formulas = formulas(text);
    while explains(text, &formulas) {
        formulas.pop();
    }
    let Some(last) = formulas.last() else { return last_result(text) };
    if let Some(value) = value_before_name(text, last) {
        return Some(value);
    }
    let behind = &text[last.end..];
    if let Some(value) = value_at(text, last) {
        return Some(value);
    }
    let formula = several(text, &formulas).unwrap_or_else(|| inside(&text[last.clone()]));
    // A number in a later sentence takes precedence over a formula.
    let rest = || {
        let end = END.find(behind);
        let later = end.and_then(|end| last_result(&behind[end.end()..]));
        later.or_else(|| value_of_subject(&behind[..end.map_or(behind.len(), |end| end.start())]))
    };
    let later = if formula.ends_with('.') { last_result(behind) } else { rest() };
    later.or(Some(formula))
}

// Matches a verb before the value of its subject.
regex!(
    IS,
    r"(?i)(?:\b(?:is|are|was|were|be|equals?|gives?|yields?|measures?|makes?|becomes?|totals?|(?:has|have)(?:\s+(?:area|length|perimeter|volume|degree|value|order|size))?|contains?|costs?|takes?|get|obtain|find|have|comes? (?:out )?to|amounts? to|simplifies to|reduces to|evaluates to|turns out to be)\s+(?:(?:equal to|exactly|approximately|about|only|just|therefore|thus|then|now|an?)\s+)*|(?:是|为|等于|得|=|≈)\s*)$"
);

/// Returns the value behind the last formula of a text if the formula is the place of an extremum: `12` of `The maximum is attained at
/// $x=3$, which is 12`.
fn value_at<'a>(text: &'a str, formula: &Range<usize>) -> Option<&'a str> {
    regex!(
        PLACE,
        r"(?i)\b(?:attained|reached|achieved|obtained|assumed|taken|occurs?|occurring|happens)\s+(?:only\s+)?(?:at|when|for|by|if|where)\s*$"
    );
    regex!(
        GIVES,
        r"(?i)^\s*,?\s*(?:(?:which|and|where|there)\s+(?:(?:it|this|its value|the value)\s+)?(?:is|equals|gives|yields|has value)|(?:giving|yielding|with|and is)(?:\s+(?:us|it))?)\s+(?:(?:an?|the)\s+(?:\w+\s+){0,2}(?:of\s+)?)?(?:equal to\s+|exactly\s+)?"
    );
    let behind = &text[formula.end..];
    let end = END.find(behind).map_or(behind.len(), |end| end.start());
    let gives = GIVES.find(&behind[..end]).filter(|_| PLACE.is_match(&text[..formula.start]))?;
    let rest = &behind[gives.end()..end];
    let value = first_values(rest).filter(|value| value.start == 0 && text[formula.clone()].contains('='))?;
    let unit = unit_length(&rest[value.end..]);
    (!rest[value.end + unit..].contains(|c: char| c.is_ascii_digit())).then(|| rest[..value.end + unit].trim())
}

/// Returns the number before the last formula of a text if the formula is its unit, as `$\text{cm}^2$` of `is 12 $\text{cm}^2$`, only
/// names what is counted, `24` of `There are 24 ways to arrange $ABCD$`, or is a condition: `49` of `The maximum is 49 when $x = 7$`.
fn value_before_name<'a>(text: &'a str, formula: &Range<usize>) -> Option<&'a str> {
    regex!(
        COUNT,
        r"(?i)\bthere\s+(?:(?:is|are|exists?|were|was|must be|will be)\s+)(?:(?:exactly|only|thus|therefore|a total of|at most|at least)\s+)*$"
    );
    regex!(
        CLAUSE,
        r"(?i)[,;:=]|\b(?:so|thus|then|hence|therefore|is|are|was|were|has|have|gives?|equals?|which|each|with)\b"
    );
    let start = END.find_iter(&text[..formula.start]).last().map_or(0, |end| end.end());
    let sentence = &text[start..formula.start];
    let unit = format!(" {}", inside(&text[formula.clone()]));
    if unit_length(&unit) == unit.len()
        && let Some(value) = last_value_range(sentence).filter(|value| sentence[value.end..].trim().is_empty())
    {
        return Some(sentence[value].trim());
    }
    regex!(
        CONDITION,
        r"^(?:\s*(?:square|cubic)?\s*units)?,?\s*(?:when|if|at|where|for|(?:which is )?(?:reached|attained|achieved|obtained)(?:\s+(?:at|when|for|by|if))?)\s*$"
    );
    let last = last_value_range(sentence).filter(|_| unit.contains('='));
    if let Some(value) = last.filter(|value| IS.is_match(&sentence[..value.start])) {
        let end = value.end + unit_length(&sentence[value.end..]);
        if CONDITION.is_match(&sentence[end..]) {
            return Some(sentence[value.start..end].trim());
        }
    }
    let value = first_values(sentence)?;
    let is_count = COUNT.is_match(&sentence[..value.start]) && !CLAUSE.is_match(&sentence[value.end..]);
    is_count.then(|| sentence[value].trim())
}

/// Returns the value that a sentence gives to its subject, a formula: `9` of ` is 9.`, `15 cm` of ` equals 15 cm.`, `3 and 5` of ` are 3 and
/// 5`. `None` for a comparison, `is 2 more than 3`, and for a clause that explains the formula, `, which is 9`.
fn value_of_subject(behind: &str) -> Option<&str> {
    regex!(CLAUSE, r"(?i)\b(?:which|where|since|because|if|when|whose|whereas|not|as|while|for)\b|因为|不是|其中");
    regex!(COMPARED, r"(?i)\d|\b(?:more|less|fewer|greater|larger|smaller|times|than|of|from|or)\b|[-+*/^=]");
    let value = first_values(behind)?;
    let value = first_group(behind).filter(|group| group.contains(&value.start)).unwrap_or(value);
    let before = &behind[..value.start];
    let unit = unit_length(&behind[value.end..]);
    let after = &behind[value.end + unit..];
    let is_value = IS.is_match(before) && !CLAUSE.is_match(before) && !COMPARED.is_match(after);
    is_value.then(|| behind[value.start..value.end + unit].trim())
}

/// Returns `true` if the last formula explains the formula before it: `$A = 12.6$, where $r = 2$`.
fn explains(text: &str, formulas: &[Range<usize>]) -> bool {
    regex!(
        CLAUSE,
        r"^[\s,]*\(?(?:where|using|since|because|for all|for every|for any|for each|whenever|provided)\b[^.\n]*$"
    );
    let [.., before, last] = formulas else { return false };
    let has_value = text[before.clone()].contains(|c: char| c.is_ascii_digit() || c == '=');
    has_value && !text[..before.end - 1].trim_end().ends_with('.') && CLAUSE.is_match(&text[before.end..last.start])
}

/// Returns the formulas at the end of an enumeration after a verb: `$3$ and $8$` of `The solutions are $3$ and $8$`.
fn several<'a>(text: &'a str, formulas: &[Range<usize>]) -> Option<&'a str> {
    regex!(JOINING, r"(?i)^\s*(?:[,;]\s*)?(?:and|or|和|或|及|与)?\s*$");
    regex!(VERB, r"(?i)(?:\b(?:are|were|be|either|solutions? is)|[:是为得])\s*$");
    regex!(SUBJECT, r"^\s*(?:are|were)\b");
    let joins = |pair: &&[Range<usize>]| {
        let gap = &text[pair[0].end..pair[1].start];
        !gap.trim().is_empty() && JOINING.is_match(gap)
    };
    let count = formulas.windows(2).rev().take_while(joins).count();
    let first = formulas.get(formulas.len() - 1 - count)?;
    let has_or = |pair: &[Range<usize>]| {
        let gap = &text[pair[0].end..pair[1].start];
        gap.contains("or") || gap.contains('或')
    };
    let is_choice = formulas.windows(2).rev().take(count).any(has_or);
    (count > 0
        && (is_choice
            || VERB.is_match(&text[..first.start])
            || SUBJECT.is_match(&text[formulas[formulas.len() - 1].end..])))
    .then(|| &text[first.start..formulas[formulas.len() - 1].end])
}

/// Returns the value of a text without formulas: `15` of `There are 9 + 6 = 15 liters of water out of the 24 liters`.
fn last_result(text: &str) -> Option<&str> {
    // Matches text between a result and a later number after which the later number is the result.
    regex!(NEXT, r"(?i)^\D*?(?:[,;+*/=<>]|\b(?:so|then|thus|hence|therefore|leaving|which)\b)");
    let last = last_value_range(text)?;
    let start = END.find_iter(&text[..last.start]).last().map_or(0, |end| end.end());
    if [" not", "不是", "并非"].iter().any(|not| text[..last.start].trim_end().ends_with(not)) {
        return None;
    }
    let sentence = &text[start..];
    let grouped = group_around(sentence, last.end - start)
        .or_else(|| relations_before(sentence, last.end - start))
        .or_else(|| ratio_before(sentence, last.end - start));
    if let Some(grouped) = grouped {
        return Some(sentence[grouped].trim());
    }
    let equal = text[start..last.start].rfind('=').map(|at| start + at + 1);
    let result = equal.and_then(|from| {
        let value = first_number(&text[from..last.start])?;
        (!NEXT.is_match(&text[from + value.end..])).then(|| &text[from + value.start..from + value.end])
    });
    let unit = || last.start..last.end + unit_length(&text[last.end..]);
    let value = || values_before(text, last.end).unwrap_or_else(unit);
    Some(result.unwrap_or_else(|| text[value()].trim()))
}

/// Returns the possible values of an answer that is a sentence, most likely first: `72` of `Nora sold a total of 72 clips`, `72, because 48
/// + 24 = 72`, `72 (not 71)` and `72!`. The unchanged answer is not among them.
pub(super) fn values_of_sentence(text: &str) -> Vec<&str> {
    let (text, mut values) = (text.trim(), Vec::new());
    if text.len() > WINDOW {
        return values;
    }
    let bare = text.trim_end_matches(['!', '?', '.']).trim_end();
    let head = without_remark(bare);
    let subject = behind_verb(head);
    if subject != head && subject.starts_with("not ") {
        return values;
    }
    values.extend([bare, head, subject].into_iter().filter(|part| *part != text && !part.is_empty()));
    values.extend(single_value(subject).or_else(|| single_value(head)));
    // The smallest number of `n >= 12`.
    regex!(BOUND, r"^[A-Za-z]\s*(?:<=|>=|[<>≤≥])\s*([-\u{2212}]?[\d.,]+)$");
    values.extend(BOUND.captures(bare).and_then(|bound| Some(bound.get(1)?.as_str())));
    values.dedup();
    values
}

/// Returns the sentence before a remark: `(not 71)`, `, because ...`.
fn without_remark(text: &str) -> &str {
    regex!(
        REMARK,
        r"(?i)[\s,;]*(?:,\s*which\b|\s\([^()\\$]*?\p{Alphabetic}{2,}|[,;\s]\s*(?:because|since|as|where|whereas|not|and not|but|instead|rather|given|i\.e\.|e\.g\.|that is|so that|when|using|after|before|if|with)\b|\s[\u{2013}\u{2014}-]{1,2}\s+(?:I\b|\p{Alphabetic}{2,}))"
    );
    let formulas = formulas(text);
    let outside = |at: usize| !formulas.iter().any(|formula| formula.contains(&at));
    // A remark does not start a sentence.
    let remark = REMARK.find_iter(text).find(|remark| remark.start() > 0 && outside(remark.start()));
    // Before a remark, the answer must be a value or one word.
    let is_answer =
        |head: &str| head.contains(|c: char| c.is_ascii_digit() || "$\\".contains(c)) || !head.contains(' ');
    let remark = remark.filter(|remark| is_answer(&text[..remark.start()]));
    remark.map_or(text, |remark| text[..remark.start()].trim_end())
}

/// Returns the text after the last verb: `34` of `The largest $n$ is 34`.
fn behind_verb(text: &str) -> &str {
    regex!(
        VERB,
        r"(?i)(?:^|\s)(?:is|are|was|were|be|equals?|becomes?|makes?|totals?|gives|get|has|have|exactly|approximately|about|:)(?:\s+(?:equal to|exactly|approximately|about|only|just|therefore|thus))*:?\s+|(?:^|[^不])(?:是|为|等于)\s*"
    );
    let formulas = formulas(text);
    let outside = |at: usize| !formulas.iter().any(|formula| formula.contains(&at));
    let verb = VERB.find_iter(text).filter(|verb| outside(verb.start()) && verb.end() < text.len()).last();
    verb.map_or(text, |verb| text[verb.end()..].trim())
}

/// Returns the only value in a text with words: the last formula, or the last number if it is not part of an expression. `3 apples and 4
/// pears` has two values, and `x + 3` is a formula without dollars.
fn single_value(text: &str) -> Option<&str> {
    regex!(WORD, r"\\?\p{Alphabetic}{2,}");
    let is_joining = |word: &str| ["and", "or"].contains(&word.to_lowercase().as_str());
    let has_words = |text: &str| WORD.find_iter(text).any(|word| !is_name(word.as_str()));
    if let Some(formula) = formulas(text).pop() {
        let outside = format!("{} {}", &text[..formula.start], &text[formula.end..]);
        let is_several = WORD.find_iter(&outside).any(|word| is_joining(word.as_str()));
        return (!is_several && has_words(&outside)).then(|| inside(&text[formula]));
    }
    let range = last_value_range(text)?;
    let (before, after) = (&text[..range.start], &text[range.end..]);
    let is_formula = |word: &str| word.starts_with('\\') || is_name(word) || is_joining(word);
    regex!(RATIO, r"\d\s+to\s+[-\d]");
    let is_denied = |before: &str| ["不是", "并非"].iter().any(|not| before.ends_with(not));
    let is_alone = before.trim_end().rsplit(' ').next() != Some("not")
        && !is_denied(before.trim_end())
        && !RATIO.is_match(text)
        && !WORD.find_iter(before).any(|word| is_formula(word.as_str()))
        && !before.trim_end().ends_with(['+', '-', '*', '/', '^', '(', '_', '{', '[', ',', '\u{2212}', '\u{d7}'])
        && !after.trim_start().starts_with(['+', '-', '*', '/', '^', '=', '(', '_', '{', '}', '\\', ')', ']'])
        && !is_variable(after);
    let unit = unit_length(after);
    (is_alone && has_words(&format!("{before} {after}"))).then(|| text[range.start..range.end + unit].trim())
}

/// Returns `true` if a number is multiplied by a variable of one letter: `3x`. `3m` has a unit.
fn is_variable(after: &str) -> bool {
    let mut letters = after.chars();
    letters.next().is_some_and(|c| c.is_ascii_alphabetic() && !"mghslLkmC".contains(c))
        && letters.next().is_none_or(|c| !c.is_ascii_alphabetic())
}

pub(super) fn is_short(text: &str) -> bool {
    /// The maximum length in characters of a completion that is an answer as a whole.
    const SHORT: usize = 60;
    let text = text.trim();
    !text.contains('\n') && text.chars().count() <= SHORT
}
