//! Answers as text, and as tokens.

/// A token of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    /// Digits with a decimal point or without, as in `12`, `0.5`, `1.5e3`.
    Number(String),
    /// A variable of one letter.
    Letter(char),
    /// A command of LaTeX, or a function or constant written without its backslash.
    Command(String),
    /// Words: text, units.
    Words(String),
    /// Any other character. `\{` and `\}` are `⟨` and `⟩`, because braces only group.
    Symbol(char),
}

/// What opens a set, `\{`.
pub(super) const SET_OPEN: char = '⟨';
/// What closes a set, `\}`.
pub(super) const SET_CLOSE: char = '⟩';

/// What ends a row of a matrix, `\\\\`.
const ROW_END: &str = "⏎";

/// What may be removed wherever it stands: spaces and sizes of LaTeX, currencies, degrees.
const DROPPED: &[&str] = &[
    "\\left",
    "\\right",
    "\\bigl",
    "\\bigr",
    "\\Bigl",
    "\\Bigr",
    "\\big",
    "\\Big",
    "\\!",
    "\\,",
    "\\;",
    "\\:",
    "\\displaystyle",
    "\\limits",
    "\\$",
    "$",
    "€",
    "£",
    "¥",
    "^{\\circ}",
    "^\\circ",
    "^{\\degree}",
    "^\\degree",
    "\\degree",
    "\\circ",
    "°",
    "{,}",
    "\u{200b}",
];

/// What stands for something that has a name already.
const REPLACED: &[(&str, &str)] = &[
    ("\\leftarrow", " "),
    ("\\rightarrow", " "),
    ("\\dfrac", "\\frac"),
    ("\\tfrac", "\\frac"),
    ("\\cfrac", "\\frac"),
    ("\\dbinom", "\\binom"),
    ("\\tbinom", "\\binom"),
    ("\\lbrace", "\\{"),
    ("\\rbrace", "\\}"),
    ("\\%", "%"),
    ("\\quad", " "),
    ("\\qquad", " "),
    ("\\ ", " "),
    ("~", " "),
    ("\u{2212}", "-"),
    ("\u{2013}", "-"),
    ("×", "\\times "),
    ("·", "\\cdot "),
    ("⋅", "\\cdot "),
    ("÷", "\\div "),
    ("π", "\\pi "),
    ("∞", "\\infty "),
    ("√", "\\sqrt "),
    ("∪", "\\cup "),
    ("≤", "\\le "),
    ("≥", "\\ge "),
    ("≠", "\\ne "),
    ("±", "\\pm "),
    ("∈", "\\in "),
    ("²", "^2 "),
    ("³", "^3 "),
    ("½", "\\frac{1}{2} "),
    ("¼", "\\frac{1}{4} "),
    ("¾", "\\frac{3}{4} "),
    ("θ", "\\theta "),
    ("\u{a0}", " "),
    ("**", "^"),
];

/// The commands whose braces hold text.
const TEXT: &[&str] =
    &["text", "mbox", "textbf", "textit", "textrm", "mathrm", "mathbf", "mathit", "operatorname", "mathbb", "mathcal"];

/// Functions and constants that people write without a backslash.
const NAMES: &[&str] = &[
    "sqrt", "pi", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "infty", "inf", "infinity", "arcsin",
    "arccos", "arctan", "cup",
];

/// Units that could be products of variables.
const UNITS: &[&str] = &[
    "cm", "mm", "km", "kg", "mg", "ft", "in", "mi", "lb", "lbs", "oz", "min", "sec", "hr", "hrs", "mph", "deg", "ml",
    "mL", "sq", "yd", "rad", "per", "the", "day", "cup", "AM", "PM", "am", "pm", "kmh", "pt", "gal",
];

/// An answer without its wrapping: dollars, `\boxed{}`, a closing point, spaces and sizes of LaTeX, currencies and degrees.
pub(super) fn clean(text: &str) -> String {
    let mut text = text.trim().to_owned();
    loop {
        let bare = unwrap(text.trim().trim_end_matches(['.', ',', ';', ':']).trim());
        if bare.len() == text.len() {
            break;
        }
        text = bare.to_owned();
    }
    // The end of a row, before `\\ ` is taken for a space.
    text = text.replace("\\\\", ROW_END);
    for (from, to) in REPLACED {
        text = text.replace(from, to);
    }
    for dropped in DROPPED {
        // `\left` is a part of no name here, `\big` of `\bigcup` would be: a command ends where its letters do.
        text = if dropped.ends_with(|c: char| c.is_ascii_alphabetic()) {
            remove_command(&text, dropped)
        } else {
            text.replace(dropped, "")
        };
    }
    text.trim().to_owned()
}

fn remove_command(text: &str, command: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(command) {
        kept.push_str(before);
        if after.starts_with(|c: char| c.is_ascii_alphabetic()) {
            kept.push_str(command);
        }
        rest = after;
    }
    kept + rest
}

/// The text inside of one layer of wrapping.
fn unwrap(text: &str) -> &str {
    for (open, close) in [("$$", "$$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("$", "$")] {
        let inside = text.strip_prefix(open).and_then(|rest| rest.strip_suffix(close));
        if let Some(inside) = inside.filter(|inside| !inside.contains(open)) {
            return inside.trim();
        }
    }
    let boxed = text.strip_prefix("\\boxed{").or_else(|| text.strip_prefix("\\fbox{"));
    match boxed.and_then(|rest| rest.strip_suffix('}')) {
        Some(inside) if closes_nowhere(inside) => inside.trim(),
        _ => text,
    }
}

/// Whether every closing brace has its opening one before it.
fn closes_nowhere(text: &str) -> bool {
    let mut depth = 0i32;
    let mut escaped = false;
    for c in text.chars() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth < 0 {
            return false;
        }
    }
    depth == 0
}

/// The tokens of an answer that was [cleaned](clean). With `thousands`, `1,234` outside of brackets is one number.
pub(super) fn tokens(text: &str, thousands: bool) -> Option<Vec<Token>> {
    let chars: Vec<char> = text.chars().collect();
    let (mut tokens, mut i, mut depth) = (Vec::new(), 0, 0usize);
    // The number of arguments of \frac that are still to come, which are single digits where they have no braces.
    let mut digits = 0usize;
    while let Some(&c) = chars.get(i) {
        if c.is_whitespace() {
            i += 1;
            continue;
        }
        let single = std::mem::take(&mut digits);
        if c.is_ascii_digit() || (c == '.' && chars.get(i + 1).is_some_and(char::is_ascii_digit)) {
            if single > 0 && c.is_ascii_digit() {
                tokens.push(Token::Number(c.to_string()));
                digits = single - 1;
                i += 1;
                continue;
            }
            let (number, end) = number(&chars, i, thousands && depth == 0);
            tokens.push(Token::Number(number));
            i = end;
        } else if c == '\\' {
            let end = end_of_letters(&chars, i + 1);
            if end == i + 1 {
                match chars.get(i + 1) {
                    Some('{') => tokens.push(Token::Symbol(SET_OPEN)),
                    Some('}') => tokens.push(Token::Symbol(SET_CLOSE)),
                    Some('|') => tokens.push(Token::Symbol('|')),
                    _ => return None,
                }
                i += 2;
                continue;
            }
            let name: String = chars[i + 1..end].iter().collect();
            i = end;
            if TEXT.contains(&name.as_str()) {
                let (inside, end) = braces(&chars, i)?;
                i = end;
                push_text(&inside, &mut tokens)?;
            } else if name == "begin" || name == "end" {
                let (inside, end) = braces(&chars, i)?;
                i = end;
                tokens.push(Token::Command(format!("{name} {inside}")));
            } else {
                digits = if name == "frac" || name == "binom" { 2 } else { 0 };
                tokens.push(Token::Command(name));
            }
        } else if c.is_alphabetic() {
            let end = end_of_letters(&chars, i).max(i + 1);
            let word: String = chars[i..end].iter().collect();
            push_word(&word, &mut tokens);
            i = end;
        } else {
            match c {
                '(' | '[' | '{' => depth += 1,
                ')' | ']' | '}' => depth = depth.saturating_sub(1),
                _ => {}
            }
            tokens.push(match c {
                ';' => Token::Symbol(','),
                '⏎' => Token::Command("\\".into()),
                c => Token::Symbol(c),
            });
            i += 1;
        }
    }
    Some(tokens)
}

fn end_of_letters(chars: &[char], from: usize) -> usize {
    from + chars[from.min(chars.len())..].iter().take_while(|c| c.is_alphabetic()).count()
}

/// What braces at `from` hold, and where they end.
fn braces(chars: &[char], from: usize) -> Option<(String, usize)> {
    let from = from + chars.get(from..)?.iter().take_while(|c| c.is_whitespace()).count();
    if chars.get(from) != Some(&'{') {
        return None;
    }
    let mut depth = 0usize;
    for (i, c) in chars.iter().enumerate().skip(from) {
        match c {
            '{' => depth += 1,
            '}' if depth == 1 => return Some((chars[from + 1..i].iter().collect(), i + 1)),
            '}' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// The number at `from`, and where it ends.
fn number(chars: &[char], from: usize, thousands: bool) -> (String, usize) {
    let digits = |at: usize| chars.get(at..).map_or(0, |rest| rest.iter().take_while(|c| c.is_ascii_digit()).count());
    let mut end = from + digits(from);
    let mut text: String = chars[from..end].iter().collect();
    if thousands && (1..=3).contains(&text.len()) {
        while chars.get(end) == Some(&',') && digits(end + 1) == 3 {
            text.extend(&chars[end + 1..end + 4]);
            end += 4;
        }
    }
    if chars.get(end) == Some(&'.') && digits(end + 1) > 0 {
        let fraction = end + 1 + digits(end + 1);
        text.extend(&chars[end..fraction]);
        end = fraction;
    } else if chars.get(end) == Some(&'.') && digits(end) == 0 && end > from {
        // `5.` is 5.
        end += 1;
    }
    if matches!(chars.get(end), Some('e' | 'E')) {
        let sign = usize::from(matches!(chars.get(end + 1), Some('-' | '+')));
        let exponent = digits(end + 1 + sign);
        if exponent > 0 {
            text.extend(&chars[end..end + 1 + sign + exponent]);
            end += 1 + sign + exponent;
        }
    }
    (text, end)
}

/// What `\text{}` holds: mathematics where it has digits, a separator, or words.
fn push_text(inside: &str, tokens: &mut Vec<Token>) -> Option<()> {
    let bare = inside.trim();
    let letters = bare.trim_matches(|c: char| !c.is_alphanumeric());
    if ["and", "or", ",", ", and", ", or"].contains(&bare) {
        tokens.push(Token::Symbol(','));
    } else if bare.contains(|c: char| c.is_ascii_digit()) && !bare.contains('\\') {
        tokens.extend(self::tokens(bare, true)?);
    } else if letters.chars().count() == 1 {
        tokens.extend(letters.chars().map(Token::Letter));
    } else if !letters.is_empty() {
        tokens.push(Token::Words(bare.to_lowercase()));
    }
    Some(())
}

/// Whether a word is a function or a constant that people write without a backslash.
pub(crate) fn is_name(word: &str) -> bool {
    word.chars().count() > 1 && NAMES.contains(&word.to_lowercase().as_str())
}

/// A word outside of `\text{}`: a name, a separator, a product of variables where it is short, or else words.
fn push_word(word: &str, tokens: &mut Vec<Token>) {
    let count = word.chars().count();
    if word == "and" || word == "or" {
        tokens.push(Token::Symbol(','));
    } else if is_name(word) {
        tokens.push(Token::Command(word.to_lowercase()));
    } else if count > 3 || UNITS.contains(&word) {
        tokens.push(Token::Words(word.to_lowercase()));
    } else {
        tokens.extend(word.chars().map(Token::Letter));
    }
}
