//! Answers between delimiters: `\boxed{}`, `<answer>`, `####`.

use crate::patterns::regex;
use std::borrow::Cow;

/// Returns the contents of the last `\boxed{...}` or `\fbox{...}`, with balanced braces. Several boxes that form one answer, such as
/// `\boxed{1} and \boxed{2}`, become a list with commas. `None` if the last box is not closed.
pub(super) fn last_boxes(text: &str) -> Option<Cow<'_, str>> {
    let starts = starts(text);
    let (&last, before) = starts.split_last()?;
    let mut start = last;
    let (inside, _) = box_at(&text[start..])?;
    let mut boxes = vec![inside];
    for &before in before.iter().rev() {
        let Some((inside, end)) = box_at(&text[before..start]) else { break };
        if !joins(&text[before + end..start]) {
            break;
        }
        boxes.push(inside);
        start = before;
    }
    boxes.reverse();
    Some(match boxes.iter().all(|other| *other == inside) {
        true => Cow::Borrowed(inside),
        false => Cow::Owned(boxes.join(", ")),
    })
}

pub(super) fn end_of_last_box(text: &str) -> Option<usize> {
    let start = *starts(text).last()?;
    box_at(&text[start..]).map(|(_, end)| start + end)
}

fn starts(text: &str) -> Vec<usize> {
    regex!(BOX, r"\\(?:boxed|fbox)");
    BOX.find_iter(text).map(|found| found.start()).collect()
}

/// Returns the contents of the box at the beginning of `text`, and its length in bytes.
fn box_at(text: &str) -> Option<(&str, usize)> {
    let rest = text[1..].trim_start_matches(|c: char| c.is_ascii_alphabetic()).trim_start();
    let Some(inside) = rest.strip_prefix('{') else {
        // `\boxed 5`
        let word = rest.split(|c: char| c == '$' || c.is_whitespace()).next().filter(|word| !word.is_empty())?;
        return Some((word, text.len() - rest.len() + word.len()));
    };
    let (mut depth, mut chars) = (0usize, inside.char_indices());
    while let Some((i, c)) = chars.next() {
        match c {
            '\\' => _ = chars.next(),
            '{' => depth += 1,
            '}' if depth == 0 => return Some((&inside[..i], text.len() - inside.len() + i + 1)),
            '}' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// Returns `true` if the boxes before and after `gap` form one answer: the gap is empty, a comma, or a few words with `and` or `or`. The
/// words of a derivation separate boxes.
fn joins(gap: &str) -> bool {
    regex!(WORD, r"\\?[[:alpha:]]+");
    const WORDS: &str =
        "so|then|thus|hence|therefore|which|not|is|are|gives|giving|get|we|where|but|to|from|because|since|instead";
    const COMMANDS: &str = "implies|rightarrow|to|therefore|approx|iff|neq?|leq?|geq?|times|cdot|div|pm";
    regex!(SEPARATING, format!(r"(?i)^(?:{WORDS}|\\(?:{COMMANDS}))$"));
    if gap.len() > 100 || gap.contains("\n\n") || gap.contains(['.', '+', '/', '^', '<', '>', '\u{2212}']) {
        return false;
    }
    let words: Vec<&str> = WORD.find_iter(gap).map(|word| word.as_str()).collect();
    if words.iter().any(|word| SEPARATING.is_match(word)) {
        return false;
    }
    let is_joined = gap.contains([',', ';', '&']) || words.iter().any(|word| ["and", "or"].contains(word));
    let is_empty = gap.chars().all(|c| c.is_whitespace() || "$()[]{}\\".contains(c));
    is_empty || is_joined && words.iter().filter(|word| word.len() > 1 && !word.starts_with('\\')).count() <= 6
}

/// Returns the contents of the last `<answer>...</answer>`, or of the boxes in it.
pub(super) fn last_tag(text: &str) -> Option<Cow<'_, str>> {
    let (before, _) = text.rsplit_once("</answer>")?;
    let (_, inside) = before.rsplit_once("<answer>")?;
    last_boxes(inside).or(Some(Cow::Borrowed(inside)))
}

/// Returns the line after the last `####`.
pub(super) fn last_hashes(text: &str) -> Option<&str> {
    let (_, rest) = text.rsplit_once("####")?;
    rest.lines().map(str::trim).find(|line| !line.is_empty())
}
