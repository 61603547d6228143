//! Whether two forms say the same.

use super::expr::Expr;
use super::form::{Form, Sign};

/// Whether `answer` says what `reference` says.
pub(super) fn same(reference: &Form, answer: &Form) -> bool {
    use Form::{List, Matrix, Relation, Union, Value, Words};
    match (reference, answer) {
        (Value(a), Value(b)) => a.equals(b),
        (Words(a), Words(b)) => a == b,
        // `\text{abc}` and the product abc.
        (Words(a), Value(b)) | (Value(b), Words(a)) => letters(b).is_some_and(|b| b == *a),
        (Relation { .. }, Relation { .. }) => same_relation(reference, answer),
        // The right side of `x = 5` is what `5` is; an answer may always say what it is the value of.
        (_, Relation { sides, signs }) if is_equation(signs) => {
            sides.last().is_some_and(|side| same(reference, &Value(side.clone())))
        }
        (Relation { sides, signs }, _) if is_equation(signs) && is_name(&sides[0]) => {
            sides.last().is_some_and(|side| same(&Value(side.clone()), answer))
        }
        (Relation { .. }, List { .. }) => interval(reference).is_some_and(|a| same(&a, answer)),
        (List { .. }, Relation { .. }) => interval(answer).is_some_and(|b| same(reference, &b)),
        (Matrix(a), Matrix(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same_in_order(a, b)),
        (Union(a), Union(b)) => same_in_any_order(a, b),
        (List { open: a_open, close: a_close, items: a }, List { open: b_open, close: b_close, items: b }) => {
            let (a_tuple, b_tuple) = (is_tuple(*a_open), is_tuple(*b_open));
            match (a_tuple, b_tuple) {
                (true, true) => (a_open, a_close) == (b_open, b_close) && same_in_order(a, b),
                (false, false) => same_in_any_order(a, b),
                // `1, 2` may be meant as the point (1, 2).
                _ => {
                    let parentheses =
                        |open: char, close: char| (open, close) == ('(', ')') || (open, close) == (',', ',');
                    parentheses(*a_open, *a_close) && parentheses(*b_open, *b_close) && same_in_order(a, b)
                }
            }
        }
        (List { open: '{', items, .. }, other) | (other, List { open: '{', items, .. }) if items.len() == 1 => {
            same(&items[0], other)
        }
        _ => false,
    }
}

fn is_tuple(open: char) -> bool {
    matches!(open, '(' | '[')
}

fn same_in_order(a: &[Form], b: &[Form]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b))
}

/// Whether each item of one has its own in the other. Items that are equal count once, as in a set.
fn same_in_any_order(a: &[Form], b: &[Form]) -> bool {
    let covers = |a: &[Form], b: &[Form]| a.iter().all(|a| b.iter().any(|b| same(a, b)));
    covers(a, b) && covers(b, a)
}

fn is_equation(signs: &[Sign]) -> bool {
    signs.iter().all(|sign| *sign == Sign::Equal)
}

/// Whether an expression only names something.
fn is_name(expr: &Expr) -> bool {
    letters(expr).is_some()
}

/// A variable or a product of variables as letters.
fn letters(expr: &Expr) -> Option<String> {
    match expr {
        Expr::Variable(name) => Some(name.to_lowercase()),
        Expr::Euler => Some("e".into()),
        Expr::Imaginary => Some("i".into()),
        Expr::Product(all) => all.iter().map(letters).collect(),
        _ => None,
    }
}

fn same_relation(reference: &Form, answer: &Form) -> bool {
    let (Form::Relation { sides: a, signs: a_signs }, Form::Relation { sides: b, signs: b_signs }) =
        (reference, answer)
    else {
        return false;
    };
    // `A = \frac{1}{2} b h = 6` says what A is at its end.
    let ends = |sides: &[Expr]| (sides[0].clone(), sides[sides.len() - 1].clone());
    if is_equation(a_signs) && is_equation(b_signs) {
        let ((a_left, a_right), (b_left, b_right)) = (ends(a), ends(b));
        return difference(&a_left, &a_right).constant_ratio(&difference(&b_left, &b_right)).is_some()
            || a_left.equals(&b_left) && a_right.equals(&b_right);
    }
    if a_signs.len() == 1 && b_signs.len() == 1 {
        let ratio = difference(&a[0], &a[1]).constant_ratio(&difference(&b[0], &b[1]));
        let sign = match ratio {
            Some(ratio) if ratio < 0.0 => b_signs[0].flipped(),
            Some(_) => b_signs[0],
            None => return false,
        };
        return a_signs[0] == sign;
    }
    match (interval(reference), interval(answer)) {
        (Some(a_set), Some(b_set)) => {
            let variables =
                |sides: &[Expr]| sides.iter().flat_map(Expr::variables).collect::<std::collections::BTreeSet<_>>();
            variables(a) == variables(b) && same(&a_set, &b_set)
        }
        _ => false,
    }
}

fn difference(a: &Expr, b: &Expr) -> Expr {
    Expr::Sum(vec![a.clone(), Expr::Negative(Box::new(b.clone()))])
}

/// The set of what a variable may be: `x < 1`, `0 <= x < 1`.
fn interval(form: &Form) -> Option<Form> {
    let Form::Relation { sides, signs } = form else { return None };
    let constant = |side: &Expr| side.variables().is_empty();
    let variable = |side: &Expr| matches!(side, Expr::Variable(_));
    let make = |low: Expr, closed_low: bool, high: Expr, closed_high: bool| Form::List {
        open: if closed_low { '[' } else { '(' },
        close: if closed_high { ']' } else { ')' },
        items: vec![Form::Value(low), Form::Value(high)],
    };
    let minus_infinity = || Expr::Negative(Box::new(Expr::Infinity));
    // With the variable on the left side, or in the middle of ascending signs.
    let (sides, signs): (Vec<&Expr>, Vec<Sign>) = match (&sides[..], &signs[..]) {
        ([a, b], [sign]) if constant(a) && variable(b) => (vec![b, a], vec![sign.flipped()]),
        ([a, b], [sign]) => (vec![a, b], vec![*sign]),
        ([a, b, c], [first @ (Sign::Greater | Sign::GreaterEqual), second]) => {
            (vec![c, b, a], vec![second.flipped(), first.flipped()])
        }
        ([a, b, c], [first, second]) => (vec![a, b, c], vec![*first, *second]),
        _ => return None,
    };
    match (&sides[..], &signs[..]) {
        ([x, a], [sign]) if variable(x) && constant(a) => {
            let a = (*a).clone();
            match sign {
                Sign::Less => Some(make(minus_infinity(), false, a, false)),
                Sign::LessEqual => Some(make(minus_infinity(), false, a, true)),
                Sign::Greater => Some(make(a, false, Expr::Infinity, false)),
                Sign::GreaterEqual => Some(make(a, true, Expr::Infinity, false)),
                Sign::Equal | Sign::NotEqual => None,
            }
        }
        ([a, x, b], [first @ (Sign::Less | Sign::LessEqual), second @ (Sign::Less | Sign::LessEqual)])
            if constant(a) && variable(x) && constant(b) =>
        {
            let closed = |sign: &Sign| *sign == Sign::LessEqual;
            Some(make((*a).clone(), closed(first), (*b).clone(), closed(second)))
        }
        _ => None,
    }
}
