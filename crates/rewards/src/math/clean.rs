//! Normalises the text of answers before it is split into tokens.

use super::environment::last_line;
use super::lex::ROW_END;
use crate::patterns::regex;
use crate::plain::plain;
use regex::{Captures, Regex};
use std::borrow::Cow;
use std::sync::LazyLock;

/// Texts, and the commands and characters that they replace, in the order of application.
const REPLACED: &[(&str, &[&str])] = &[
    (" ", &["\\leftarrow", "\\rightarrow"]),
    ("\\frac", &["\\dfrac", "\\tfrac", "\\cfrac"]),
    ("\\binom", &["\\dbinom", "\\tbinom"]),
    ("\\{", &["\\lbrace"]),
    ("\\}", &["\\rbrace"]),
    ("[", &["\\lbrack"]),
    ("]", &["\\rbrack"]),
    ("(", &["\\langle"]),
    (")", &["\\rangle"]),
    ("|", &["\\lvert", "\\rvert", "\\lVert", "\\rVert", "\\|", "\\vert"]),
    ("\\lfloor ", &["⌊"]),
    ("\\rfloor ", &["⌋"]),
    ("\\lceil ", &["⌈"]),
    ("\\rceil ", &["⌉"]),
    ("(-\\infty,\\infty)", &["\\mathbb{R}", "ℝ"]),
    ("%", &["\\%"]),
    (" ", &["\\ ", "~"]),
    ("-", &["\u{2212}", "\u{2013}"]),
    ("\\times ", &["×"]),
    ("\\cdot ", &["·", "⋅"]),
    ("\\div ", &["÷"]),
    ("\\pi ", &["π"]),
    ("\\infty ", &["∞"]),
    ("\\sqrt ", &["√"]),
    ("\\cup ", &["∪"]),
    ("\\approx ", &["≈"]),
    ("\\ne ", &["≠", "\\not=", "\\not ="]),
    ("\\le ", &["≤", "<=", "=<"]),
    ("\\ge ", &["≥", ">="]),
    ("\\ne ", &["=/=", "<>"]),
    ("=", &["=="]),
    ("\\pm ", &["±"]),
    ("\\in ", &["∈"]),
    ("\\frac{1}{2} ", &["½"]),
    ("\\frac{1}{4} ", &["¼"]),
    ("\\frac{3}{4} ", &["¾"]),
    ("\\theta ", &["θ"]),
    ("\\emptyset ", &["∅"]),
    (" ", &["\u{a0}", "\u{202f}"]),
    ("^", &["**"]),
    // Sizes, LaTeX spaces, currencies and degrees.
    ("", &["\\middle", "\\left.", "\\right.", "\\left", "\\right"]),
    ("", &["\\bigl", "\\bigr", "\\Bigl", "\\Bigr", "\\biggl", "\\biggr", "\\big", "\\Big", "\\bigg", "\\Bigg"]),
    ("", &["\\,", "\\;", "\\:", "\\>", "\\displaystyle", "\\textstyle", "\\limits"]),
    ("", &["^{\\circ}", "^\\circ", "^{\\degree}", "^\\degree", "^{o}", "\\degree", "\\circ", "°"]),
    ("", &["\u{200b}"]),
];

/// Replacements of patterns, applied in this order.
static PATTERNS: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| {
    let patterns = [
        // A negative space does not separate digits: `32,\! 349`.
        (r"\\!\s*", ""),
        (r"\s*\{,\s*\}", ","),
        // Degrees Celsius and Fahrenheit.
        (r"(?:\^\s*\{?\\circ\}?|°)\s*(?:\\(?:text|textrm|mathrm)\s*\{\s*[CF]\s*\}|[CF]\b)", ""),
        // Repeating decimals: `0.1\overline{6}`, `0.\dot{1}4285\dot{7}`.
        (r"(^|\D)\.(\d*\\(?:overline|bar|dot))", "${1}0.$2"),
        (r"\.(\d*)\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?", ".$1($2$3$4)"),
        (r"\.(\d*)\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))", ".$1($2$3)"),
        // Seconds and minutes of arc, and times with a colon in braces.
        (r"(\d)\s*\^\s*\{?\s*\\prime(?:\s*\\prime)?\s*\}?", "$1"),
        (r"\{:\}", ":"),
        // Scientific notation with a letter for the sign: `5 x 10^7`.
        (r"(\d)\s*[xX]\s*10\s*(\^|\*\*)", "$1\\times 10$2"),
        // Ratios in words: `1 to 2`, `1 \text{ to } 2`.
        (r"^(\d+)\s*(?:to|\\(?:text|mathrm)\s*\{\s*to\s*\})\s*(\d+)$", "$1:$2"),
        // Currencies before or after a number.
        (
            r"(?:\b(?:US|R|HK|NT)\s*)?\\?\p{Sc}|\\(?:pounds|euro|yen)\b|\b(?:USD|EUR|GBP|INR|JPY|CNY|RMB)\b|\bRs\.?\s*(\d)",
            "$1",
        ),
        // Binomials: `C(5, 2)`, `C_5^2`, `C^2_5`, `{}_5C_2`, `5C2`.
        (r"\bC\((\w+),\s*(\w+)\)", "\\binom{$1}{$2}"),
        (r"\bC_\{?(\w+)\}?\^\{?(\w+)\}?", "\\binom{$1}{$2}"),
        (r"\bC\^\{?(\w+)\}?_\{?(\w+)\}?", "\\binom{$2}{$1}"),
        (r"\{\}[_^]\{?(\d+)\}?\s*C_\{?(\d+)\}?", "\\binom{$1}{$2}"),
        (r"(^|[\s(=,+-])[_^]\{?(\d+)\}?\s*C_\{?(\d+)\}?", "$1\\binom{$2}{$3}"),
        (r"\b(\d+)C(\d+)\b", "\\binom{$1}{$2}"),
        // `5!=120` is an equation; `x != 3` is not.
        (r"([^\d)\s]\s*|[\d)]\s+|^)!=", "$1\\ne "),
        // Powers in the syntax of programs, and Markdown's bold marks.
        (r"([\w)}])(?:\*\*| \*\* )([\w({\\-])", "$1^$2"),
        (r"\*\*", ""),
    ];
    patterns.map(|(pattern, with)| (Regex::new(pattern).expect("the pattern is a constant"), with)).into()
});

/// Returns an answer without wrappers: dollars, `\boxed{}`, a final full stop, and the lines of a derivation before the last.
pub(super) fn bare(text: &str) -> String {
    let mut text = plain(text.trim()).into_owned();
    loop {
        let inside = unwrap(without_end(&text));
        let inside = last_line(inside).unwrap_or_else(|| inside.to_owned());
        if inside.len() == text.len() {
            return text;
        }
        text = inside;
    }
}

/// Returns a [bare] answer without LaTeX spaces and sizes, currencies and degrees.
pub(super) fn clean(text: &str) -> String {
    let mut text = rows(text);
    text = with_powers(&text).into_owned();
    text = with_repetitions(&text).into_owned();
    for (pattern, with) in PATTERNS.iter() {
        if let Cow::Owned(replaced) = pattern.replace_all(&text, *with) {
            text = replaced;
        }
    }
    for (to, replaced) in REPLACED {
        text = replaced.iter().fold(text, |text, from| replace_command(text, from, to));
    }
    text.trim().to_owned()
}

/// Removes spaces and punctuation at the end. `\,` at the end is a space.
fn without_end(text: &str) -> &str {
    const SPACES: &[&str] = &["\\,", "\\;", "\\:", "\\!", "\\>", "\\quad", "\\qquad", "~"];
    let mut text = text.trim();
    loop {
        let space = SPACES.iter().find_map(|space| text.strip_suffix(space));
        // `trim` shortens `\ ` to a backslash.
        let end = || text.strip_suffix(['.', ',', ';', ':', '\\']).filter(|_| !text.ends_with("..."));
        match space.or_else(end) {
            Some(bare) => text = bare.trim_end(),
            None => return text,
        }
    }
}

/// Replaces double backslashes: they are row ends in an environment, and escaped backslashes of commands elsewhere.
fn rows(text: &str) -> String {
    let has_rows = text.contains("\\begin") && !text.contains("\\\\begin");
    text.replace("\\\\", if has_rows { ROW_END } else { "\\" })
}

/// Rewrites decimals with an ellipsis: `0.1666...`, whose last digits repeat, becomes `0.1(6)`; in others, the ellipsis is removed.
fn with_repetitions(text: &str) -> Cow<'_, str> {
    regex!(ELLIPSIS, r"(\d*\.)(\d+)(?:\.\.\.|…|\\(?:ldots|dots|cdots))");
    ELLIPSIS.replace_all(text, |found: &Captures<'_>| {
        let (whole, digits) = (&found[1], &found[2]);
        let repeats = |length: &usize| {
            let (rest, block) = digits.split_at(digits.len() - length);
            let again =
                rest.strip_suffix(block).is_some_and(|rest| *length > 1 || rest.is_empty() || rest.ends_with(block));
            again.then(|| (rest.trim_end_matches(block), block))
        };
        match (1..=digits.len() / 2).find_map(|length| repeats(&length)) {
            Some((rest, block)) => format!("{whole}{rest}({block})"),
            None => format!("{whole}{digits}"),
        }
    })
}

/// Rewrites raised digits: `10⁻⁷` becomes `10^{-7}`.
fn with_powers(text: &str) -> Cow<'_, str> {
    const RAISED: &str = "⁰¹²³⁴⁵⁶⁷⁸⁹";
    regex!(POWER, r"[⁺⁻]?[⁰¹²³⁴-⁹]+");
    let digit = |c: char| match RAISED.chars().position(|raised| raised == c) {
        Some(digit) => digit.to_string(),
        None => {
            if c == '⁻' {
                "-".into()
            } else {
                String::new()
            }
        }
    };
    POWER.replace_all(text, |found: &Captures<'_>| {
        let digits: String = found[0].chars().map(digit).collect();
        if digits.len() == 1 { format!("^{digits} ") } else { format!("^{{{digits}}} ") }
    })
}

/// Replaces `from` by `to`. A command must match as a whole: `\left` does not match in `\leftarrow`.
fn replace_command(text: String, from: &str, to: &str) -> String {
    if !text.contains(from) {
        return text;
    }
    if !(from.starts_with('\\') && from.ends_with(|c: char| c.is_ascii_alphabetic())) {
        return text.replace(from, to);
    }
    let mut kept = String::with_capacity(text.len());
    let mut rest = &text[..];
    while let Some((before, after)) = rest.split_once(from) {
        kept.push_str(before);
        kept.push_str(if after.starts_with(|c: char| c.is_ascii_alphabetic()) { from } else { to });
        rest = after;
    }
    kept + rest
}

/// Removes one layer of wrapping.
fn unwrap(text: &str) -> &str {
    for (open, close) in [("$$", "$$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("$", "$"), ("`", "`")] {
        let inside = text.strip_prefix(open).and_then(|rest| rest.strip_suffix(close));
        if let Some(inside) = inside.filter(|inside| !inside.contains(open)) {
            return inside.trim();
        }
    }
    let boxed = text.strip_prefix("\\boxed{").or_else(|| text.strip_prefix("\\fbox{"));
    match boxed.and_then(|rest| rest.strip_suffix('}')) {
        Some(inside) if is_balanced(inside) => inside.trim(),
        _ => text,
    }
}

/// Returns `true` if every closing brace has an opening brace before it.
fn is_balanced(text: &str) -> bool {
    let (mut depth, mut chars) = (0usize, text.chars());
    while let Some(c) = chars.next() {
        match c {
            '\\' => _ = chars.next(),
            '{' => depth += 1,
            '}' if depth == 0 => return false,
            '}' => depth -= 1,
            _ => {}
        }
    }
    depth == 0
}
