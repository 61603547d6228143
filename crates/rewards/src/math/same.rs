//! Compares two forms.

use super::expr::{Expr, Quantity};
use super::form::{Form, Sign};
use super::sample::{POINTS, Sample};
use num_complex::Complex64;

pub(super) fn same(reference: &Form, answer: &Form) -> bool {
    use Form::{List, Matrix, Named, Relation, Union, Value, Words};
    match (reference, answer) {
        (Value(a), Value(b)) => a.equals(b),
        (Words(a), Words(b)) => a == b,
        // `\text{abc}` equals the product abc.
        (Words(a), Value(b)) | (Value(b), Words(a)) => letters(&b.expr).is_some_and(|b| b == *a),
        // `\{5\}` equals `x = 5`.
        (List { open: '{', items, .. }, Relation { signs, .. }) if items.len() == 1 && is_equation(signs) => {
            same(&items[0], answer)
        }
        (Relation { signs, .. }, List { open: '{', items, .. }) if items.len() == 1 && is_equation(signs) => {
            same(reference, &items[0])
        }
        (Named { name: a, value: a_value }, Named { name: b, value: b_value }) => a == b && same(a_value, b_value),
        (Named { value, .. }, answer) => same(value, answer),
        (reference, Named { value, .. }) => same(reference, value),
        (Relation { sides: a, signs: a_signs }, Relation { sides: b, signs: b_signs }) => {
            same_relation(a, a_signs, b, b_signs)
        }
        // `x = 5` equals 5; an answer may always name its value.
        (Value(reference), Relation { sides, signs }) if is_equation(signs) => {
            values(sides, signs).any(|value| reference.equals(value))
        }
        (Relation { sides, signs }, Value(answer)) if is_equation(signs) && is_named(sides, signs) => {
            values(sides, signs).any(|value| value.equals(answer))
        }
        (Relation { sides, signs }, Words(_)) if is_equation(signs) && is_named(sides, signs) => {
            sides.last().is_some_and(|side| same(&Value(Box::new(side.clone())), answer))
        }
        (Words(_), Relation { sides, signs }) if is_equation(signs) => {
            sides.last().is_some_and(|side| same(reference, &Value(Box::new(side.clone()))))
        }
        // `x < 1 or x > 2` equals a union.
        (Union(a), List { open: ',', items: b, .. }) | (List { open: ',', items: b, .. }, Union(a)) => {
            same_in_any_order(a, b)
        }
        (Relation { sides, signs }, List { .. } | Union(_)) => interval(sides, signs).is_some_and(|a| same(&a, answer)),
        (List { .. } | Union(_), Relation { sides, signs }) => {
            interval(sides, signs).is_some_and(|b| same(reference, &b))
        }
        (Matrix(a), Matrix(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same_in_order(a, b)),
        (Union(a), Union(b)) => same_in_any_order(a, b),
        (List { open: a_open, close: a_close, items: a }, List { open: b_open, close: b_close, items: b }) => {
            let (a_tuple, b_tuple) = (is_tuple(*a_open), is_tuple(*b_open));
            if *a_open == ':' || *b_open == ':' {
                return a_open == b_open && same_in_order(a, b);
            }
            match (a_tuple, b_tuple) {
                (true, true) => (a_open, a_close) == (b_open, b_close) && same_in_order(a, b),
                (false, false) => same_in_any_order(a, b),
                // `1, 2` may mean the point (1, 2).
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

/// Returns `true` if each item of either list equals an item of the other. As in a set, duplicates are ignored.
fn same_in_any_order(a: &[Form], b: &[Form]) -> bool {
    // Every pair is compared only once; otherwise nested sets would take exponential time.
    let mut found = vec![false; b.len()];
    let mut covers = true;
    for a in a {
        let mut is_found = false;
        for (b, found) in b.iter().zip(&mut found) {
            let is_same = same(a, b);
            is_found |= is_same;
            *found |= is_same;
        }
        covers &= is_found;
    }
    covers && found.iter().all(|found| *found)
}

fn is_equation(signs: &[Sign]) -> bool {
    signs.iter().all(|sign| matches!(sign, Sign::Equal | Sign::Approximate))
}

/// Returns the sides of an equation that may be its value: the last side, and the exact side before an approximation, unless it is a
/// variable.
fn values<'a>(sides: &'a [Quantity], signs: &[Sign]) -> impl Iterator<Item = &'a Quantity> {
    let exact = signs.iter().position(|sign| *sign == Sign::Approximate).map(|at| &sides[at]);
    let is_name = |side: &Quantity| matches!(side.expr, Expr::Variable(_));
    // `5 = x` names x, too.
    let first = sides.first().filter(|side| side.variables.is_empty() && sides.last().is_some_and(is_name));
    sides.last().into_iter().chain(first).chain(exact.filter(|side| !is_name(side)))
}

/// Returns `true` if the left side of an equation only names the right side: `x = 5`, `f(3) = 7`, `|z| = 5`, `\sin\theta = 1/2`, `AB : CD =
/// 2`, `7 \times 8 = 56`. In `x + y = 5` it does not.
fn is_named(sides: &[Quantity], signs: &[Sign]) -> bool {
    let (Some(left), Some(right)) = (sides.first(), sides.last()) else { return false };
    match &left.expr {
        Expr::Function(..) | Expr::Logarithm(..) => true,
        Expr::Quotient(a, b) if letters(a).is_some() && letters(b).is_some() => true,
        expr => {
            let is_value = || signs[0] == Sign::Approximate || left.equals(right);
            letters(expr).is_some() || left.variables.is_empty() && is_value()
        }
    }
}

/// Returns the letters of a variable or a product of variables.
fn letters(expr: &Expr) -> Option<String> {
    match expr {
        Expr::Variable(name) => Some(name.to_lowercase()),
        Expr::Euler => Some("e".into()),
        Expr::Imaginary => Some("i".into()),
        Expr::Product(all) => all.iter().map(letters).collect(),
        _ => None,
    }
}

fn same_relation(a: &[Quantity], a_signs: &[Sign], b: &[Quantity], b_signs: &[Sign]) -> bool {
    if a_signs == b_signs && a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.equals(b)) {
        return true;
    }
    if is_equation(a_signs) && is_equation(b_signs) {
        // The last side of `A = \frac{1}{2} b h = 6` is the value of A.
        let differences = |sides: &[Quantity], signs: &[Sign]| -> Vec<[Sample; POINTS]> {
            values(sides, signs).map(|value| difference(&sides[0], value)).collect()
        };
        let (a, b) = (differences(a, a_signs), differences(b, b_signs));
        return a.iter().any(|a| b.iter().any(|b| constant_ratio(a, b).is_some()));
    }
    if a_signs.len() == 1 && b_signs.len() == 1 {
        let sign = match constant_ratio(&difference(&a[0], &a[1]), &difference(&b[0], &b[1])) {
            Some(ratio) if ratio < 0.0 => b_signs[0].flipped(),
            Some(_) => b_signs[0],
            None => return false,
        };
        return a_signs[0] == sign;
    }
    match (interval(a, a_signs), interval(b, b_signs)) {
        (Some(a_set), Some(b_set)) => {
            let variables = |sides: &[Quantity]| -> std::collections::BTreeSet<String> {
                sides.iter().flat_map(|side| side.variables.iter().cloned()).collect()
            };
            variables(a) == variables(b) && same(&a_set, &b_set)
        }
        _ => false,
    }
}

fn difference(a: &Quantity, b: &Quantity) -> [Sample; POINTS] {
    std::array::from_fn(|point| a.samples[point].plus(b.samples[point].negative()))
}

/// Returns a / b if it is the same real number at every point. `None` for an identity, whose difference is 0.
fn constant_ratio(a: &[Sample; POINTS], b: &[Sample; POINTS]) -> Option<f64> {
    if a.iter().chain(b).any(|sample| sample.is_noise()) {
        return None;
    }
    let ratios: [Complex64; POINTS] = std::array::from_fn(|point| a[point].value / b[point].value);
    let first = Sample::exactly(ratios[0]);
    let is_real = first.value.im.abs() <= 1e-9 * first.value.re.abs() && first.value.re.is_finite();
    (is_real && ratios.iter().all(|ratio| first.is_near(Sample::exactly(*ratio), false))).then_some(first.value.re)
}

/// Returns the set of values of a variable: `x < 1`, `0 <= x < 1`.
pub(super) fn interval(sides: &[Quantity], signs: &[Sign]) -> Option<Form> {
    let constant = |side: &Quantity| side.variables.is_empty();
    let variable = |side: &Quantity| matches!(side.expr, Expr::Variable(_));
    // `|x| < 2` is between -2 and 2.
    let absolute = |side: &Quantity| matches!(&side.expr, Expr::Function(name, inside) if name == "abs" && matches!(**inside, Expr::Variable(_)));
    let make = |low: Quantity, closed_low: bool, high: Quantity, closed_high: bool| Form::List {
        open: if closed_low { '[' } else { '(' },
        close: if closed_high { ']' } else { ')' },
        items: vec![Form::Value(Box::new(low)), Form::Value(Box::new(high))],
    };
    let infinity = || Quantity::new(Expr::Infinity);
    let minus_infinity = || Quantity::new(Expr::Negative(Box::new(Expr::Infinity)));
    // The variable must be the left side, or the middle side between ascending signs.
    let (sides, signs): (Vec<&Quantity>, Vec<Sign>) = match (sides, signs) {
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
                Sign::Greater => Some(make(a, false, infinity(), false)),
                Sign::GreaterEqual => Some(make(a, true, infinity(), false)),
                // All numbers except one.
                Sign::NotEqual => Some(Form::Union(vec![
                    make(minus_infinity(), false, a.clone(), false),
                    make(a, false, infinity(), false),
                ])),
                Sign::Equal | Sign::Approximate => None,
            }
        }
        ([x, a], [sign]) if absolute(x) && constant(a) => {
            let (low, high) = (Quantity::new(Expr::Negative(Box::new(a.expr.clone()))), (*a).clone());
            let outside = |closed: bool| {
                let (low, high) = (low.clone(), high.clone());
                let (below, above) =
                    (make(minus_infinity(), false, low, closed), make(high, closed, infinity(), false));
                Some(Form::Union(vec![below, above]))
            };
            match sign {
                Sign::Less => Some(make(low, false, high, false)),
                Sign::LessEqual => Some(make(low, true, high, true)),
                Sign::Greater => outside(false),
                Sign::GreaterEqual => outside(true),
                Sign::Equal | Sign::Approximate | Sign::NotEqual => None,
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
