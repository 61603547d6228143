//! Blockwise attention against materialised attention and finite differences, in the interpreter: in f64, and for bf16 products with rounding.

use crate::decoder::{Attention, Compute, Decoder, Heads, Rows};
use models::ModelConfig;
use stablehlo::{Array, Builder, Dtype, Interpreter, Reducer, Rounding, TensorType, Traced, Value, trace};
use std::num::NonZeroUsize;

/// Rows of [`Case::length`] tokens with `sequences` sequences each.
#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    length: usize,
    kv: usize,
    group: usize,
    width: usize,
    sequences: usize,
}

impl Case {
    fn types(self) -> Vec<TensorType> {
        let Self { rows, length, kv, group, width, .. } = self;
        let keys = TensorType::new(Dtype::F32, [rows, kv, length, width]);
        vec![TensorType::new(Dtype::F32, [rows, kv, group, length, width]), keys.clone(), keys]
    }

    fn arguments(self) -> Vec<Array> {
        let array = |(n, ty): (usize, TensorType)| {
            let numbers = (0..ty.elements()).map(|i| number(i + 1000 * n));
            Array::floats(ty.dtype, &ty.shape[..], numbers).unwrap()
        };
        self.types().into_iter().enumerate().map(array).collect()
    }

    /// Traces the sum of attention outputs, each with its own weight.
    fn loss(self, attention: Attention, compute: Compute) -> Traced {
        let Self { rows, length, kv, group, width, sequences } = self;
        let config = ModelConfig {
            num_attention_heads: kv * group,
            num_key_value_heads: kv,
            head_dim: Some(width),
            ..ModelConfig::default()
        };
        let decoder = Decoder::new(&config, compute).with_attention(attention);
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
                },
            };
            let [queries, keys, values] = [0, 1, 2].map(|i: usize| a[i].convert(compute.dtype()));
            let mixed = decoder.attend(&Heads { queries, keys, values }, &decoder.mask(&rows));
            let weights = f.dense((0..mixed.ty().elements()).map(|i| number(i * i)), mixed.ty().clone());
            vec![(&mixed * &weights).reduce(Reducer::Add, &[0, 1, 2]), mixed]
        })
        .unwrap()
    }

    /// Returns the sum, the attention output, and the gradients of the sum: exact for f32 products, rounded for bf16 products.
    fn evaluate(self, attention: Attention, compute: Compute) -> Vec<Vec<f64>> {
        let f = Builder::new();
        let arguments: Vec<Value> = self.types().into_iter().map(|ty| f.argument("", ty)).collect();
        let arguments: Vec<&Value> = arguments.iter().collect();
        let (results, gradients) = f.value_and_grad(&self.loss(attention, compute), &arguments, &[0, 1, 2]).unwrap();
        let named: Vec<(&str, &Value)> = results.iter().chain(&gradients).map(|value| ("", value)).collect();
        let module = f.finish("attention", &named).unwrap();
        let exact = Interpreter::default();
        let interpreter = match compute {
            Compute::F32 => exact,
            Compute::Bf16 => Interpreter { rounding: Rounding::Dtypes, ..exact },
        };
        interpreter.run(&module, &self.arguments()).unwrap().iter().map(Array::to_floats).collect()
    }
}

/// Returns pseudo-random numbers from -2 to 2.
fn number(i: usize) -> f64 {
    ((i * 37 + 11) % 101) as f64 / 25.0 - 2.0
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
    let case = |length, kv, group, sequences| Case { rows: 2, length, kv, group, width: 2, sequences };
    for (case, block) in [
        (case(7, 2, 1, 1), 3),
        (case(8, 1, 2, 1), 4),
        (case(9, 2, 2, 3), 2),
        (case(11, 1, 3, 2), 4),
        (case(5, 1, 1, 2), 1),
        (case(6, 1, 2, 1), 16),
    ] {
        let expected = case.evaluate(Attention::Materialised, Compute::F32);
        let found = case.evaluate(blocks_of(block), Compute::F32);
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_close(&format!("{case:?} in blocks of {block}, result {i}"), found, expected, 1e-12);
        }
    }
}

#[test]
fn gradients_match_finite_differences() {
    let case = Case { rows: 1, length: 5, kv: 1, group: 2, width: 2, sequences: 2 };
    let loss = case.loss(blocks_of(2), Compute::F32);
    let gradients = case.evaluate(blocks_of(2), Compute::F32).split_off(2);
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

#[test]
fn blocks_in_bf16_are_as_accurate_as_materialised_attention() {
    let case = Case { rows: 2, length: 37, kv: 2, group: 3, width: 16, sequences: 5 };
    let exact = case.evaluate(Attention::Materialised, Compute::F32);
    let off = |attention| -> Vec<f64> {
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
        let rounded = case.evaluate(attention, Compute::Bf16);
        let share = |(rounded, exact): (&Vec<f64>, &Vec<f64>)| {
            norm(&mut rounded.iter().zip(exact).map(|(a, b)| a - b)) / norm(&mut exact.iter().copied())
        };
        rounded.iter().zip(&exact).skip(1).map(share).collect()
    };
    for (blockwise, materialised) in off(blocks_of(8)).into_iter().zip(off(Attention::Materialised)) {
        assert!(materialised > 1e-4 && blockwise < 1.5 * materialised, "{blockwise} {materialised}");
    }
}
