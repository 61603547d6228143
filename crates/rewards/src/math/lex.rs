//! Splits [cleaned](super::clean) answers into tokens.

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    /// Digits with or without a decimal point, as in `12`, `0.5`, `1.5e3`; `0.1(6)` is a repeating decimal.
    Number(String),
    /// A variable of one letter.
    Letter(char),
    /// A LaTeX command, or a function or constant written without its backslash.
    Command(String),
    /// Words: text, units.
    Words(String),
    /// Any other character. `\{` and `\}` are `⟨` and `⟩`, because braces only group.
    Symbol(char),
}

/// The meaning of commas in a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Commas {
    /// `1,234` is 1234.
    Thousands,
    /// `1,234` is a list of 1 and 234.
    List,
}

/// The opening brace of a set, `\{`.
pub(super) const SET_OPEN: char = '⟨';
/// The closing brace of a set, `\}`.
pub(super) const SET_CLOSE: char = '⟩';

/// The end of a matrix row, `\\`.
pub(super) const ROW_END: &str = "⏎";

/// Functions and constants that are often written without a backslash.
const NAMES: &[&str] = &[
    "sqrt", "pi", "sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "log", "lg", "ln", "exp", "infty",
    "inf", "infinity", "arcsin", "arccos", "arctan", "cup", "floor", "ceil",
];

/// Words of a sentence, and units that look like products of variables.
const WORDS: &[&str] = &[
    "cm", "mm", "km", "kg", "mg", "ft", "in", "mi", "lb", "lbs", "oz", "min", "sec", "hr", "hrs", "mph", "deg", "ml",
    "mL", "sq", "yd", "rad", "per", "the", "day", "cup", "AM", "PM", "am", "pm", "kmh", "pt", "gal", "is", "are",
    "was", "of", "for", "if", "at", "to", "by", "has", "all", "The", "It", "it", "Rs", "AA", "atm", "amu", "bar",
];

/// Splits a [cleaned](super::clean::clean) answer into tokens. `commas` applies only outside of brackets; inside, commas separate items.
pub(super) fn tokens(text: &str, commas: Commas) -> Option<Vec<Token>> {
    let chars: Vec<char> = text.chars().collect();
    let (mut tokens, mut i, mut depth) = (Vec::new(), 0, 0usize);
    // The number of pending arguments of \frac; an argument without braces is a single digit.
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
            let (number, end) = number(&chars, i, if depth == 0 { commas } else { Commas::List })?;
            tokens.push(Token::Number(number));
            i = end;
        } else if c == '\\' {
            let end = end_of_letters(&chars, i + 1);
            if end == i + 1 {
                match chars.get(i + 1) {
                    Some('{') => tokens.push(Token::Symbol(SET_OPEN)),
                    Some('}') => tokens.push(Token::Symbol(SET_CLOSE)),
                    _ => return None,
                }
                i += 2;
                continue;
            }
            let name: String = chars[i + 1..end].iter().collect();
            i = end;
            match name.as_str() {
                // Commands with text in their braces, if there are any: `\mathrm e`.
                "text" | "textnormal" | "mbox" | "hbox" | "textbf" | "textit" | "textrm" | "textsf" | "texttt"
                | "textup" | "mathrm" | "mathbf" | "mathit" | "mathsf" | "boldsymbol" | "operatorname" | "mathbb"
                | "mathcal" => {
                    if let Some((inside, end)) = braces(&chars, i) {
                        i = end;
                        push_text(&inside, commas, &mut tokens)?;
                    }
                }
                "begin" | "end" => {
                    let (inside, end) = braces(&chars, i)?;
                    i = end;
                    if name == "begin" && inside == "array" {
                        i = braces(&chars, i).map_or(i, |(_, end)| end);
                    }
                    tokens.push(Token::Command(format!("{name} {inside}")));
                }
                _ => match name.strip_prefix("qquad").or(name.strip_prefix("quad")) {
                    // `\quadx` is a space and a variable.
                    Some(rest) => push_word(rest, &mut tokens),
                    None => {
                        digits = if name == "frac" || name == "binom" { 2 } else { 0 };
                        tokens.push(Token::Command(name));
                    }
                },
            }
        } else if c.is_alphabetic() {
            // A word ends where the script changes: `x个`.
            let same =
                chars[i..].iter().take_while(|other| other.is_alphabetic() && is_letter(**other) == is_letter(c));
            let end = i + same.count().max(1);
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

/// Returns the contents of the braces at `from`, and the position after them.
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

/// Returns the number at `from`, and the position after it; `None` if it is invalid with `commas`, such as `1,000` as a list of 1 and 000.
fn number(chars: &[char], from: usize, commas: Commas) -> Option<(String, usize)> {
    let digits = |at: usize| chars.get(at..).map_or(0, |rest| rest.iter().take_while(|c| c.is_ascii_digit()).count());
    let mut end = from + digits(from);
    let mut text: String = chars[from..end].iter().collect();
    if commas == Commas::List && text.len() == 3 && text.starts_with('0') && from > 0 && chars[from - 1] == ',' {
        return None;
    }
    // Groups of India: `12,34,567`.
    if commas == Commas::Thousands
        && (1..=2).contains(&text.len())
        && chars.get(end) == Some(&',')
        && digits(end + 1) == 2
    {
        let mut at = end;
        while chars.get(at) == Some(&',') && digits(at + 1) == 2 {
            at += 3;
        }
        if chars.get(at) == Some(&',') && digits(at + 1) == 3 {
            text.extend(chars[end..at + 4].iter().filter(|c| **c != ','));
            end = at + 4;
        }
    }
    let separates = |c: Option<&char>| c == Some(&' ') || commas == Commas::Thousands && c == Some(&',');
    if (1..=3).contains(&text.len()) && !text.starts_with('0') {
        while separates(chars.get(end)) && digits(end + 1) == 3 && chars.get(end + 4) != Some(&'/') {
            text.extend(&chars[end + 1..end + 4]);
            end += 4;
        }
    }
    if chars.get(end) == Some(&'.') && digits(end + 1) > 0 {
        let fraction = end + 1 + digits(end + 1);
        text.push('.');
        text.extend(&chars[end + 1..fraction]);
        end = fraction;
    } else if chars.get(end) == Some(&'.') && end > from {
        // `5.` is 5.
        end += 1;
        if chars.get(end) == Some(&'(') {
            text.push('.');
        }
    }
    // `0.1(6)` repeats the 6.
    let repeating = digits(end + 1);
    if text.contains('.')
        && chars.get(end) == Some(&'(')
        && repeating > 0
        && chars.get(end + 1 + repeating) == Some(&')')
    {
        text.extend(&chars[end..end + repeating + 2]);
        return Some((text, end + repeating + 2));
    }
    let mut text = text.trim_end_matches('.').to_owned();
    if matches!(chars.get(end), Some('e' | 'E')) {
        let sign = usize::from(matches!(chars.get(end + 1), Some('-' | '+')));
        let exponent = digits(end + 1 + sign);
        if exponent > 0 {
            text.extend(&chars[end..end + 1 + sign + exponent]);
            end += 1 + sign + exponent;
        }
    }
    Some((text, end))
}

/// Appends the tokens of the contents of `\text{}`: mathematics for digits, separators, names and single letters, otherwise words.
fn push_text(inside: &str, commas: Commas, tokens: &mut Vec<Token>) -> Option<()> {
    let bare = inside.trim();
    let letters = bare.trim_matches(|c: char| !c.is_alphanumeric());
    if [",", ", and", ", or"].contains(&bare) {
        tokens.push(Token::Symbol(','));
    } else if bare.contains(|c: char| c.is_ascii_digit()) && !bare.contains('\\') {
        tokens.extend(self::tokens(bare, commas)?);
    } else if letters.chars().count() == 1 && letters.chars().all(is_letter) {
        tokens.extend(letters.chars().map(Token::Letter));
    } else if is_separator(letters) || is_percent(letters) || is_step(letters) || is_name(letters) && letters != "cup" {
        push_word(letters, tokens);
    } else if !letters.is_empty() {
        tokens.push(Token::Words(bare.to_lowercase()));
    }
    Some(())
}

/// Returns `true` if a letter can be a variable. Letters of other scripts form words.
fn is_letter(c: char) -> bool {
    c.is_alphabetic() && c < '\u{2000}' && !('\u{590}'..='\u{1fff}').contains(&c)
}

/// Returns `true` if a word is a function or constant that is often written without a backslash.
pub(crate) fn is_name(word: &str) -> bool {
    word.chars().count() > 1 && NAMES.contains(&word.to_lowercase().as_str())
}

fn is_separator(word: &str) -> bool {
    ["and", "or", "或", "和", "及"].contains(&word)
}

/// Returns `true` for a word between the steps of a derivation.
fn is_step(word: &str) -> bool {
    ["so", "thus", "hence", "therefore"].contains(&word)
}

fn is_percent(word: &str) -> bool {
    ["percent", "percents", "percentage", "pct"].contains(&word)
}

/// Appends a word outside of `\text{}`: a name, a separator, a product of variables if it is short, or otherwise words.
fn push_word(word: &str, tokens: &mut Vec<Token>) {
    let count = word.chars().count();
    if is_separator(word) {
        tokens.push(Token::Symbol(','));
    } else if is_percent(word) {
        tokens.push(Token::Symbol('%'));
    } else if is_step(word) {
        tokens.push(Token::Command("therefore".into()));
    } else if word == "not" || word.ends_with("不是") || word.ends_with("并非") {
        // The grammar has no such command, so `not 5` is not a value.
        tokens.push(Token::Command(word.into()));
    } else if is_name(word) {
        tokens.push(Token::Command(word.to_lowercase()));
    } else if let Some(variable) = word.strip_prefix("or").filter(|rest| rest.chars().count() == 1) {
        // `x = 1orx = 2`
        tokens.push(Token::Symbol(','));
        tokens.extend(variable.chars().map(Token::Letter));
    } else if count > 3 || WORDS.contains(&word) || !word.chars().all(is_letter) {
        tokens.push(Token::Words(word.to_lowercase()));
    } else {
        tokens.extend(word.chars().map(Token::Letter));
    }
}
