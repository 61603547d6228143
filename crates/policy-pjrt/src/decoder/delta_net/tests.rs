//! The rule in chunks against the rule token by token, and its derivative against finite differences, in f64, in the interpreter.

use super::inverse::inverse;
use super::rule::{Rule, Tokens};
use crate::decoder::{AxisRules, Compute};
use crate::leaves::all;
use grpo_stablehlo::{Array, Builder, Dtype, Module, Reducer, TensorType, Traced, Value, try_trace};

const ROWS: usize = 2;
const HEADS: usize = 2;
const GROUP: usize = 2;
const KEYS: usize = 3;
const VALUES: usize = 2;

/// Returns the types of queries, keys, values, strengths, decays and the first state.
fn types(length: usize) -> Vec<TensorType> {
    let of = |shape: &[usize]| TensorType::new(Dtype::F32, shape);
    let (keys, heads) = (of(&[ROWS, length, HEADS, KEYS]), of(&[ROWS, length, HEADS, GROUP]));
    let values = of(&[ROWS, length, HEADS, GROUP, VALUES]);
    vec![keys.clone(), keys, values, heads.clone(), heads, of(&[ROWS, HEADS, KEYS, GROUP, VALUES])]
}

fn arguments(length: usize) -> Vec<Array> {
    let number = |i: usize| ((i * 37 + 11) % 101) as f64 / 101.0;
    let array = |(n, ty): (usize, TensorType)| {
        let of = |i: usize| match n {
            3 => number(i + 3000),
            // Decays from 1 to exp(-2).
            4 => -2.0 * number(i + 4000),
            _ => 1.4 * number(i + 1000 * n) - 0.7,
        };
        Array::floats(ty.dtype, &ty.shape[..], (0..ty.elements()).map(of)).unwrap()
    };
    types(length).into_iter().enumerate().map(array).collect()
}

/// Traces the outputs and the last state in chunks of `chunk` tokens, for sequences that begin at the tokens `begins` of every row. Sequences
/// before the first one continue the first state.
fn rule(length: usize, chunk: usize, begins: &[usize]) -> Traced {
    let traced = try_trace(&types(length), |f, a| {
        let [queries, keys, values, strengths, decays, state] = all(a);
        // 100 tokens precede the first state.
        let position =
            |token: usize| begins.iter().rev().find(|begin| **begin <= token).map_or(token + 100, |b| token - b);
        let positions = f.dense(
            (0..ROWS * length).map(|i| position(i % length) as i64),
            TensorType::new(Dtype::I32, [ROWS, length]),
        );
        let of = [queries, keys, values, strengths, decays].map(Clone::clone);
        let [queries, keys, values, strengths, decays] = of;
        let tokens = Tokens { queries, keys, values, strengths, decays };
        let rules = AxisRules::default();
        let rule = Rule { chunk, compute: Compute::F32, rules: &rules };
        Ok::<_, grpo_stablehlo::Error>(rule.apply(&tokens, &positions, state)?.to_vec())
    });
    traced.unwrap()
}

fn module(traced: &Traced) -> Module {
    let f = Builder::new();
    let arguments: Vec<Value> = traced.argument_types().into_iter().map(|ty| f.argument("", ty)).collect();
    let results = f.call(traced, &arguments.iter().collect::<Vec<_>>());
    f.finish("rule", &results.iter().map(|result| ("", result)).collect::<Vec<_>>()).unwrap()
}

fn evaluate(module: &Module, arguments: &[Array]) -> Vec<Vec<f64>> {
    module.interpret(arguments).unwrap().iter().map(Array::to_floats).collect()
}

/// Computes outputs and last state token by token.
fn by_token(length: usize, begins: &[usize]) -> [Vec<f64>; 2] {
    let arguments: Vec<Vec<f64>> = arguments(length).iter().map(Array::to_floats).collect();
    let [queries, keys, values, strengths, decays, state] = arguments.first_chunk().expect("six arguments");
    let (mut outputs, mut last) = (vec![0.0; values.len()], state.clone());
    for (row, head, member) in triples(ROWS, HEADS, GROUP) {
        let entry = |k: usize, v: usize| (((row * HEADS + head) * KEYS + k) * GROUP + member) * VALUES + v;
        for token in 0..length {
            let place = (row * length + token) * HEADS + head;
            let (of_keys, of_head) = (&keys[place * KEYS..][..KEYS], place * GROUP + member);
            for v in 0..VALUES {
                let mut column: Vec<f64> = (0..KEYS).map(|k| last[entry(k, v)]).collect();
                if begins.contains(&token) {
                    column.fill(0.0);
                }
                column.iter_mut().for_each(|x| *x *= decays[of_head].exp());
                let dot = |column: &[f64], with: &[f64]| column.iter().zip(with).map(|(a, b)| a * b).sum::<f64>();
                let update = strengths[of_head] * (values[of_head * VALUES + v] - dot(&column, of_keys));
                column.iter_mut().zip(of_keys).for_each(|(x, key)| *x += key * update);
                outputs[of_head * VALUES + v] = dot(&column, &queries[place * KEYS..][..KEYS]);
                (0..KEYS).for_each(|k| last[entry(k, v)] = column[k]);
            }
        }
    }
    [outputs, last]
}

fn triples(a: usize, b: usize, c: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..a * b * c).map(move |i| (i / (b * c), i / c % b, i % c))
}

fn assert_close(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-9 * (1.0 + expected.abs()), "{what}: {found} {expected}");
    }
}

#[test]
fn chunks_match_tokens_one_by_one() {
    // Shorter than a chunk, one chunk, an incomplete last chunk, chunks whose size is no power of two, and one token.
    for (length, chunk) in [(5, 8), (8, 8), (9, 8), (16, 4), (13, 5), (3, 1), (1, 8)] {
        let found = evaluate(&module(&rule(length, chunk, &[])), &arguments(length));
        for (found, expected) in found.iter().zip(by_token(length, &[])) {
            assert_close(found, &expected, &format!("{length} tokens, chunks of {chunk}"));
        }
    }
}

#[test]
fn packed_sequences_begin_without_a_state() {
    // Sequences that begin with the row, with a chunk, within chunks, and after one token; padding of one token each.
    for begins in [&[0][..], &[0, 4, 6], &[0, 3, 4, 5, 11], &[2, 8, 12], &[0, 5, 10, 11, 12]] {
        let found = evaluate(&module(&rule(13, 4, begins)), &arguments(13));
        let [outputs, last] = by_token(13, begins);
        assert_close(&found[0], &outputs, &format!("outputs of {begins:?}"));
        assert_close(&found[1], &last, &format!("last states of {begins:?}"));
    }
}

#[test]
fn derivatives_match_finite_differences() {
    for (length, chunk, begins) in [(7, 3, &[0, 2, 3][..]), (6, 8, &[]), (1, 8, &[])] {
        let inner = rule(length, chunk, begins);
        let loss = try_trace(&types(length), |f, a| {
            let results = f.call(&inner, &a.iter().collect::<Vec<_>>());
            let sum = |(n, x): (usize, &Value)| {
                let factors = (0..x.ty().elements()).map(|i| ((i * 7 + n) % 11) as f64 / 5.0 - 1.0);
                let all: Vec<usize> = (0..x.shape().len()).collect();
                (x * f.dense(factors, x.ty().clone())).reduce(Reducer::Add, &all)
            };
            let [outputs, last] = [0, 1].map(|n| sum((n, &results[n])));
            Ok::<_, grpo_stablehlo::Error>(vec![outputs + last])
        });
        let loss = loss.unwrap();
        let f = Builder::new();
        let given: Vec<Value> = types(length).into_iter().map(|ty| f.argument("", ty)).collect();
        let (results, gradients) =
            f.value_and_grad(&loss, &given.iter().collect::<Vec<_>>(), &[0, 1, 2, 3, 4, 5]).unwrap();
        let all: Vec<(&str, &Value)> = results.iter().chain(&gradients).map(|value| ("", value)).collect();
        let (derivative, value) = (f.finish("derivative", &all).unwrap(), module(&loss));
        let base = arguments(length);
        let found = evaluate(&derivative, &base);
        for (n, gradient) in found[1..].iter().enumerate() {
            for i in 0..gradient.len() {
                let [above, below] = [1e-5, -1e-5].map(|step| {
                    let mut moved = base.clone();
                    let mut numbers = moved[n].to_floats();
                    numbers[i] += step;
                    moved[n] = Array::floats(Dtype::F32, base[n].shape().to_vec(), numbers).unwrap();
                    evaluate(&value, &moved)[0][0]
                });
                let expected = (above - below) / 2e-5;
                let found = gradient[i];
                assert!((found - expected).abs() < 1e-6, "{length}, argument {n}, element {i}: {found} {expected}");
            }
        }
    }
}

/// A chunk of equal keys, whose powers of A have entries of 10^17.
#[test]
fn the_inverse_of_a_chunk_of_equal_keys_is_exact() {
    let ty = TensorType::new(Dtype::F32, [64, 64]);
    let f = Builder::new();
    let result = inverse(&f.argument("a", ty)).unwrap();
    let module = f.finish("inverse", &[("inverse", &result)]).unwrap();
    let ones = Array::floats(Dtype::F32, [64, 64], vec![1.0; 64 * 64]).unwrap();
    let found = module.interpret(&[ones]).unwrap()[0].to_floats();
    for (i, x) in found.iter().enumerate() {
        let expected = match (i / 64, i % 64) {
            (row, column) if row == column => 1.0,
            (row, column) if row == column + 1 => -1.0,
            _ => 0.0,
        };
        assert_eq!(*x, expected, "row {}, column {}", i / 64, i % 64);
    }
}
