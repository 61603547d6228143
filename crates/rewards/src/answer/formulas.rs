//! Finds formulas between dollars, as opposed to prices.

use crate::math::environment_name;
use crate::patterns::regex;
use std::ops::Range;

/// Finds the formulas of a text, `$...$`, `$$...$$`, `\(...\)`, `\[...\]` and environments such as `align*`, with their delimiters.
pub(super) fn formulas(text: &str) -> Vec<Range<usize>> {
    let bytes = text.as_bytes();
    let (mut found, mut i) = (Vec::new(), 0);
    // Closing delimiters that do not occur in the rest of the text, so that they are not searched again.
    let mut missing: Vec<&str> = Vec::new();
    while i < bytes.len() {
        let rest = &text[i..];
        let block = [("$$", "$$"), ("\\(", "\\)"), ("\\[", "\\]")].into_iter().find(|(open, _)| rest.starts_with(open));
        let end = match block {
            Some((_, close)) if missing.contains(&close) => None,
            Some((open, close)) => {
                let end = rest[open.len()..].find(close).map(|length| i + open.len() + length + close.len());
                if end.is_none() {
                    missing.push(close);
                }
                end.filter(|end| !text[i + 2..end - 2].trim().is_empty())
            }
            None if rest.starts_with('$') => inline(text, i),
            None if rest.starts_with("\\begin") && !missing.contains(&"\\end") => {
                let end = environment(rest).map(|length| i + length);
                if end.is_none() && environment_name(rest).is_some() {
                    missing.push("\\end");
                }
                end
            }
            None => None,
        };
        match end {
            Some(end) => {
                found.push(i..end);
                i = end;
            }
            // A dollar after a backslash opens no formula. Other characters are one byte long or open no formula.
            None => i += if rest.starts_with("\\$") { 2 } else { rest.chars().next().map_or(1, char::len_utf8) },
        }
    }
    found
}

/// Returns the length of the environment of formulas at the beginning of a text.
fn environment(text: &str) -> Option<usize> {
    let end = format!("\\end{{{}}}", environment_name(text)?);
    text.find(&end).map(|at| at + end.len())
}

/// Returns a formula without its delimiters. An environment keeps them.
pub(super) fn inside(formula: &str) -> &str {
    if formula.starts_with("\\begin") {
        return formula;
    }
    let length = if formula.starts_with("$$") || formula.starts_with('\\') { 2 } else { 1 };
    formula[length..formula.len() - length].trim()
}

/// Returns the end of the formula that the dollar at `from` opens; `None` if the dollar is part of a price.
fn inline(text: &str, from: usize) -> Option<usize> {
    let rest = &text[from + 1..];
    let mut chars = rest.char_indices();
    let length = loop {
        match chars.next()? {
            (_, '\\') => _ = chars.next(),
            (i, '$') => break i,
            (_, '\n') => return None,
            _ => {}
        }
    };
    let (inside, after) = (&rest[..length], &rest[length + 1..]);
    // Prices, as in `$400 + $60` or `$5 each and $3`: the text between two dollars ends with an operator, has words, or is followed by a
    // digit.
    let is_formula = !inside.trim().is_empty()
        && !after.starts_with(|c: char| c.is_ascii_digit())
        && !inside.trim_end().ends_with([
            '+', '-', '*', '/', '=', '<', '>', ',', '(', ';', ':', '\u{2212}', '\u{2013}', '\u{d7}', '\u{f7}',
        ])
        && !has_words(inside);
    is_formula.then_some(from + 1 + length + 1)
}

/// Returns `true` if a text has words outside of `\text{}`.
fn has_words(text: &str) -> bool {
    regex!(COMMAND, r"\\(?:text[a-z]*|mbox|mathrm|operatorname)\s*\{[^{}]*\}|\\[[:alpha:]]+|\{[^{}]*\}");
    regex!(WORD, r"[[:alpha:]]{2,}");
    const SHORT: &[&str] = &[
        "and", "or", "for", "to", "of", "is", "in", "the", "an", "at", "on", "per", "but", "so", "has", "had", "was",
        "are", "his", "her", "he", "she", "it", "its", "by", "if", "off", "we", "as", "a",
    ];
    let bare = COMMAND.replace_all(text, " ");
    // A formula such as `x, y and z` may have words between values; `5 and` ends with a word, so it is not a formula.
    WORD.find_iter(&bare).any(|word| {
        let word = word.as_str();
        (word.len() > 3 && !crate::math::is_name(word) && word.chars().any(char::is_lowercase))
            || SHORT.contains(&word) && !["and", "or"].contains(&word)
            || ["and", "or"].contains(&word) && bare.trim_end().ends_with(word)
    })
}
