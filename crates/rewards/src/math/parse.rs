//! Parses tokens to forms.

use super::expr::{Expr, Quantity};
use super::expression::{expression, text};
use super::form::{Form, Sign};
use super::lex::{Commas, SET_CLOSE, SET_OPEN, Token, tokens};
use super::set::{builder, conditions, integers, without_points};

const MAX_DEPTH: i32 = 40;

/// Parses a [cleaned](super::clean::clean) answer; `None` if it cannot be read.
pub(super) fn form(text: &str, commas: Commas) -> Option<Form> {
    let tokens = tokens(text, commas)?;
    let mut depth = 0i32;
    for token in &tokens {
        depth += i32::from(opens(token)) - i32::from(closes(token));
        if depth > MAX_DEPTH {
            return None;
        }
    }
    // The last step of a derivation is its result: `a = 2 \Rightarrow b = 4`.
    let last =
        split(&tokens, |token| matches!(token, Token::Command(name) if ARROWS.contains(&name.as_str()))).pop()?.1;
    list(last)
}

/// The commands between the steps of a derivation.
const ARROWS: &[&str] = &["Rightarrow", "Longrightarrow", "implies", "therefore", "Leftrightarrow", "iff"];

fn opens(token: &Token) -> bool {
    matches!(token, Token::Symbol('(' | '[' | '{' | SET_OPEN))
        || matches!(token, Token::Command(name) if name.starts_with("begin ") || name == "lfloor" || name == "lceil")
}

fn closes(token: &Token) -> bool {
    matches!(token, Token::Symbol(')' | ']' | '}' | SET_CLOSE))
        || matches!(token, Token::Command(name) if name.starts_with("end ") || name == "rfloor" || name == "rceil")
}

pub(super) fn is_symbol(token: Option<&Token>, symbol: char) -> bool {
    matches!(token, Some(Token::Symbol(c)) if *c == symbol)
}

pub(super) fn is_command(token: Option<&Token>, command: &str) -> bool {
    matches!(token, Some(Token::Command(name)) if name == command)
}

/// Splits `tokens` at the tokens outside of brackets for which `separates` holds. Each part except the first comes with its separator.
pub(super) fn split(tokens: &[Token], separates: impl Fn(&Token) -> bool) -> Vec<(Option<&Token>, &[Token])> {
    let (mut parts, mut depth, mut from, mut separator) = (Vec::new(), 0i32, 0, None);
    for (i, token) in tokens.iter().enumerate() {
        if depth == 0 && separates(token) {
            parts.push((separator, &tokens[from..i]));
            (separator, from) = (Some(token), i + 1);
        }
        depth += i32::from(opens(token)) - i32::from(closes(token));
    }
    parts.push((separator, &tokens[from..]));
    parts
}

/// Returns the position of the bracket that closes the bracket at `from`.
pub(super) fn closing(tokens: &[Token], from: usize) -> Option<usize> {
    let mut depth = 0i32;
    for (i, token) in tokens.iter().enumerate().skip(from) {
        depth += i32::from(opens(token)) - i32::from(closes(token));
        if depth == 0 {
            return Some(i);
        }
    }
    None
}

/// Parses items separated by commas, or one item.
pub(super) fn list(tokens: &[Token]) -> Option<Form> {
    let conditions_of = split(tokens, |token| *token == Token::Symbol(',')).into_iter().map(|(_, part)| part);
    if let Some(integers) = integers(&conditions_of.collect::<Vec<_>>()) {
        return Some(integers);
    }
    let groups = split(tokens, |token| *token == Token::Symbol(';')).into_iter().map(|(_, group)| items(group));
    let groups: Vec<Option<Vec<Form>>> = groups.collect();
    // `x = 5, y = 2; x = 7, y = 2` are the points (5, 2) and (7, 2).
    let mut points = groups.iter().flatten().filter(|group| !group.is_empty());
    let length = points.next()?.len();
    let is_points = length > 1 && points.clone().count() > 0 && points.all(|group| group.len() == length);
    // Every item is parsed once: nested sets would take exponential time otherwise.
    let mut items: Vec<Form> = if is_points {
        let groups = groups.into_iter().flatten().filter(|group| !group.is_empty());
        groups.map(|items| Form::List { open: '(', close: ')', items }).collect()
    } else {
        groups.into_iter().collect::<Option<Vec<_>>>()?.into_iter().flatten().collect()
    };
    match items.len() {
        1 => items.pop(),
        _ => Some(conditions(&items).unwrap_or(Form::List { open: ',', close: ',', items })),
    }
}

/// Parses items separated by commas and semicolons. There may be none.
fn items(tokens: &[Token]) -> Option<Vec<Form>> {
    let mut items = Vec::new();
    let comma = |token: &Token| matches!(token, Token::Symbol(',' | ';'));
    // The item between the commas of `1, 2, and 3` is empty.
    for (_, part) in split(tokens, comma).into_iter().filter(|(_, part)| !part.is_empty()) {
        let sign = |to: char| -> Vec<Token> {
            let swap = |token: &Token| if is_command(Some(token), "pm") { Token::Symbol(to) } else { token.clone() };
            part.iter().map(swap).collect()
        };
        if part.iter().any(|token| is_command(Some(token), "pm")) {
            items.extend([item(&sign('+'))?, item(&sign('-'))?]);
        } else {
            items.push(item(part)?);
        }
    }
    Some(items)
}

fn item(tokens: &[Token]) -> Option<Form> {
    // `x \in [0, 1]` is parsed as the set.
    if let [_, .., (_, set)] | [(Some(_), set)] = split(tokens, |token| is_command(Some(token), "in"))[..] {
        return item(set);
    }
    if tokens
        .iter()
        .all(|token| matches!(token, Token::Words(_) | Token::Letter(_) | Token::Symbol('.' | '-' | '\'' | '(' | ')')))
        && tokens.iter().any(|token| matches!(token, Token::Words(_)))
    {
        return Some(Form::Words(words(tokens)));
    }
    let tokens = &without_units(tokens)[..];
    // `(p, q) = (3, 2)` and `D = [0, 1]` are a named point and a named set.
    if let [.., (_, name), (Some(Token::Symbol('=')), last)] = &split(tokens, |token| *token == Token::Symbol('='))[..]
        && let Some(value) = set(last)
    {
        return Some(Form::Named { name: text(name), value: Box::new(value) });
    }
    set(tokens).or_else(|| ratio(tokens)).or_else(|| relation(tokens))
}

/// Parses a ratio of three or more values, `1:2:3`, to its values divided by the first.
fn ratio(tokens: &[Token]) -> Option<Form> {
    let parts = split(tokens, |token| *token == Token::Symbol(':'));
    let values: Vec<Expr> = parts.iter().map(|(_, part)| expression(part)).collect::<Option<_>>()?;
    let (first, others) = values.split_first().filter(|(_, others)| others.len() > 1)?;
    let quotient = |value: &Expr| Quantity::new(Expr::Quotient(Box::new(value.clone()), Box::new(first.clone())));
    let items = others.iter().map(|value| Form::Value(Box::new(quotient(value)))).collect();
    Some(Form::List { open: ':', close: ':', items })
}

/// Parses a union, or items between brackets.
fn set(tokens: &[Token]) -> Option<Form> {
    let parts = split(tokens, |token| is_command(Some(token), "cup"));
    if parts.len() == 1 {
        return without_points(tokens).or_else(|| builder(tokens)).or_else(|| brackets(tokens));
    }
    parts.into_iter().map(|(_, part)| item(part)).collect::<Option<_>>().map(Form::Union)
}

/// Parses a matrix, a set, or several items between brackets.
pub(super) fn brackets(tokens: &[Token]) -> Option<Form> {
    if let [Token::Command(empty)] = tokens
        && ["emptyset", "varnothing"].contains(&empty.as_str())
    {
        return Some(Form::List { open: '{', close: '}', items: Vec::new() });
    }
    if tokens.is_empty() || closing(tokens, 0) != Some(tokens.len() - 1) {
        return None;
    }
    let inside = tokens.get(1..tokens.len() - 1)?;
    match (tokens.first()?, tokens.last()?) {
        (Token::Command(begin), _) if begin.starts_with("begin ") => match &begin[6..] {
            "cases" => {
                let items = rows(inside).map(item).collect::<Option<_>>()?;
                Some(Form::List { open: ',', close: ',', items })
            }
            name if name == "array" || name.ends_with("matrix") => matrix(inside),
            _ => None,
        },
        // An array in brackets is a matrix.
        (Token::Symbol('(' | '['), Token::Symbol(')' | ']')) if matches!(inside.first(), Some(Token::Command(begin)) if begin.starts_with("begin ")) => {
            brackets(inside)
        }
        (Token::Symbol(open), Token::Symbol(close)) if "([{⟨".contains(*open) => {
            let items = items(inside).filter(|items| inside.is_empty() || !items.is_empty())?;
            // Braces group, but several answers in braces are a set, as written outside of LaTeX.
            if *open == SET_OPEN || (*open == '{' && items.len() > 1) {
                return Some(Form::List { open: '{', close: '}', items });
            }
            (items.len() > 1).then_some(Form::List { open: *open, close: *close, items })
        }
        _ => None,
    }
}

fn words(tokens: &[Token]) -> String {
    let word = |token: &Token| match token {
        Token::Words(words) => words.chars().filter(|c| c.is_alphanumeric()).collect(),
        Token::Letter(letter) => letter.to_lowercase().to_string(),
        _ => String::new(),
    };
    tokens.iter().map(word).collect()
}

/// Returns the tokens without words and their exponents or strokes: `^2` after `cm`, the stroke before `h`.
fn without_units(tokens: &[Token]) -> Vec<Token> {
    let mut kept: Vec<Token> = Vec::new();
    let mut i = 0;
    while let Some(token) = tokens.get(i) {
        i += 1;
        if !matches!(token, Token::Words(_)) {
            kept.push(token.clone());
            continue;
        }
        if is_symbol(kept.last(), '/') {
            kept.pop();
        }
        if is_symbol(tokens.get(i), '^') {
            i = if is_symbol(tokens.get(i + 1), '{') { closing(tokens, i + 1).map_or(i, |end| end + 1) } else { i + 2 };
        }
    }
    kept
}

/// Returns the rows of an environment that are not empty.
fn rows(tokens: &[Token]) -> impl Iterator<Item = &[Token]> {
    let rows = split(tokens, |token| is_command(Some(token), "\\"));
    rows.into_iter().map(|(_, row)| row).filter(|row| !row.is_empty())
}

fn matrix(tokens: &[Token]) -> Option<Form> {
    let entries = |row| split(row, |token| *token == Token::Symbol('&')).into_iter().map(|(_, entry)| item(entry));
    rows(tokens).map(|row| entries(row).collect()).collect::<Option<_>>().map(Form::Matrix)
}

fn sign(token: &Token) -> Option<Sign> {
    match token {
        Token::Symbol('=') => Some(Sign::Equal),
        Token::Symbol('<') => Some(Sign::Less),
        Token::Symbol('>') => Some(Sign::Greater),
        Token::Command(name) => match name.as_str() {
            "approx" | "approxeq" | "simeq" | "sim" | "cong" | "doteq" => Some(Sign::Approximate),
            "equiv" => Some(Sign::Equal),
            "ne" | "neq" => Some(Sign::NotEqual),
            "lt" => Some(Sign::Less),
            "gt" => Some(Sign::Greater),
            "le" | "leq" | "leqslant" | "leqq" => Some(Sign::LessEqual),
            "ge" | "geq" | "geqslant" | "geqq" => Some(Sign::GreaterEqual),
            _ => None,
        },
        _ => None,
    }
}

fn relation(tokens: &[Token]) -> Option<Form> {
    let parts = split(tokens, |token| sign(token).is_some());
    let signs: Vec<Sign> = parts.iter().filter_map(|(separator, _)| sign((*separator)?)).collect();
    let is_relation = !signs.is_empty();
    let last = parts.len() - 1;
    let mut sides = Vec::with_capacity(parts.len());
    for (i, (_, part)) in parts.into_iter().enumerate() {
        let side = match function_of(part).filter(|_| is_relation) {
            // In `f(x) = 2x`, the function's name is ignored.
            Some((name, Token::Letter(_))) if i == 0 && part.len() == 4 && "fghPpq".contains(name) => {
                Expr::Variable("y".into())
            }
            Some(_) => Expr::Variable(part.iter().map(|token| format!("{token:?}")).collect()),
            None => match expression(part) {
                Some(side) => side,
                // `\text{Area} = 5`, and sides before the last that this grammar cannot parse.
                None if i < last => Expr::Variable(text(part)),
                None => return None,
            },
        };
        sides.push(Quantity::new(side));
    }
    if is_relation {
        Some(Form::Relation { sides, signs })
    } else {
        sides.pop().map(|side| Form::Value(Box::new(side)))
    }
}

/// Returns the function and the first token of its argument if `tokens` are `f(x)`, `f(3)` or `P(X = 4)`.
fn function_of(tokens: &[Token]) -> Option<(char, &Token)> {
    let (Token::Letter(name), mut rest) = tokens.split_first()? else { return None };
    // Functions such as `f'(2)` and `f^{-1}(3)`.
    while let [Token::Symbol('\''), behind @ ..] = rest {
        rest = behind;
    }
    if let [Token::Symbol('^'), Token::Symbol('{'), ..] = rest {
        rest = &rest[closing(rest, 1)? + 1..];
    }
    let [Token::Symbol('('), argument, ..] = rest else { return None };
    let is_function = name.is_ascii_uppercase() || "fghpquv".contains(*name);
    (is_function && closing(rest, 0) == Some(rest.len() - 1)).then_some((*name, argument))
}
