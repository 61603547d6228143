//! Properties of derivatives of random functions.

use super::*;
use crate::interpret::cases::windows::rows;
use grpo_stablehlo::{Binary, DotDimensions, Precision, Save, Unary};
use proptest::prelude::*;

/// Selects an operation and two of the values so far, all `[3, 3]`.
type Choice = (u8, u8, u8);

fn choices(lengths: std::ops::Range<usize>) -> impl Strategy<Value = Vec<Choice>> {
    prop::collection::vec((0..15_u8, any::<u8>(), any::<u8>()), lengths)
}

/// Applies the operations to `values` and returns the last result.
fn follow(f: &Builder, values: &[Value], choices: &[Choice]) -> Value {
    let mut values = values.to_vec();
    for (operation, a, b) in choices {
        let [a, b] = [a, b].map(|i| values[usize::from(*i) % values.len()].clone());
        values.push(apply(f, *operation, &a, &b));
    }
    values.pop().expect("a value")
}

fn apply(f: &Builder, operation: u8, a: &Value, b: &Value) -> Value {
    let bounded = |v: Value| v.tanh();
    let spread = |v: &Value, d: usize| v.broadcast_in_dim(&[3, 3], &[d]);
    match operation {
        0 => a + b,
        1 => bounded(a * b),
        2 => a - b,
        3 => a.unary(Unary::Sine),
        4 => a.unary(Unary::Logistic),
        5 => bounded(a.dot_general(b, DotDimensions::contract(1, 0), Dtype::F64, Precision::Default)).named("product"),
        6 => bounded(a.dot_general(b, DotDimensions::contract(0, 0), Dtype::F64, Precision::Default)),
        7 => a.transpose(&[1, 0]),
        8 => a.binary(Binary::Maximum, b),
        9 => spread(&a.reduce(Reducer::Add, &[0]), 1),
        10 => spread(&a.reduce(Reducer::Max, &[1]), 0),
        11 => f.concatenate(&[&a.slice(&[1, 0], &[3, 3]), &b.slice(&[0, 0], &[1, 3])], 0),
        12 => a.gather(&f.dense([2, 0, 2], TensorType::new(Dtype::I32, [3])), rows(3), &[3, 3]),
        13 => {
            let [row, column] = [0, 1].map(|d| f.iota(d, TensorType::new(Dtype::I32, [3, 3])));
            row.lt(&column).select(&a.tanh().exp(), b)
        }
        _ => {
            let [one, zero] = [1, 0].map(|i| f.scalar(i, Dtype::I32));
            a.dynamic_update_slice(&b.dynamic_slice(&[&zero, &one], &[2, 2]), &[&one, &zero])
        }
    }
}

fn matrices(n: usize) -> Vec<TensorType> {
    vec![wide(&[3, 3]); n]
}

fn program(choices: &[Choice]) -> Traced {
    trace(&matrices(2), |f, a| vec![follow(f, a, choices)]).expect("a program")
}

fn same(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    let size = expected.iter().fold(1.0, |m: f64, x| m.max(x.abs()));
    assert!(
        found.iter().zip(expected).all(|(f, e)| (f - e).abs() <= 1e-11 * size),
        "{found:?} and should be {expected:?}"
    );
}

/// Returns a [`Save`] policy by number, for a loop of `turns` iterations.
fn policy(i: u8, turns: usize) -> Save {
    match i % 5 {
        0 => Save::Carry,
        4 => Save::Every(if turns == 4 { 2 } else { turns }),
        1 => Save::Named(vec!["product".into()]),
        2 => Save::Products,
        _ => Save::Everything,
    }
}

/// The body of a loop: a program of (carry, slice, constant) that also returns a result to stack.
fn body(carry: &[Choice], part: &[Choice]) -> Traced {
    trace(&matrices(3), |f, a| vec![follow(f, a, carry), follow(f, a, part)]).expect("a body")
}

fn looped(body: &Traced, turns: usize, save: Option<Save>) -> Traced {
    let stack = wide(&[turns, 3, 3]);
    trace(&[wide(&[3, 3]), stack, wide(&[3, 3])], |f, a| {
        let Some(save) = save else {
            let (mut carry, mut parts) = (a[0].clone(), vec![]);
            for i in 0..turns {
                let slice = a[1].slice(&[i, 0, 0], &[i + 1, 3, 3]).reshape(&[3, 3]);
                let results = f.call(body, &[&carry, &slice, &a[2]]);
                carry = results[0].clone();
                parts.push(results[1].reshape(&[1, 3, 3]));
            }
            return vec![carry, f.concatenate(&parts.iter().collect::<Vec<_>>(), 0)];
        };
        let scanned = f.scan(turns, body, &[&a[0]], &[&a[1]], &[&a[2]], save);
        vec![scanned.carry[0].clone(), scanned.ys[0].clone()]
    })
    .expect("a loop")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn random_gradients_match_finite_differences(choices in choices(1..8), seed in 0..50_u64) {
        let function = program(&choices);
        let sum = weighted(&function);
        let arguments = arguments(&function, seed);
        let found = gradient(&sum, &[0, 1]).function().interpret(&arguments).expect("gradients");
        for i in 0..2 {
            let expected = differences(sum.function(), &arguments, i);
            let found = found[i + 1].to_floats();
            prop_assert!(found.iter().zip(&expected).all(|(f, e)| (f - e).abs() <= 1e-6 * (1.0 + e.abs())),
                "{found:?} and should be {expected:?}");
        }
    }

    #[test]
    fn pullbacks_are_linear_in_the_cotangent(choices in choices(1..10), (p, q) in (-3.0..3.0, -3.0..3.0)) {
        let function = program(&choices);
        let types = [matrices(4), vec![wide(&[]); 2]].concat();
        let pulled = trace(&types, |f, a| {
            let (_, pullback) = f.vjp(&function, &[&a[0], &a[1]], &[0, 1]).expect("a derivative");
            let times = |v: &Value, by: &Value| v * by.broadcast_in_dim(v.shape(), &[]);
            let together = pullback.call(&[&(times(&a[2], &a[4]) + times(&a[3], &a[5]))]);
            let [first, second] = [2, 3].map(|i| pullback.call(&[&a[i]]));
            let apart = first.iter().zip(&second).map(|(x, y)| times(x, &a[4]) + times(y, &a[5]));
            together.into_iter().chain(apart).collect()
        }).expect("a function");
        let mut arguments: Vec<Array> = types[..4].iter().zip(0..).map(|(ty, i)| array(ty, i)).collect();
        arguments.extend([p, q].map(|x| Array::floats(Dtype::F64, [], [x]).expect("an array")));
        let found = pulled.function().interpret(&arguments).expect("cotangents");
        for i in 0..2 {
            same(&found[i].to_floats(), &found[i + 2].to_floats());
        }
    }

    #[test]
    fn the_gradient_of_a_sum_is_the_sum_of_gradients(one in choices(1..8), other in choices(1..8)) {
        let [a, b] = [&one, &other].map(|choices| weighted(&program(choices)));
        let both = trace(&matrices(2), |f, x| {
            let x: Vec<&Value> = x.iter().collect();
            vec![&f.call(&a, &x)[0] + &f.call(&b, &x)[0]]
        }).expect("a sum");
        let of = |f: &Traced| gradient(f, &[0, 1]).function().interpret(&arguments(f, 7)).expect("gradients")
            .iter().flat_map(Array::to_floats).collect::<Vec<_>>();
        let sum: Vec<f64> = of(&a).into_iter().zip(of(&b)).map(|(a, b)| a + b).collect();
        same(&of(&both), &sum);
    }

    #[test]
    fn scan_gradients_match_unrolled_loops(carry in choices(1..8), part in choices(1..5), turns in 1..5_usize, save in any::<u8>()) {
        let body = body(&carry, &part);
        same(&gradients(&looped(&body, turns, Some(policy(save, turns))), 3), &gradients(&looped(&body, turns, None), 3));
    }

    #[test]
    fn nested_scan_gradients_match_unrolled_loops(carry in choices(1..6), after in choices(1..4), saves in any::<(u8, u8)>()) {
        let body = body(&carry, &after);
        let inner = |save: Option<Save>| {
            let looped = looped(&body, 2, save);
            // The slice of the outer loop is also the constant of the inner one.
            trace(&matrices(3), |f, a| {
                let stack = f.concatenate(&[&a[1].reshape(&[1, 3, 3]), &a[2].reshape(&[1, 3, 3])], 0);
                let results = f.call(&looped, &[&a[0], &stack, &a[1]]);
                let both = results[1].reduce(Reducer::Add, &[0]);
                vec![follow(f, &[results[0].clone(), a[2].clone()], &after), both]
            }).expect("a body")
        };
        let nested = looped(&inner(Some(policy(saves.0, 2))), 3, Some(policy(saves.1, 3)));
        same(&gradients(&nested, 5), &gradients(&looped(&inner(None), 3, None), 5));
    }
}
