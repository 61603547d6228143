//! Blockwise attention against materialised attention and finite differences, in f64, in the interpreter.

use crate::decoder::{Attention, Compute, Decoder, Heads, Rows};
use grpo_models::ModelConfig;
use grpo_stablehlo::{Array, Builder, Dtype, Module, Reducer, TensorType, Traced, Value, trace};
use std::num::NonZeroUsize;

/// Rows of [`Case::length`] tokens with `sequences` sequences each.
#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    length: usize,
    kv: usize,
    group: usize,
    sequences: usize,
    window: Option<usize>,
}

const WIDTH: usize = 2;

impl Case {
    fn types(self) -> Vec<TensorType> {
        let Self { rows, length, kv, group, .. } = self;
        let keys = TensorType::new(Dtype::F32, [rows, kv, length, WIDTH]);
        vec![TensorType::new(Dtype::F32, [rows, kv, group, length, WIDTH]), keys.clone(), keys]
    }

    fn arguments(self) -> Vec<Array> {
        let number = |i: usize| ((i * 37 + 11) % 101) as f64 / 25.0 - 2.0;
        let array = |(n, ty): (usize, TensorType)| {
            let numbers = (0..ty.elements()).map(|i| number(i + 1000 * n));
            Array::floats(ty.dtype, &ty.shape[..], numbers).unwrap()
        };
        self.types().into_iter().enumerate().map(array).collect()
    }

    /// Traces the sum of attention outputs, each with its own weight.
    fn loss(self, attention: Attention) -> Traced {
        let Self { rows, length, kv, group, sequences, window } = self;
        let config = ModelConfig {
            num_attention_heads: kv * group,
            num_key_value_heads: kv,
            head_dim: Some(WIDTH),
            ..ModelConfig::default()
        };
        let decoder = Decoder::new(&config, Compute::F32).with_attention(attention);
        trace(&self.types(), |f, a| {
            let ids = TensorType::new(Dtype::I32, [rows, length]);
            // Sequences of different lengths, different in every row.
            let sequence = |row: usize, token: usize| (token + row) * sequences / (length + rows);
            let position = |i: usize| {
                let (row, token) = (i / length, i % length);
                (0..token).filter(|earlier| sequence(row, *earlier) == sequence(row, token)).count() as i64
            };
            let rows = match sequences {
                1 => Rows::of_sequences(&f.splat(0, ids)),
                _ => Rows {
                    positions: f.dense((0..rows * length).map(position), ids.clone()),
                    ids: f.splat(0, ids),
                    shared: true,
                    counted: None,
                    routed: None,
                },
            };
            let heads = Heads { queries: a[0].clone(), keys: a[1].clone(), values: a[2].clone() };
            let mixed = decoder.attend(&heads, &decoder.mask(&rows, window), None);
            let weights = f.dense((0..mixed.ty().elements()).map(|i| (i % 7) as f64 - 2.5), mixed.ty().clone());
            vec![(&mixed * &weights).reduce(Reducer::Add, &[0, 1, 2]), mixed]
        })
        .unwrap()
    }

    /// Returns the program of the sum, the attention output, and the gradients of the sum.
    fn module(self, attention: Attention) -> Module {
        let f = Builder::new();
        let arguments: Vec<Value> = self.types().into_iter().map(|ty| f.argument("", ty)).collect();
        let arguments: Vec<&Value> = arguments.iter().collect();
        let (results, gradients) = f.value_and_grad(&self.loss(attention), &arguments, &[0, 1, 2]).unwrap();
        let named: Vec<(&str, &Value)> = results.iter().chain(&gradients).map(|value| ("", value)).collect();
        f.finish("attention", &named).unwrap()
    }

    fn evaluate(self, attention: Attention) -> Vec<Vec<f64>> {
        self.module(attention).interpret(&self.arguments()).unwrap().iter().map(Array::to_floats).collect()
    }
}

fn blocks_of(block: usize) -> Attention {
    Attention::Blockwise { block: NonZeroUsize::new(block).unwrap() }
}

fn assert_close(what: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    assert!(expected.iter().any(|x| x.abs() > 1e-3), "{what}: nothing to compare");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= tolerance * (1.0 + expected.abs()), "{what}: {found} {expected}");
    }
}

#[test]
fn values_and_gradients_match_materialised_attention() {
    let case = |length, kv, group, sequences| Case { rows: 2, length, kv, group, sequences, window: None };
    let sliding = |length, sequences, window| Case { window: Some(window), ..case(length, 1, 2, sequences) };
    for (case, block) in [
        (case(7, 2, 1, 1), 3),
        (case(8, 1, 2, 1), 4),
        (case(9, 2, 2, 3), 2),
        (case(11, 1, 3, 2), 4),
        (case(5, 1, 1, 2), 1),
        (case(6, 1, 2, 1), 16),
        (sliding(9, 1, 2), 2),
        (sliding(9, 1, 3), 2),
        (sliding(11, 2, 4), 3),
        (sliding(11, 3, 2), 4),
        (sliding(7, 1, 9), 2),
    ] {
        let expected = case.evaluate(Attention::Materialised);
        let found = case.evaluate(blocks_of(block));
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_close(&format!("{case:?} in blocks of {block}, result {i}"), found, expected, 1e-12);
        }
    }
}

#[test]
fn a_window_hides_earlier_tokens() {
    let whole = Case { rows: 1, length: 6, kv: 1, group: 1, sequences: 1, window: None };
    let of = |window, attention| Case { window, ..whole }.evaluate(attention).swap_remove(1);
    for attention in [Attention::Materialised, blocks_of(2)] {
        // A token that attends to itself only has its own value as output.
        let values = whole.arguments()[2].to_floats();
        assert_close("window of 1", &of(Some(1), attention), &values, 1e-12);
        assert_close("window of all", &of(Some(6), attention), &of(None, attention), 1e-12);
        // The first three tokens see everything in a window of 3, and the others do not.
        let (some, all) = (of(Some(3), attention), of(None, attention));
        assert_close("within the window", &some[..3 * WIDTH], &all[..3 * WIDTH], 1e-12);
        let differs =
            |token: usize| (0..WIDTH).any(|i| (some[token * WIDTH + i] - all[token * WIDTH + i]).abs() > 1e-3);
        assert!((3..6).all(differs), "{some:?} {all:?}");
    }
}

#[test]
fn blocks_outside_the_window_are_not_computed() {
    // Four blocks of two tokens: the diagonal, one block before it, and all.
    for (window, pairs) in [(Some(1), 4), (Some(2), 7), (Some(3), 7), (Some(4), 9), (None, 10)] {
        let case = Case { rows: 1, length: 8, kv: 1, group: 1, sequences: 1, window };
        let text = case.module(blocks_of(2)).to_string();
        assert!(text.contains(&format!("tensor<{pairs}xi32>")), "{window:?}: {text}");
    }
}

#[test]
fn gradients_match_finite_differences() {
    let case = Case { rows: 1, length: 5, kv: 1, group: 2, sequences: 2, window: Some(2) };
    let loss = case.loss(blocks_of(2));
    let gradients = case.evaluate(blocks_of(2)).split_off(2);
    let h = 1e-5;
    for (index, gradient) in gradients.iter().enumerate() {
        let moved = |i: usize, by: f64| {
            let mut arguments = case.arguments();
            let mut numbers = arguments[index].to_floats();
            numbers[i] += by;
            let ty = arguments[index].ty().clone();
            arguments[index] = Array::floats(ty.dtype, &ty.shape[..], numbers).unwrap();
            loss.function().interpret(&arguments).unwrap()[0].to_floats()[0]
        };
        let differences: Vec<f64> = (0..gradient.len()).map(|i| (moved(i, h) - moved(i, -h)) / (2.0 * h)).collect();
        assert_close(&format!("argument {index}"), gradient, &differences, 1e-8);
    }
}
