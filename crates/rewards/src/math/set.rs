//! Sets by conditions: `\{x | x > 4\}`, `x > 2 \text{ and } x < 5`, `\mathbb{R} \setminus \{1\}`.

use super::expr::{Expr, Quantity};
use super::form::{Form, Sign};
use super::lex::{SET_CLOSE, SET_OPEN, Token};
use super::parse::{brackets, closing, is_command, list, split};
use super::same::interval;

/// Parses all real numbers except some, `(-\infty, \infty) \setminus \{1, 2\}`, to a union of intervals.
pub(super) fn without_points(tokens: &[Token]) -> Option<Form> {
    let is_minus = |token: &Token| {
        *token == Token::Symbol('-')
            || matches!(token, Token::Command(name) if name == "setminus" || name == "backslash")
    };
    let [(_, all), (_, points)] = split(tokens, is_minus)[..] else { return None };
    let (Form::List { items: ends, .. }, Form::List { open: '{', items, .. }) = (brackets(all)?, brackets(points)?)
    else {
        return None;
    };
    let is_infinite = |form: &Form| matches!(form, Form::Value(end) if end.samples[0].value.re.is_infinite());
    if ends.len() != 2 || !ends.iter().all(is_infinite) {
        return None;
    }
    let point = |form: &Form| match form {
        Form::Value(value) if value.variables.is_empty() => Some((**value).clone()),
        _ => None,
    };
    Some(all_except(items.iter().map(point).collect::<Option<_>>()?))
}

/// Returns the real numbers except some as a union of intervals.
fn all_except(mut points: Vec<Quantity>) -> Form {
    points.sort_by(|a, b| a.samples[0].value.re.total_cmp(&b.samples[0].value.re));
    let infinity = Quantity::new(Expr::Infinity);
    let minus_infinity = Quantity::new(Expr::Negative(Box::new(Expr::Infinity)));
    let ends: Vec<Quantity> = std::iter::once(minus_infinity).chain(points).chain([infinity]).collect();
    let interval = |ends: &[Quantity]| Form::List {
        open: '(',
        close: ')',
        items: ends.iter().map(|end| Form::Value(Box::new(end.clone()))).collect(),
    };
    Form::Union(ends.windows(2).map(interval).collect())
}

/// Returns the numbers that meet all of several conditions of one variable: `2 < x < 5` for `x > 2` and `x < 5`, a union of intervals for `x
/// \ne 1` and `x \ne 2`. `None` for `x < 2` and `x > 5`, which are a union.
pub(super) fn conditions(items: &[Form]) -> Option<Form> {
    let (mut name, mut low, mut high, mut points) = (None, None, None, Vec::new());
    for (i, item) in items.iter().enumerate() {
        match item {
            Form::Relation { sides, signs } => {
                let ([a, b], [sign]) = (&sides[..], &signs[..]) else { return None };
                let (variable, end, sign) = match (&a.expr, &b.expr) {
                    (Expr::Variable(variable), _) if b.variables.is_empty() => (variable, b, *sign),
                    (_, Expr::Variable(variable)) if a.variables.is_empty() => (variable, a, sign.flipped()),
                    _ => return None,
                };
                if name.replace(variable).is_some_and(|name| name != variable) {
                    return None;
                }
                match sign {
                    Sign::Greater | Sign::GreaterEqual if low.is_none() => low = Some((end, sign)),
                    Sign::Less | Sign::LessEqual if high.is_none() => high = Some((end, sign)),
                    Sign::NotEqual => points.push(end.clone()),
                    _ => return None,
                }
            }
            // `x \ne -1, 1`
            Form::Value(value) if i > 0 && points.len() == i && value.variables.is_empty() => {
                points.push((**value).clone());
            }
            // `x \in \mathbb{R}`
            form if is_real_line(form) => {}
            _ => return None,
        }
    }
    match (name, low, high) {
        (None, ..) => items.first().filter(|item| is_real_line(item)).cloned(),
        (Some(_), None, None) if !points.is_empty() => Some(all_except(points)),
        (Some(_), ..) if !points.is_empty() => None,
        (Some(name), Some((low, greater)), Some((high, less))) => {
            let is_between = low.samples[0].value.re < high.samples[0].value.re;
            let sides = vec![low.clone(), Quantity::new(Expr::Variable(name.clone())), high.clone()];
            is_between.then(|| Form::Relation { sides, signs: vec![greater.flipped(), less] })
        }
        (Some(name), Some((end, sign)), None) | (Some(name), None, Some((end, sign))) => {
            let sides = vec![Quantity::new(Expr::Variable(name.clone())), end.clone()];
            Some(Form::Relation { sides, signs: vec![sign] })
        }
        _ => None,
    }
}

/// Returns the tokens in the braces that are around all of them.
fn ungrouped(tokens: &[Token]) -> &[Token] {
    match tokens {
        [Token::Symbol('{'), inside @ .., _] if closing(tokens, 0) == Some(tokens.len() - 1) => ungrouped(inside),
        _ => tokens,
    }
}

fn is_real_line(form: &Form) -> bool {
    let is_infinite = |form: &Form| matches!(form, Form::Value(end) if end.samples[0].value.re.is_infinite());
    matches!(form, Form::List { open: '(', close: ')', items } if items.len() == 2 && items.iter().all(is_infinite))
}

/// Parses a set by its condition: `\{x | x > 4\}`, `\{x \in \mathbb{R} : x > 4\}`.
pub(super) fn builder(tokens: &[Token]) -> Option<Form> {
    let [Token::Symbol(SET_OPEN | '{'), inside @ .., Token::Symbol(SET_CLOSE | '}')] = tokens else { return None };
    let inside = ungrouped(inside);
    let bar = |token: &Token| matches!(token, Token::Symbol('|' | ':')) || is_command(Some(token), "mid");
    let (_, variable) = *split(inside, bar).first()?;
    let condition = inside.get(variable.len() + 1..)?;
    let comma = |token: &Token| *token == Token::Symbol(',');
    let parts = split(ungrouped(condition), comma).into_iter().map(|(_, part)| part);
    if let Some(integers) = integers(&std::iter::once(variable).chain(parts).collect::<Vec<_>>()) {
        return Some(integers);
    }
    let is_set = match variable {
        [Token::Letter(_)] => true,
        // `\mathbb{Z}` is not the real numbers.
        [Token::Letter(_), member, set @ ..] => {
            is_command(Some(member), "in") && !set.iter().any(|token| matches!(token, Token::Letter('Z' | 'N' | 'Q')))
        }
        _ => false,
    };
    let form = Some(ungrouped(condition)).filter(|_| is_set).and_then(list)?;
    let is_condition = |form: &Form| matches!(form, Form::Relation { .. });
    // An interval, or a union of intervals, has no name of a variable.
    let intervals = match &form {
        Form::Relation { sides, signs } => interval(sides, signs),
        Form::List { open: ',', items, .. } if items.iter().all(is_condition) => {
            let part = |item: &Form| match item {
                Form::Relation { sides, signs } => interval(sides, signs),
                _ => None,
            };
            items.iter().map(part).collect::<Option<_>>().map(Form::Union)
        }
        form if is_real_line(form) => None,
        Form::Union(_) => None,
        _ => return None,
    };
    Some(intervals.unwrap_or(form))
}

/// The maximum number of elements of a set of integers that is listed.
const MAX_INTEGERS: f64 = 100.0;

/// Lists the integers that meet conditions, such as 1, 2, 3 for `x \in \mathbb{Z}` and `1 \le x \le 3`. Returns `None` unless a condition
/// names a set of integers, and for infinite or large sets.
pub(super) fn integers(conditions: &[&[Token]]) -> Option<Form> {
    let (least, is_zero_certain) = conditions.iter().find_map(|condition| least_integer(condition))?;
    let others = conditions.iter().filter(|part| least_integer(part).is_none() && !matches!(part, [Token::Letter(_)]));
    let others: Vec<Token> =
        others.flat_map(|part| std::iter::once(&Token::Symbol(',')).chain(*part)).cloned().collect();
    let interval = match list(&others)? {
        Form::Relation { sides, signs } => interval(&sides, &signs)?,
        form => form,
    };
    let Form::List { open: open @ ('(' | '['), close, items } = interval else { return None };
    let [Form::Value(low), Form::Value(high)] = &items[..] else { return None };
    if !(low.variables.is_empty() && high.variables.is_empty()) {
        return None;
    }
    let (low, high) = (low.samples[0].value.re, high.samples[0].value.re);
    let first = if open == '[' { low.ceil() } else { low.floor() + 1.0 }.max(least);
    let last = if close == ']' { high.floor() } else { high.ceil() - 1.0 };
    let is_listed = last - first < MAX_INTEGERS && first.is_finite() && last.is_finite() && first.abs() < 1e9;
    if !is_listed || !is_zero_certain && first <= 0.0 {
        return None;
    }
    let value = |i: i32| Form::Value(Box::new(Quantity::new(Expr::integer(i))));
    let items = (first as i32..=last as i32).map(value).collect();
    Some(Form::List { open: '{', close: '}', items })
}

/// Returns the least element of the set of integers of `x \in \mathbb{Z}`, and `false` if it may also be 1, as of the natural numbers.
fn least_integer(condition: &[Token]) -> Option<(f64, bool)> {
    let [Token::Letter(_), member, Token::Letter(set @ ('Z' | 'N')), rest @ ..] = condition else { return None };
    let is_sign = |token: &&Token| !matches!(token, Token::Symbol('^' | '_' | '{' | '}'));
    let rest: Vec<&Token> = rest.iter().filter(is_sign).collect();
    let is_number = |token: &Token, digit: &str| matches!(token, Token::Number(number) if number == digit);
    let bounds = match (set, &rest[..]) {
        ('Z', []) => (f64::NEG_INFINITY, true),
        ('N', []) => (0.0, false),
        (_, [Token::Symbol('+')]) | ('N', [Token::Symbol('*')]) => (1.0, true),
        (_, [Token::Symbol('>'), zero]) if is_number(zero, "0") => (1.0, true),
        ('N', [zero]) if is_number(zero, "0") => (0.0, true),
        (_, [Token::Command(sign), zero]) if ["ge", "geq"].contains(&sign.as_str()) && is_number(zero, "0") => {
            (0.0, true)
        }
        (_, [Token::Command(sign), one]) if ["ge", "geq"].contains(&sign.as_str()) && is_number(one, "1") => {
            (1.0, true)
        }
        _ => return None,
    };
    is_command(Some(member), "in").then_some(bounds)
}
