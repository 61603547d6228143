//! The memory of compiled derivatives on TPUs, by [`Save`] policy.

use crate::compile_text;
use crate::operations::cases::transformer;
use grpo_pjrt::{CompileOptions, OptimizationLevel};
use grpo_stablehlo::{
    Builder, DotDimensions, Dtype, Precision, Reducer, Save, TensorType, Traced, Unary, Value, trace,
};

const LAYERS: usize = 6;
const HIDDEN: usize = 512;
const MLP: usize = 2048;

fn ty(dtype: Dtype, shape: &[usize]) -> TensorType {
    TensorType::new(dtype, shape)
}

fn product(x: &Value, weight: &Value) -> Value {
    let weight = weight.convert(Dtype::Bf16);
    x.dot_general(&weight, DotDimensions::contract(1, 0), Dtype::Bf16, Precision::Default)
}

/// A gated feed-forward layer with f32 weights and bf16 arithmetic.
fn layer(rows: usize) -> Traced {
    let (hidden, up, down) =
        (ty(Dtype::Bf16, &[rows, HIDDEN]), ty(Dtype::F32, &[HIDDEN, MLP]), ty(Dtype::F32, &[MLP, HIDDEN]));
    trace(&[hidden, up.clone(), up, down], |_, a| {
        let gate = product(&a[0], &a[1]);
        let gated = &gate * gate.unary(Unary::Logistic) * product(&a[0], &a[2]);
        vec![&a[0] + product(&gated, &a[3])]
    })
    .expect("a layer")
}

fn shapes(layers: usize, rows: usize) -> Vec<TensorType> {
    let weights = [[layers, HIDDEN, MLP], [layers, HIDDEN, MLP], [layers, MLP, HIDDEN]];
    let weights = weights.iter().map(|shape| ty(Dtype::F32, shape));
    std::iter::once(ty(Dtype::Bf16, &[rows, HIDDEN])).chain(weights).collect()
}

/// Returns the bytes of temporaries of a program that computes the gradients of the weights of all layers.
fn temporaries(layers: usize, rows: usize, body: impl FnOnce(&Builder, &[Value]) -> Value) -> i64 {
    let types = shapes(layers, rows);
    let loss = trace(&types, |f, a| {
        let out = body(f, a).convert(Dtype::F32);
        vec![(&out * &out).reduce(Reducer::Add, &[0, 1])]
    })
    .expect("a loss");
    let f = Builder::new();
    let a: Vec<Value> = types.iter().map(|ty| f.argument("", ty.clone())).collect();
    let (results, pullback) = f.vjp(&loss, &a.iter().collect::<Vec<_>>(), &[1, 2, 3]).expect("a derivative");
    let found = pullback.call(&[&results[0].like(1.0)]);
    let named: Vec<(&str, &Value)> = results.iter().chain(&found).map(|v| ("", v)).collect();
    let program = f.finish("gradients", &named).expect("a program").to_string();
    temp(&program)
}

/// Compiles without optimisations, which suffices for memory.
fn temp(program: &str) -> i64 {
    let options = CompileOptions { optimization_level: Some(OptimizationLevel::O0), ..CompileOptions::default() };
    compile_text(program, options).memory_stats().expect("memory statistics").temp
}

/// Returns the bytes of one hidden activation of the feed-forward layer.
fn wide(rows: usize) -> i64 {
    (rows * MLP * 2) as i64
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn scan_memory_follows_the_save_policy() {
    let layer = layer(2048);
    let held = |save: Save| {
        temporaries(LAYERS, 2048, |f, a| {
            f.scan(LAYERS, &layer, &[&a[0]], &[&a[1], &a[2], &a[3]], &[], save).carry[0].clone()
        })
    };
    let (layers, wide) = (LAYERS as i64, wide(2048));
    let (carry, products, everything) = (held(Save::Carry), held(Save::Products), held(Save::Everything));
    println!("temporaries: {carry} carry, {products} products, {everything} everything");
    // The inputs of all layers, and the activations of one layer.
    assert!(carry < layers * wide / 4 + 5 * wide, "{carry}");
    // In addition, two wide products per layer.
    assert!(products > 2 * layers * wide && products < 3 * layers * wide, "{products}");
    assert!(everything > 4 * layers * wide, "{everything}");
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_decoder_saves_only_layer_inputs() {
    let sizes = transformer::Sizes {
        batch: 2,
        length: 1024,
        hidden: 1024,
        heads: 8,
        mlp: 4096,
        vocabulary: 512,
        layers: 4,
        stored: Dtype::F32,
        computed: Dtype::Bf16,
    };
    let held = |save: Save| {
        let gradient = transformer::gradient(sizes, save);
        let f = Builder::new();
        let a: Vec<Value> = sizes.types().into_iter().map(|ty| f.argument("", ty)).collect();
        let results = f.call(&gradient, &a.iter().collect::<Vec<_>>());
        let named: Vec<(&str, &Value)> = results.iter().map(|v| ("", v)).collect();
        temp(&f.finish("gradients", &named).expect("a program").to_string())
    };
    let (carry, everything) = (held(Save::Carry), held(Save::Everything));
    println!("temporaries: {carry} carry, {everything} everything");
    // Attention scores in f32; `Everything` saves several per layer.
    let scores = (sizes.batch * sizes.heads * sizes.length * sizes.length * 4) as i64;
    assert!(carry + sizes.layers as i64 * scores < everything, "{carry} {everything}");
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn accumulated_gradients_need_no_second_copy() {
    let (layer, types) = (layer(2048), shapes(LAYERS, 2048));
    let loss = trace(&types, |f, a| {
        let scanned = f.scan(LAYERS, &layer, &[&a[0]], &[&a[1], &a[2], &a[3]], &[], Save::Carry);
        let out = scanned.carry[0].convert(Dtype::F32);
        vec![(&out * &out).reduce(Reducer::Add, &[0, 1])]
    })
    .expect("a loss");
    let held = |in_place: bool| {
        let f = Builder::new();
        let a: Vec<Value> = types.iter().map(|ty| f.argument("", ty.clone())).collect();
        let sums: Vec<Value> = types[1..].iter().map(|ty| f.argument("", ty.clone())).collect();
        sums.iter().enumerate().for_each(|(i, sum)| f.alias(sum, i));
        let (results, pullback) = f.vjp(&loss, &a.iter().collect::<Vec<_>>(), &[1, 2, 3]).expect("a derivative");
        let one = results[0].like(1.0);
        let sums = match in_place {
            true => pullback.add_to(&[&one], &sums.iter().collect::<Vec<_>>()),
            false => pullback.call(&[&one]).iter().zip(&sums).map(|(gradient, sum)| gradient + sum).collect(),
        };
        let named: Vec<(&str, &Value)> = sums.iter().map(|v| ("", v)).collect();
        temp(&f.finish("sums", &named).expect("a program").to_string())
    };
    let (in_place, apart) = (held(true), held(false));
    println!("temporaries: {in_place} in place, {apart} apart");
    let gradients: usize = types[1..].iter().map(TensorType::bytes).sum();
    assert!(in_place + gradients as i64 / 2 < apart, "{in_place} {apart}");
}
