//! Attention through the TPU compiler.

use crate::compile;
use models::ModelConfig;
use policy_device::decoder::{Attention, Compute, Decoder, Heads, Rows};
use stablehlo::{Builder, Dtype, TensorType, Value, trace};

/// Temporaries of the derivative of one layer's attention in a row of `length` tokens.
fn temporaries(length: usize, attention: Attention) -> i64 {
    let config = ModelConfig {
        num_attention_heads: 8,
        num_key_value_heads: 2,
        head_dim: Some(128),
        max_position_embeddings: length,
        ..ModelConfig::default()
    };
    let decoder = Decoder::new(&config, Compute::Bf16).with_attention(attention);
    let keys = TensorType::new(Dtype::Bf16, [1, length, 2, 128]);
    let types = [TensorType::new(Dtype::Bf16, [1, length, 2, 4, 128]), keys.clone(), keys];
    let attend = trace(&types, |f, a| {
        let rows = Rows::of_sequences(&f.splat(0, TensorType::new(Dtype::I32, [1, length])));
        let heads = Heads { queries: a[0].clone(), keys: a[1].clone(), values: a[2].clone() };
        vec![decoder.attend(&heads, &decoder.mask(&rows))]
    })
    .expect("attention");
    let f = Builder::new();
    let a: Vec<Value> = types.iter().map(|ty| f.argument("", ty.clone())).collect();
    let (mixed, pullback) = f.vjp(&attend, &[&a[0], &a[1], &a[2]], &[0, 1, 2]).expect("a derivative");
    let cotangent = f.argument("cotangent", mixed[0].ty().clone());
    let gradients = pullback.call(&[&cotangent]);
    let named: Vec<(&str, &Value)> = mixed.iter().chain(&gradients).map(|value| ("", value)).collect();
    compile(&f.finish("attention", &named).expect("a program")).temp
}

#[test]
fn temporaries_of_blocks_grow_with_the_length_not_with_its_square() {
    let lengths = [2048, 4096];
    let [short, long] = lengths.map(|length| temporaries(length, Attention::Auto));
    let [all_short, all_long] = lengths.map(|length| temporaries(length, Attention::Materialised));
    println!("temporaries of {lengths:?} tokens: {short} {long} in blocks, {all_short} {all_long} of all pairs");
    // The scores of all heads, in f32.
    assert!(all_short > 8 * 2048 * 2048 * 4 && all_long > 3 * all_short, "{all_short} {all_long}");
    assert!(2 * long < 5 * short && 8 * short < all_short, "{short} {long} {all_short}");
}
