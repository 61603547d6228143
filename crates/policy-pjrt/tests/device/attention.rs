//! The accuracy of blockwise attention in bf16, against materialised attention.

use crate::support::{blocks_of, runtime};
use grpo_models::ModelConfig;
use grpo_policy_pjrt::decoder::{Attention, Compute, Decoder, Heads, Rows};
use grpo_policy_pjrt::{Argument, DeviceTensor};
use grpo_stablehlo::{Builder, Dtype, TensorType, Value, trace};

/// Returns the attention output of rows with several sequences, and the gradients of queries, keys and values.
fn evaluate(attention: Attention, compute: Compute) -> Vec<Vec<f32>> {
    let [rows, kv, group, length, width] = [2, 2, 3, 37, 16];
    let config = ModelConfig {
        num_attention_heads: kv * group,
        num_key_value_heads: kv,
        head_dim: Some(width),
        ..ModelConfig::default()
    };
    let decoder = Decoder::new(&config, compute).with_attention(attention);
    let (queries, keys) = (vec![rows, kv, group, length, width], vec![rows, kv, length, width]);
    let shapes = [queries, keys.clone(), keys, vec![rows, length, kv * group * width]];
    let types = shapes.each_ref().map(|shape| TensorType::new(Dtype::F32, &shape[..]));
    let attend = trace(&types[..3], |f, a| {
        let [queries, keys, values] = [0, 1, 2].map(|i: usize| a[i].convert(compute.dtype()));
        let ids = TensorType::new(Dtype::I32, [rows, length]);
        // Sequences of various lengths, different in every row.
        let sequence = |row: usize, token: usize| ((token + 3 * row) as f64 / 2.0).sqrt() as usize;
        let position = |i: usize| {
            let (row, token) = (i / length, i % length);
            (0..token).filter(|earlier| sequence(row, *earlier) == sequence(row, token)).count() as i64
        };
        let positions = f.dense((0..rows * length).map(position), ids.clone());
        let rows = Rows { positions, ids: f.splat(0, ids), shared: true, counted: None, routed: None };
        vec![decoder.attend(&Heads { queries, keys, values }, &decoder.mask(&rows, None), None)]
    })
    .unwrap();
    let f = Builder::new();
    let a = types.map(|ty| f.argument("", ty));
    let (mixed, pullback) = f.vjp(&attend, &[&a[0], &a[1], &a[2]], &[0, 1, 2]).unwrap();
    let gradients = pullback.call(&[&a[3]]);
    let named: Vec<(&str, &Value)> = mixed.iter().chain(&gradients).map(|value| ("", value)).collect();
    let program = runtime().compile(&f.finish("attention", &named).unwrap()).unwrap();
    let tensors: Vec<DeviceTensor> = shapes.iter().enumerate().map(|(seed, shape)| upload(shape, seed)).collect();
    let outputs = program.run(tensors.iter().map(Argument::from).collect()).unwrap();
    outputs.iter().map(|output| output.read("a result").unwrap()).collect()
}

/// Uploads pseudo-random numbers between -2 and 2.
fn upload(shape: &[usize], seed: usize) -> DeviceTensor {
    let number = |i: usize| {
        let mut z = ((i + 1_000_003 * seed) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((z >> 40) as f32 / (1 << 24) as f32).mul_add(4.0, -2.0)
    };
    let numbers: Vec<f32> = (0..shape.iter().product()).map(number).collect();
    runtime().upload(&numbers, shape).unwrap()
}

#[test]
fn blockwise_attention_in_bf16_is_as_accurate_as_materialised_attention() {
    let exact = evaluate(Attention::Materialised, Compute::F32);
    let off = |attention| {
        let of_rounded = evaluate(attention, Compute::Bf16);
        let share = |(rounded, exact): (&Vec<f32>, &Vec<f32>)| {
            let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x * x)).sum::<f64>();
            let off = squares(&mut rounded.iter().zip(exact).map(|(a, b)| a - b));
            (off / squares(&mut exact.iter().copied())).sqrt()
        };
        of_rounded.iter().zip(&exact).map(share).collect::<Vec<f64>>()
    };
    for (blockwise, materialised) in off(blocks_of(8)).into_iter().zip(off(Attention::Materialised)) {
        assert!(materialised > 1e-4 && blockwise < 1.5 * materialised, "{blockwise} {materialised}");
    }
}
