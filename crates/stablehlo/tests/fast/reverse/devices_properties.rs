//! Properties of derivatives of random computations on several devices.

use super::*;
use crate::interpret::cases::split::{along, mesh, split};
use proptest::prelude::*;
use stablehlo::{DotDimensions, Manual, Precision, Save};

/// Selects an operation, two of the values so far, all `[2, 2]` per device, and the axes of a collective.
type Choice = (u8, u8, u8, u8);

fn apply(f: &Builder, values: &[Value], (operation, a, b, axes): Choice) -> Value {
    let [a, b] = [a, b].map(|i| &values[usize::from(i) % values.len()]);
    let axes = along([&["data"][..], &["tensor"], &["data", "tensor"]][usize::from(axes % 3)]);
    match operation % 7 {
        0 => a + b,
        1 => (a * b).tanh(),
        2 => a.dot_general(b, DotDimensions::contract(1, 0), Dtype::F64, Precision::Default).tanh(),
        3 => a.transpose(&[1, 0]),
        4 => a.all_reduce(Reducer::Add, &axes),
        5 => a * f.axis_index(&axes).convert(Dtype::F64).broadcast_in_dim(&[2, 2], &[]),
        _ => a.all_reduce(Reducer::Add, &axes).tanh() + b,
    }
}

/// A manual computation on a sharded argument and an argument that is replicated along `data`. Its results: one sharded
/// over both axes, one replicated along `tensor`, one replicated on all devices.
fn program(choices: &[Choice]) -> Traced {
    let (both, shared) = (split(&[&["data"], &["tensor"]]), split(&[&[], &["tensor"]]));
    let outputs = [both.clone(), split(&[&["data"], &[]]), mesh().replicated(2)];
    let manual = Manual::new(&along(&["data", "tensor"]), &[both, shared], &outputs).expect("a computation");
    let types = [wide(&[4, 4]), wide(&[2, 4])];
    let body = built(manual.trace(&types, |f, a| {
        let mut values = a.to_vec();
        for choice in choices {
            values.push(apply(f, &values, *choice));
        }
        let [last, other] = [1, 2].map(|i| values[values.len() - i].clone());
        let row = last.all_reduce(Reducer::Add, &along(&["tensor"]));
        let all = row.all_reduce(Reducer::Add, &along(&["data"]));
        vec![last.clone(), &row + row.tanh(), all.tanh() + other.all_reduce(Reducer::Add, &along(&["data", "tensor"]))]
    }));
    trace(&types, |f, a| f.manual(&manual, &body, &[&a[0], &a[1]])).expect("a program")
}

fn choices(lengths: std::ops::Range<usize>) -> impl Strategy<Value = Vec<Choice>> {
    prop::collection::vec(any::<Choice>(), lengths)
}

fn near(found: &[f64], expected: &[f64], slack: f64) -> bool {
    let size = expected.iter().fold(1.0, |m: f64, x| m.max(x.abs()));
    found.len() == expected.len() && found.iter().zip(expected).all(|(f, e)| (f - e).abs() <= slack * size)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn random_device_gradients_match_finite_differences(choices in choices(1..7), seed in 0..50_u64) {
        let sum = weighted(&program(&choices));
        let arguments = arguments(&sum, seed);
        let found = gradient(&sum, &[0, 1]).function().interpret(&arguments).expect("gradients");
        for i in 0..2 {
            let (found, expected) = (found[i + 1].to_floats(), differences(sum.function(), &arguments, i));
            prop_assert!(near(&found, &expected, 1e-6), "{found:?} and should be {expected:?}");
        }
    }

    #[test]
    fn scans_do_not_change_device_gradients(choices in choices(1..7), save in 0..3_usize) {
        let save = [Save::Carry, Save::Products, Save::Everything][save].clone();
        let plain = program(&choices);
        let turn = built(trace(&plain.argument_types(), |f, a| {
            let results = f.call(&plain, &[&a[0], &a[1]]);
            let rows = f.concatenate(&[&results[2], &results[2]], 0);
            vec![results[0].tanh(), results[1].tanh() + f.concatenate(&[&rows, &rows], 1).slice(&[0, 0], &[4, 2])]
        }));
        let stack = [wide(&[4, 4]), wide(&[2, 2, 4])];
        let looped = trace(&stack, |f, a| {
            let scanned = f.scan(2, &turn, &[&a[0]], &[&a[1]], &[], save.clone());
            [scanned.carry, scanned.ys].concat()
        });
        let turns = trace(&stack, |f, a| {
            let slice = |i: usize| a[1].slice(&[i, 0, 0], &[i + 1, 2, 4]).reshape(&[2, 4]);
            let first = f.call(&turn, &[&a[0], &slice(0)]);
            let second = f.call(&turn, &[&first[0], &slice(1)]);
            let parts = [&first[1], &second[1]].map(|part| part.reshape(&[1, 4, 2]));
            vec![second[0].clone(), f.concatenate(&[&parts[0], &parts[1]], 0)]
        });
        let found = gradients(&looped.expect("a loop"), 5);
        let expected = gradients(&turns.expect("turns"), 5);
        prop_assert!(near(&found, &expected, 1e-10), "{found:?} and should be {expected:?}");
    }
}
