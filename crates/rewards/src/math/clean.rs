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
    ("Z", &["\\mathbb{Z}", "\\mathbf{Z}", "\\Bbb{Z}", "ℤ"]),
    ("N", &["\\mathbb{N}", "\\mathbf{N}", "\\Bbb{N}", "ℕ"]),
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
    ("\\le ", &["≤", "⩽", "<=", "=<"]),
    ("\\ge ", &["≥", "⩾", ">="]),
    ("\\ne ", &["=/=", "<>"]),
    ("=", &["=="]),
    ("\\pm ", &["±"]),
    ("\\in ", &["∈"]),
    ("\\frac{1}{2} ", &["½"]),
    ("\\frac{1}{4} ", &["¼"]),
    ("\\frac{3}{4} ", &["¾"]),
    ("\\frac{1}{3} ", &["⅓"]),
    ("\\frac{2}{3} ", &["⅔"]),
    ("\\frac{1}{5} ", &["⅕"]),
    ("\\frac{2}{5} ", &["⅖"]),
    ("\\frac{3}{5} ", &["⅗"]),
    ("\\frac{4}{5} ", &["⅘"]),
    ("\\frac{1}{6} ", &["⅙"]),
    ("\\frac{5}{6} ", &["⅚"]),
    ("\\frac{1}{8} ", &["⅛"]),
    ("\\frac{3}{8} ", &["⅜"]),
    ("\\frac{5}{8} ", &["⅝"]),
    ("\\frac{7}{8} ", &["⅞"]),
    ("\\theta ", &["θ"]),
    ("\\emptyset ", &["∅"]),
    (" ", &["\u{a0}", "\u{202f}"]),
    ("^", &["**"]),
    // Sizes, LaTeX spaces, currencies and degrees.
    ("", &["\\middle", "\\left.", "\\right.", "\\left", "\\right"]),
    ("", &["\\bigl", "\\bigr", "\\Bigl", "\\Bigr", "\\biggl", "\\biggr", "\\big", "\\Big", "\\bigg", "\\Bigg"]),
    ("", &["\\,", "\\;", "\\:", "\\>", "\\displaystyle", "\\textstyle", "\\limits"]),
    (
        "",
        &[
            "^{\\circ}",
            "^\\circ",
            "^{\\degree}",
            "^\\degree",
            "^{o}",
            "^{\\text{o}}",
            "^{\\mathrm{o}}",
            "\\degree",
            "\\circ",
            "°",
            "º",
            "˚",
        ],
    ),
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
        // Degrees with minutes and seconds of arc: `30^\circ 15'`.
        (
            r#"(\d+(?:\.\d+)?)\s*(?:\^\s*\{?\\circ\}?|°|º|\\degree)\s*(\d+(?:\.\d+)?)\s*(?:'|’|′|\^\s*\{?\\prime\}?)(?:\s*(\d+(?:\.\d+)?)\s*(?:''|"|″|\^\s*\{?\\prime\s*\\prime\}?))?$"#,
            "($1+$2/60+0$3/3600)",
        ),
        (r#"(\d)\s*(?:''|'|"|″|′)$"#, "$1"),
        (r"^(\d+)\s+(?:out of|in every|in)\s+(\d+)$", "$1/$2"),
        (r"([)\]])\s*U\s*([(\[])", "$1\\cup $2"),
        // Sets of real numbers.
        (r"\\(?:mathbb|Bbb)\s*(?:\{\s*R\s*\}|R\b)\s*[\^_]\s*(?:\+|\{\s*(?:\+|>\s*0)\s*\})", "(0,\\infty)"),
        (r"\\(?:mathbb|Bbb)\s*(?:\{\s*R\s*\}|R\b)", "(-\\infty,\\infty)"),
        (r"(?i)^(?:\\text\s*\{)?\s*(?:the set of )?all real numbers\s*\}?$", "(-\\infty,\\infty)"),
        (
            r"(?i)^(?:\\text\s*\{)?\s*(?:the set of )?all real numbers(?: x)?,? except(?: for)?\s*\}?\s*(?:[a-z]\s*=)?\s*(.+)$",
            "(-\\infty,\\infty)\\setminus\\{$1\\}",
        ),
        (r"(?i)^(?:\\text\s*\{)?\s*(?:the set of )?all positive real numbers\s*\}?$", "(0,\\infty)"),
        (
            r"(?i)^(?:\\text\s*\{)?\s*(?:there (?:is|are) )?no (?:real )?solutions?\s*\}?$|^(?:the )?empty set$|^无解$",
            "\\emptyset ",
        ),
        // Repeating decimals: `0.1\overline{6}`, `0.\dot{1}4285\dot{7}`.
        (r"(^|\D)\.(\d*\\(?:overline|bar|dot))", "${1}0.$2"),
        (r"\.(\d*)\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?", ".$1($2$3$4)"),
        (r"\.(\d*)\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))", ".$1($2$3)"),
        // Seconds and minutes of arc, and times with a colon in braces.
        (r"(\d)\s*\^\s*\{?\s*\\prime(?:\s*\\prime)?\s*\}?", "$1"),
        (r"\{:\}", ":"),
        // Scientific notation with a letter for the sign: `5 x 10^7`.
        (r"(\d)\s*[xX]\s*10\s*(\^|\*\*)", "$1\\times 10$2"),
        // Currencies before or after a number.
        (
            r"(?:\b(?:US|R|HK|NT|AU?|CA?|S)\s*)?\\?\p{Sc}|\\(?:pounds|euro|yen)\b|\b(?:USD|EUR|GBP|INR|JPY|CNY|RMB|CHF|KRW|RUB|MXN|CAD|AUD|HKD|SGD|TRY|ILS|THB|VND|TWD|BRL|BTC|NGN|UAH|BDT)\b|/-$|\bRs\.?\s*(\d)",
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
            break;
        }
        text = inside;
    }
    regex!(BOLD, r"^\*\*([^*]+)\*\*");
    // The unit of measurement in brackets, as in Chinese solutions: `8×3=24(个)`.
    regex!(IN_BRACKETS, r"([\d}])\s*\(\s*(?:\\text\s*\{)?\s*([\p{Han}/]{1,6})\s*\}?\s*\)$");
    if let Cow::Owned(plain) = BOLD.replace(&text, "$1") {
        text = plain;
    }
    if let Cow::Owned(plain) = IN_BRACKETS.replace(&text, "$1 $2") {
        text = plain;
    }
    // Dollars in pairs are delimiters of formulas.
    let signs = text.match_indices('$').filter(|(at, _)| !text[..*at].ends_with('\\')).count();
    if signs > 0 && signs % 2 == 0 {
        text = text.replace("\\$", "\u{0}").replace('$', " ").replace('\u{0}', "\\$").trim().to_owned();
    }
    text
}

/// Multiplies numbers by the power of ten that is written behind them as a word: `2.5 million`, `3万`. `None` without such a word.
pub(super) fn with_scale(text: &str) -> Option<String> {
    const WORDS: &str = "thousand|million|billion|trillion|lakh|crore|万|亿";
    regex!(
        SCALED,
        format!(
            r"(?i)([\d}}])(?:\s|~|\\[ ,;])*(?:({WORDS})(?:[^[:alpha:]]|$)|\\(?:text|mathrm)\s*\{{\s*({WORDS})\s*([^{{}}]*)\}})"
        )
    );
    let scaled = SCALED.replace_all(text, |found: &Captures<'_>| {
        let word = found.get(2).or(found.get(3)).map_or("", |word| word.as_str()).to_lowercase();
        let power = match word.as_str() {
            "thousand" => 3,
            "万" => 4,
            "lakh" => 5,
            "million" => 6,
            "crore" => 7,
            "亿" => 8,
            "billion" => 9,
            _ => 12,
        };
        // The text behind the word: the character that ends it, or the rest of `\text{}`.
        let behind = match (found.get(2), found.get(4)) {
            (Some(word), _) => found[0][word.end() - found.get(0).map_or(0, |whole| whole.start())..].to_owned(),
            (None, Some(rest)) if !rest.as_str().is_empty() => format!("\\text{{{}}}", rest.as_str()),
            _ => String::new(),
        };
        format!("{}\\times 10^{{{power}}} {behind}", &found[1])
    });
    match scaled {
        Cow::Owned(scaled) => Some(scaled),
        Cow::Borrowed(_) => None,
    }
}

/// Removes the scale words of [`with_scale`].
pub(super) fn without_scale(text: &str) -> String {
    regex!(WORD, r"(?i)\b(?:thousand|million|billion|trillion|lakh|crore)\b|[万亿]");
    WORD.replace_all(text, "").into_owned()
}

/// Returns a [bare] answer without LaTeX spaces and sizes, currencies and degrees.
pub(super) fn clean(text: &str) -> String {
    let mut text = rows(text);
    text = with_powers(&text).into_owned();
    text = with_repetitions(&text).into_owned();
    text = without_separators(&text).into_owned();
    text = with_colons(&text).into_owned();
    for (pattern, with) in PATTERNS.iter() {
        if let Cow::Owned(replaced) = pattern.replace_all(&text, *with) {
            text = replaced;
        }
    }
    for (to, replaced) in REPLACED {
        text = replaced.iter().fold(text, |text, from| replace_command(text, from, to));
    }
    for (pattern, with) in INTERVALS.iter() {
        if let Cow::Owned(replaced) = pattern.replace(text.trim(), *with) {
            text = replaced;
        }
    }
    text.trim().to_owned()
}

/// Open intervals with reversed brackets: `]2, 5[`; and signs without a left side.
static INTERVALS: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| {
    let patterns = [
        (r"^\]([^\[\]]*[,;][^\[\]]*)\[$", "($1)"),
        (r"^\[([^\[\]]*[,;][^\[\]]*)\[$", "[$1)"),
        (r"^\]([^\[\]]*[,;][^\[\]]*)\]$", "($1]"),
        (r"^(?:=|\\(?:approx|sim|simeq|cong)\b)\s*", ""),
    ];
    patterns.map(|(pattern, with)| (Regex::new(pattern).expect("the pattern is a constant"), with)).into()
});

/// Removes separators of thousands other than commas and spaces: `1'234`, `1_234`, `1.234.567`, and `1.234,5` with a decimal comma.
fn without_separators(text: &str) -> Cow<'_, str> {
    regex!(
        SEPARATED,
        r"\b\d{1,3}(?:(?:['’]\d{3})+|(?:_\d{3})+|(?:\.\d{3})+,\d+|(?:\.\d{3}){2,}|(?:[ \u{a0}\u{202f}]\d{3})+,\d{1,2})\b"
    );
    SEPARATED.replace_all(text, |found: &Captures<'_>| {
        let digits = found[0].replace(['\'', '’', '_', '.', ' ', '\u{a0}', '\u{202f}'], "");
        digits.replace(',', ".")
    })
}

/// Rewrites ratios in words: `1 to 2` and `3 \text{ to } \sqrt{2}` become `1:2` and `3:\sqrt{2}`.
fn with_colons(text: &str) -> Cow<'_, str> {
    const ITEM: &str = r"(?:[\d.,/^{}π√]|\\(?:sqrt|frac|dfrac|pi)\b)+";
    const COLON: &str = r"(?:\s|~|\\[ ,;])*(?:\bis to\b|\bto\b|\\(?:text|mathrm|textrm)\s*\{\s*(?:is )?to\s*\}|比|\\colon\b|:)(?:\s|~|\\[ ,;])*";
    regex!(RATIO, format!(r"^{ITEM}(?:{COLON}{ITEM})+$"));
    regex!(SEPARATOR, COLON);
    if RATIO.is_match(text) { SEPARATOR.replace_all(text, ":") } else { Cow::Borrowed(text) }
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

/// Rewrites raised and lowered digits: `10⁻⁷` becomes `10^{-7}`, and `x₁` becomes `x_{1}`.
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
    let raised = POWER.replace_all(text, |found: &Captures<'_>| {
        let digits: String = found[0].chars().map(digit).collect();
        if digits.len() == 1 { format!("^{digits} ") } else { format!("^{{{digits}}} ") }
    });
    if !raised.contains(|c| ('₀'..='₉').contains(&c)) {
        return raised;
    }
    regex!(INDEX, r"[₀-₉]+");
    let lowered = |c: char| char::from_digit(u32::from(c) - u32::from('₀'), 10);
    let index = |found: &Captures<'_>| format!("_{{{}}} ", found[0].chars().filter_map(lowered).collect::<String>());
    Cow::Owned(INDEX.replace_all(&raised, index).into_owned())
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
    for (open, close) in [
        ("$$", "$$"),
        ("\\(", "\\)"),
        ("\\[", "\\]"),
        ("**", "**"),
        ("$", "$"),
        ("`", "`"),
        ("\"", "\""),
        ("'", "'"),
        ("“", "”"),
    ] {
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
