//! From tokens to forms.

use super::expr::Expr;
use super::expression::expression;
use super::form::{Form, Sign};
use super::lex::{SET_CLOSE, SET_OPEN, Token, tokens};

/// How deep brackets may nest.
const MAX_DEPTH: usize = 40;

/// What a [cleaned](super::lex::clean) answer is; `None` when it cannot be read. With `thousands`, `1,234` is a number.
pub(super) fn form(text: &str, thousands: bool) -> Option<Form> {
    let tokens = tokens(text, thousands)?;
    let mut deepest = 0i32;
    let mut depth = 0i32;
    for token in &tokens {
        depth += i32::from(opens(token)) - i32::from(closes(token));
        deepest = deepest.max(depth);
    }
    if deepest as usize > MAX_DEPTH {
        return None;
    }
    list(&tokens)
}

fn opens(token: &Token) -> bool {
    matches!(token, Token::Symbol('(' | '[' | '{' | SET_OPEN))
        || matches!(token, Token::Command(name) if name.starts_with("begin "))
}

fn closes(token: &Token) -> bool {
    matches!(token, Token::Symbol(')' | ']' | '}' | SET_CLOSE))
        || matches!(token, Token::Command(name) if name.starts_with("end "))
}

pub(super) fn is_symbol(token: Option<&Token>, symbol: char) -> bool {
    matches!(token, Some(Token::Symbol(c)) if *c == symbol)
}

fn is_command(token: Option<&Token>, command: &str) -> bool {
    matches!(token, Some(Token::Command(name)) if name == command)
}

/// The parts of `tokens` between those outside of brackets that `separates`, which comes with each part but the first.
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

/// Where the bracket at `from` is closed.
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

/// Items between commas, or one.
fn list(tokens: &[Token]) -> Option<Form> {
    let mut items = items(tokens)?;
    if items.len() == 1 { items.pop() } else { Some(Form::List { open: ',', close: ',', items }) }
}

fn items(tokens: &[Token]) -> Option<Vec<Form>> {
    let mut items = Vec::new();
    let comma = |token: &Token| *token == Token::Symbol(',');
    // `1, 2, and 3` has an empty item.
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
    (!items.is_empty()).then_some(items)
}

fn item(tokens: &[Token]) -> Option<Form> {
    // `x \in [0, 1]` is the set.
    if let [_, .., (_, set)] | [(Some(_), set)] = split(tokens, |token| is_command(Some(token), "in"))[..] {
        return item(set);
    }
    let union = split(tokens, |token| is_command(Some(token), "cup"));
    if union.len() > 1 {
        return union.into_iter().map(|(_, part)| item(part)).collect::<Option<_>>().map(Form::Union);
    }
    if tokens
        .iter()
        .all(|token| matches!(token, Token::Words(_) | Token::Letter(_) | Token::Symbol('.' | '-' | '\'' | '(' | ')')))
        && tokens.iter().any(|token| matches!(token, Token::Words(_)))
    {
        return Some(Form::Words(words(tokens)));
    }
    let tokens = &without_units(tokens)[..];
    if let Some(Token::Command(begin)) = tokens.first()
        && begin.starts_with("begin ")
        && begin.ends_with("matrix")
        && closing(tokens, 0) == Some(tokens.len() - 1)
    {
        return matrix(&tokens[1..tokens.len() - 1]);
    }
    if let (Some(Token::Symbol(open)), Some(Token::Symbol(close))) = (tokens.first(), tokens.last())
        && "([{⟨".contains(*open)
        && closing(tokens, 0) == Some(tokens.len() - 1)
    {
        let inside = &tokens[1..tokens.len() - 1];
        let items = if inside.is_empty() { Vec::new() } else { items(inside)? };
        // Braces group, but several answers between them are a set, as people write one outside of LaTeX.
        if *open == SET_OPEN || (*open == '{' && items.len() > 1) {
            return Some(Form::List { open: '{', close: '}', items });
        }
        if items.len() > 1 {
            return Some(Form::List { open: *open, close: *close, items });
        }
    }
    relation(tokens)
}

fn words(tokens: &[Token]) -> String {
    let word = |token: &Token| match token {
        Token::Words(words) => words.chars().filter(|c| c.is_alphanumeric()).collect(),
        Token::Letter(letter) => letter.to_lowercase().to_string(),
        _ => String::new(),
    };
    tokens.iter().map(word).collect()
}

/// The tokens without words and what belongs to them: `^2` behind `cm`, the stroke before `h`.
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

fn matrix(tokens: &[Token]) -> Option<Form> {
    let rows = split(tokens, |token| is_command(Some(token), "\\"));
    let rows = rows.into_iter().filter(|(_, row)| !row.is_empty()).map(|(_, row)| {
        split(row, |token| *token == Token::Symbol('&')).into_iter().map(|(_, entry)| item(entry)).collect()
    });
    rows.collect::<Option<_>>().map(Form::Matrix)
}

fn relation(tokens: &[Token]) -> Option<Form> {
    let sign = |token: &Token| match token {
        Token::Symbol('=') => Some(Sign::Equal),
        Token::Symbol('<') => Some(Sign::Less),
        Token::Symbol('>') => Some(Sign::Greater),
        Token::Command(name) => match name.as_str() {
            "approx" => Some(Sign::Equal),
            "ne" | "neq" => Some(Sign::NotEqual),
            "lt" => Some(Sign::Less),
            "gt" => Some(Sign::Greater),
            "le" | "leq" | "leqslant" => Some(Sign::LessEqual),
            "ge" | "geq" | "geqslant" => Some(Sign::GreaterEqual),
            _ => None,
        },
        _ => None,
    };
    let parts = split(tokens, |token| sign(token).is_some());
    let signs: Vec<Sign> = parts.iter().filter_map(|(separator, _)| sign((*separator)?)).collect();
    let count = parts.len();
    let mut sides = Vec::with_capacity(count);
    for (i, (_, part)) in parts.into_iter().enumerate() {
        // `f(x) = 2x`: what a function is called does not matter, what it is does.
        let is_name = i == 0
            && count > 1
            && matches!(
                part,
                [
                    Token::Letter('f' | 'g' | 'h' | 'P' | 'p' | 'q'),
                    Token::Symbol('('),
                    Token::Letter(_),
                    Token::Symbol(')')
                ]
            );
        sides.push(if is_name { Expr::Variable("y".into()) } else { expression(part)? });
    }
    if signs.is_empty() { sides.pop().map(Form::Value) } else { Some(Form::Relation { sides, signs }) }
}
