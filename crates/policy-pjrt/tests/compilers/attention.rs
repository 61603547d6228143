//! Attention, compiled for TPU.

use crate::compile_at;
use grpo_models::ModelConfig;
use grpo_pjrt::OptimizationLevel;
use grpo_policy_pjrt::decoder::{Attention, Compute, Decoder, Heads, Rows};
use grpo_stablehlo::{Builder, Dtype, TensorType, Value, trace};

/// Number of rows, large enough that activations exceed the on-chip memory.
const ROWS: usize = 8;

/// Returns the bytes of temporaries of attention and its derivative for one layer with rows of `length` tokens.
fn temporaries(length: usize, attention: Attention) -> u64 {
    let config = ModelConfig {
        num_attention_heads: 8,
        num_key_value_heads: 2,
        head_dim: Some(128),
        max_position_embeddings: length,
        ..ModelConfig::default()
    };
    let decoder = Decoder::new(&config, Compute::Bf16).with_attention(attention);
    let keys = TensorType::new(Dtype::Bf16, [ROWS, 2, length, 128]);
    let types = [TensorType::new(Dtype::Bf16, [ROWS, 2, 4, length, 128]), keys.clone(), keys];
    let attend = trace(&types, |f, a| {
        let rows = Rows::of_sequences(&f.splat(0, TensorType::new(Dtype::I32, [ROWS, length])));
        let heads = Heads { queries: a[0].clone(), keys: a[1].clone(), values: a[2].clone() };
        vec![decoder.attend(&heads, &decoder.mask(&rows, None), None)]
    })
    .expect("attention");
    let f = Builder::new();
    let a: Vec<Value> = types.iter().map(|ty| f.argument("", ty.clone())).collect();
    let (mixed, pullback) = f.vjp(&attend, &[&a[0], &a[1], &a[2]], &[0, 1, 2]).expect("a derivative");
    let cotangent = f.argument("cotangent", mixed[0].ty().clone());
    let gradients = pullback.call(&[&cotangent]);
    let named: Vec<(&str, &Value)> = mixed.iter().chain(&gradients).map(|value| ("", value)).collect();
    compile_at(&f.finish("attention", &named).expect("a program"), Some(OptimizationLevel::O0)).temp_bytes
}

#[test]
fn temporaries_of_blockwise_attention_grow_linearly() {
    let [short, long] = [2048, 4096].map(|length| temporaries(length, Attention::Auto));
    let all = temporaries(2048, Attention::Materialised);
    // f32 scores of all heads.
    assert!(all > (ROWS * 8 * 2048 * 2048 * 4) as u64, "{all}");
    assert!(2 * long < 5 * short && 4 * long < all, "{short} {long} {all}");
}
