//! Routing, and products in blocks against dense products, in the interpreter.

use super::{ExpertProducts, RouterCounts, RouterSums, Routing, choose};
use crate::decoder::{Adapters, AxisRules, Compute, Decoder, Parameter, ParameterValues, Role};
use grpo_models::{ClampedSwiglu, Experts, LoraConfig, ModelConfig, TargetModules};
use grpo_stablehlo::{Array, Builder, Dtype, Reducer, TensorType, Value};
use std::num::NonZeroUsize;

fn weights(logits: &[f64], top: usize, normalised: bool) -> Vec<f64> {
    let ty = TensorType::new(Dtype::F32, [1, 1, logits.len()]);
    let f = Builder::new();
    let argument = f.argument("logits", ty);
    let result = super::weights(&argument, &choose(&argument, top), normalised);
    let module = f.finish("route", &[("weights", &result)]).unwrap();
    let logits = Array::floats(Dtype::F32, [1, 1, logits.len()], logits.iter().copied()).unwrap();
    module.interpret(&[logits]).unwrap()[0].to_floats()
}

#[test]
fn ties_go_to_the_lowest_index() {
    assert_eq!(weights(&[1.0, 3.0, 1.0, 1.0, 3.0], 3, true)[2..4], [0.0, 0.0]);
    assert_eq!(weights(&[0.0; 4], 2, true), [0.5, 0.5, 0.0, 0.0]);
    assert_eq!(weights(&[0.0; 4], 2, false), [0.25, 0.25, 0.0, 0.0]);
    assert_eq!(weights(&[0.0; 4], 4, true), [0.25; 4]);
}

/// The first token has no recorded experts, the second one has others than the router chooses, with far lower logits, and the third one has the same.
#[test]
fn recorded_experts_replace_the_choice_of_a_router() {
    let f = Builder::new();
    let logits = f.argument("logits", TensorType::new(Dtype::F32, [1, 3, 4]));
    let routed = f.argument("routed", TensorType::new(Dtype::I32, [1, 3, 2]));
    let own = choose(&logits, 2);
    let (chosen, differs) = super::replayed(&own, &routed);
    let ids = Routing { logits: logits.clone(), chosen: chosen.clone(), differs: None }.ids(2);
    let weights = super::weights(&super::of_chosen(&logits, &chosen), &chosen, true);
    let results = [("chosen", &chosen), ("differs", &differs), ("weights", &weights), ("ids", &ids)];
    let module = f.finish("replay", &results).unwrap();
    let rows = [[1.0, 3.0, 2.0, 0.0], [900.0, 800.0, 1.0, 1.0], [0.0, 5.0, 0.0, 5.0]];
    let logits = Array::floats(Dtype::F32, [1, 3, 4], rows.concat()).unwrap();
    let routed = Array::ints(Dtype::I32, [1, 3, 2], [-1, -1, 3, 2, 3, 1]).unwrap();
    let found = module.interpret(&[logits, routed]).unwrap();
    assert_eq!(found[0].to_floats(), [0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0]);
    assert_eq!(found[1].to_floats(), [0.0, 1.0, 0.0]);
    assert_eq!(found[2].to_floats()[4..], [0.0, 0.0, 0.5, 0.5, 0.0, 0.5, 0.0, 0.5]);
    assert_eq!(found[3].to_ints(), [1, 2, 0, 1, 1, 3]);
}

/// Two rows of two tokens, the last one padding, and two layers with the same logits.
#[test]
fn the_load_balancing_loss_counts_tokens_without_padding() {
    let f = Builder::new();
    let logits = f.argument("logits", TensorType::new(Dtype::F32, [2, 2, 3]));
    let counted = f.argument("counted", TensorType::new(Dtype::F32, [2, 2]));
    let routing = Routing { chosen: choose(&logits, 1), logits, differs: None };
    let experts = Experts { num_experts: 3, num_experts_per_tok: 1, ..Experts::default() };
    let config = ModelConfig { experts: Some(experts), num_hidden_layers: 2, ..ModelConfig::default() };
    let decoder = Decoder::new(&config, Compute::F32).with_router_aux_loss();
    let counts = RouterCounts::new(&decoder, &counted, false).unwrap();
    let counts = counts.with(&routing, &counted).with(&routing, &counted);
    let sums = RouterSums::new(&counts, &counted, None);
    let RouterSums { tokens, aux_loss, .. } = sums;
    let module = f.finish("sums", &[("tokens", &tokens), ("aux_loss", &aux_loss.unwrap())]).unwrap();
    let two = 2_f64.ln();
    let logits = [[0.0, 0.0, two], [two, 0.0, 0.0], [two, 0.0, 0.0], [9.0, 9.0, 9.0]];
    let counted = Array::floats(Dtype::F32, [2, 2], [1.0, 1.0, 1.0, 0.0]).unwrap();
    let all = Array::floats(Dtype::F32, [2, 2, 3], logits.concat()).unwrap();
    let found = module.interpret(&[all, counted]).unwrap();
    assert_eq!(found[0].to_floats(), [2.0, 0.0, 1.0, 2.0, 0.0, 1.0]);
    // f = [2/3, 0, 1/3] and P = [5/12, 1/4, 1/3], so the loss is 3 (10/36 + 1/9).
    assert!((found[1].to_floats()[0] - 7.0 / 6.0).abs() < 1e-6, "{:?}", found[1].to_floats());
}

/// A case of routing: the number of experts, the experts of a token, rows and tokens of a batch, and whether the router has zeros only, so that
/// all tokens choose the first experts.
#[derive(Clone, Copy, Debug)]
struct Case {
    experts: usize,
    top: usize,
    shape: [usize; 2],
    all_equal: bool,
}

const HIDDEN: usize = 3;
const WIDTH: usize = 2;

/// Returns the outputs of a layer's experts and their gradients with respect to the input and all parameters, with adapters if `is_adapted`.
fn outputs(case: Case, clamped: Option<ClampedSwiglu>, products: ExpertProducts, is_adapted: bool) -> Vec<Vec<f64>> {
    let Case { experts: num_experts, top, shape: [b, t], all_equal } = case;
    let experts =
        Experts { num_experts, num_experts_per_tok: top, moe_intermediate_size: WIDTH, clamped, ..Experts::default() };
    let config = ModelConfig {
        experts: Some(experts),
        hidden_size: HIDDEN,
        num_attention_heads: 1,
        num_key_value_heads: 1,
        num_hidden_layers: 1,
        ..ModelConfig::default()
    };
    let decoder = Decoder::new(&config, Compute::F32).with_expert_products(products);
    let lora = LoraConfig {
        r: 2,
        target_modules: TargetModules::Names(vec![]),
        target_parameters: ["experts.gate_up_proj", "experts.down_proj"].map(String::from).to_vec(),
        ..LoraConfig::default()
    };
    let decoder = match is_adapted {
        true => decoder.with_adapters(Adapters::new(&config, &lora).unwrap()),
        false => decoder,
    };
    let is_mlp = |role: Role| role.is_of_experts() || matches!(role, Role::Router | Role::RouterBias);
    let table: Vec<Parameter> = decoder.parameters().into_iter().filter(|p| is_mlp(p.role)).collect();
    let of_layer = |p: &Parameter| TensorType::new(Dtype::F32, &p.shape[1..]);
    let types = [TensorType::new(Dtype::F32, [b, t, HIDDEN])].into_iter().chain(table.iter().map(of_layer));
    let types: Vec<TensorType> = types.collect();
    let loss = grpo_stablehlo::trace(&types, |f, values| {
        let layer = ParameterValues::new(table.iter().map(|p| p.id()).zip(values[1..].iter().cloned()));
        let (y, _) = decoder.experts(&layer, &values[0], None).unwrap();
        let factors = f.dense((0..y.ty().elements()).map(|i| (i % 7) as f64 - 2.5), y.ty().clone());
        vec![(&y * factors).reduce(Reducer::Add, &[0, 1, 2]), y]
    });
    let f = Builder::new();
    let arguments: Vec<Value> = types.iter().map(|ty| f.argument("", ty.clone())).collect();
    let arguments: Vec<&Value> = arguments.iter().collect();
    let all: Vec<usize> = (0..types.len()).collect();
    let (results, gradients) = f.value_and_grad(&loss.unwrap(), &arguments, &all).unwrap();
    let named: Vec<(&str, &Value)> = results.iter().chain(&gradients).map(|value| ("", value)).collect();
    let module = f.finish("experts", &named).unwrap();
    let array = |(n, ty): (usize, &TensorType)| {
        let is_router = n > 0 && !table[n - 1].role.is_of_experts();
        let number = |i: usize| match all_equal && is_router {
            true => 0.0,
            false => ((i * 37 + 11 + 1000 * n) % 101) as f64 / 50.0 - 1.0,
        };
        Array::floats(ty.dtype, &ty.shape[..], (0..ty.elements()).map(number)).unwrap()
    };
    let arguments: Vec<Array> = types.iter().enumerate().map(array).collect();
    module.interpret(&arguments).unwrap().iter().map(Array::to_floats).collect()
}

#[test]
fn grouped_products_match_dense_products() {
    let case = |experts, top, shape, all_equal| Case { experts, top, shape, all_equal };
    let cases = [
        case(4, 2, [2, 5], false),
        case(4, 1, [2, 5], true),
        // Ties: all tokens choose the first two of four experts.
        case(4, 2, [1, 7], true),
        case(1, 1, [1, 6], false),
        case(3, 3, [2, 3], false),
        // Two chunks of tokens.
        case(2, 1, [1, 300], false),
    ];
    for case in cases {
        let both = [None, Some(ClampedSwiglu::default())].into_iter();
        for (clamped, is_adapted) in both.flat_map(|clamped| [(clamped, false), (clamped, true)]) {
            let expected = outputs(case, clamped, ExpertProducts::Dense, is_adapted);
            for rows in [1, 3, 64] {
                let rows = NonZeroUsize::new(rows);
                let found = outputs(case, clamped, ExpertProducts::Grouped { rows }, is_adapted);
                let pairs = found.iter().flatten().zip(expected.iter().flatten());
                for (found, expected) in pairs {
                    let is_near = (found - expected).abs() < 1e-5 * (1.0 + expected.abs());
                    assert!(is_near, "{case:?}, {clamped:?}, {rows:?}, {is_adapted}: {found} {expected}");
                }
            }
        }
    }
}

/// Experts of Qwen3-30B-A3B and gpt-oss-20b.
#[test]
fn blocks_have_the_rows_with_the_least_time() {
    let of = |products: ExpertProducts, experts: usize, top: usize, tokens: usize| {
        let experts = Experts { num_experts: experts, num_experts_per_tok: top, ..Experts::default() };
        products.blocks(tokens, &experts, &AxisRules::default()).map(|blocks| blocks.rows)
    };
    let grouped = ExpertProducts::Grouped { rows: None };
    assert_eq!(of(grouped, 128, 8, 8192), Some(512));
    assert_eq!(of(grouped, 32, 4, 8192), Some(512));
    assert_eq!(of(grouped, 128, 8, 1), Some(8));
    assert_eq!(of(ExpertProducts::Grouped { rows: NonZeroUsize::new(3) }, 128, 8, 8192), Some(3));
    assert_eq!(of(ExpertProducts::Dense, 128, 8, 8192), None);
}
