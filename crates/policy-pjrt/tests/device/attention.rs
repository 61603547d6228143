//! Blockwise attention against materialised attention.

use crate::support::{assert_close, runtime};
use models::ModelConfig;
use pjrt::{Argument, Buffer};
use policy_pjrt::decoder::{Attention, Compute, Decoder, Heads, Rows};
use stablehlo::{Builder, Dtype, TensorType, Value, trace};
use std::num::NonZeroUsize;

/// Sizes of attention; rows contain several sequences if `packed`.
#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    length: usize,
    kv: usize,
    group: usize,
    width: usize,
    packed: bool,
}

impl Case {
    fn queries(self) -> Vec<usize> {
        vec![self.rows, self.kv, self.group, self.length, self.width]
    }

    fn keys(self) -> Vec<usize> {
        vec![self.rows, self.kv, self.length, self.width]
    }

    fn mixed(self) -> Vec<usize> {
        vec![self.rows, self.length, self.kv * self.group * self.width]
    }

    /// Returns the attention output, and the gradients of queries, keys and values.
    fn evaluate(self, attention: Attention, compute: Compute) -> Vec<Vec<f32>> {
        let Self { rows, length, kv, group, width, packed } = self;
        let config = ModelConfig {
            num_attention_heads: kv * group,
            num_key_value_heads: kv,
            head_dim: Some(width),
            ..ModelConfig::default()
        };
        let decoder = Decoder::new(&config, compute).with_attention(attention);
        let shapes = [self.queries(), self.keys(), self.keys(), self.mixed()];
        let types: Vec<TensorType> = shapes.iter().map(|shape| TensorType::new(Dtype::F32, &shape[..])).collect();
        let attend = trace(&types[..3], |f, a| {
            let [queries, keys, values] = [0, 1, 2].map(|i: usize| a[i].convert(compute.dtype()));
            let ids = TensorType::new(Dtype::I32, [rows, length]);
            // Sequences of various lengths, different in every row.
            let sequence = |row: usize, token: usize| ((token + 3 * row) as f64 / 2.0).sqrt() as usize;
            let position = |i: usize| {
                let (row, token) = (i / length, i % length);
                (0..token).filter(|earlier| sequence(row, *earlier) == sequence(row, token)).count() as i64
            };
            let rows = match packed {
                false => Rows::of_sequences(&f.splat(0, ids)),
                true => Rows {
                    positions: f.dense((0..rows * length).map(position), ids.clone()),
                    ids: f.splat(0, ids),
                    shared: true,
                },
            };
            vec![decoder.attend(&Heads { queries, keys, values }, &decoder.mask(&rows))]
        })
        .unwrap();
        let f = Builder::new();
        let a: Vec<Value> = types.iter().map(|ty| f.argument("", ty.clone())).collect();
        let (mixed, pullback) = f.vjp(&attend, &[&a[0], &a[1], &a[2]], &[0, 1, 2]).unwrap();
        let gradients = pullback.call(&[&a[3]]);
        let named: Vec<(&str, &Value)> = mixed.iter().chain(&gradients).map(|value| ("", value)).collect();
        let program = runtime().compile(&f.finish("attention", &named).unwrap()).unwrap();
        let buffers: Vec<Buffer> = shapes.iter().enumerate().map(|(seed, shape)| upload(shape, seed)).collect();
        let outputs = program.run(buffers.iter().map(Argument::from).collect()).unwrap();
        outputs.iter().map(|output| output.to_vec().unwrap()).collect()
    }
}

/// Uploads pseudo-random numbers between -2 and 2.
fn upload(shape: &[usize], seed: usize) -> Buffer {
    let number = |i: usize| {
        let mut z = ((i + 1_000_003 * seed) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((z >> 40) as f32 / (1 << 24) as f32).mul_add(4.0, -2.0)
    };
    let numbers: Vec<f32> = (0..shape.iter().product()).map(number).collect();
    runtime().upload(&numbers, shape).unwrap()
}

fn blocks_of(block: usize) -> Attention {
    Attention::Blockwise { block: NonZeroUsize::new(block).unwrap() }
}

const CASES: [(Case, usize); 4] = [
    (Case { rows: 2, length: 37, kv: 2, group: 3, width: 16, packed: false }, 8),
    (Case { rows: 2, length: 37, kv: 2, group: 3, width: 16, packed: true }, 8),
    (Case { rows: 1, length: 64, kv: 3, group: 1, width: 8, packed: true }, 16),
    (Case { rows: 3, length: 19, kv: 1, group: 2, width: 8, packed: false }, 64),
];

#[test]
fn blockwise_attention_matches_materialised_attention() {
    for (case, block) in CASES {
        let expected = case.evaluate(Attention::Materialised, Compute::F32);
        let found = case.evaluate(blocks_of(block), Compute::F32);
        let what = |name: &str| format!("{case:?}, blocks of {block}: {name}");
        assert_close(&what("mixed"), &found[0], &expected[0], 1e-6);
        for (name, (found, expected)) in ["queries", "keys", "values"].iter().zip(found.iter().zip(&expected).skip(1)) {
            assert_close(&what(name), found, expected, 1e-5);
        }
    }
}

#[test]
fn blockwise_attention_in_bf16_is_as_accurate_as_materialised_attention() {
    let (case, block) = CASES[1];
    let exact = case.evaluate(Attention::Materialised, Compute::F32);
    let off = |attention| {
        let of_rounded = case.evaluate(attention, Compute::Bf16);
        let share = |(rounded, exact): (&Vec<f32>, &Vec<f32>)| {
            let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x * x)).sum::<f64>();
            let off = squares(&mut rounded.iter().zip(exact).map(|(a, b)| a - b));
            (off / squares(&mut exact.iter().copied())).sqrt()
        };
        of_rounded.iter().zip(&exact).map(share).collect::<Vec<f64>>()
    };
    let (blockwise, materialised) = (off(blocks_of(block)), off(Attention::Materialised));
    for (blockwise, materialised) in blockwise.into_iter().zip(materialised) {
        assert!(materialised > 1e-4 && blockwise < 1.5 * materialised, "{blockwise} {materialised}");
    }
}
