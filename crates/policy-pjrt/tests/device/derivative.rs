//! Gradients of the decoder, derived from its forward pass, against torch.

use crate::checkpoint::{self, Checkpoint};
use crate::support::{assert_close, runtime};
use pjrt::Argument;
use policy_pjrt::DeviceWeights;
use policy_pjrt::decoder::{Compute, Decoder, ParameterValues, Rows, parameters};
use stablehlo::{Builder, Dtype, Reducer, Save, TensorType, Value, trace};

/// Computes the cross-entropy of `targets` `[B, T]` under logits `[B, T, V]`, summed with `weights` `[B, T]`.
fn cross_entropy(logits: &Value, targets: &Value, weights: &Value) -> Value {
    let max = logits.reduce(Reducer::Max, &[2]);
    let shifted = logits - max.broadcast_in_dim(logits.shape(), &[0, 1]);
    let lse = shifted.exp().reduce(Reducer::Add, &[2]).log();
    let one_hot = targets.one_hot(logits.shape()[2], Dtype::F32);
    let target = (&shifted * one_hot).reduce(Reducer::Add, &[2]);
    ((lse - target) * weights).reduce(Reducer::Add, &[0, 1])
}

#[test]
fn gradients_of_every_parameter_match_torch() {
    let policies = [Save::Carry, Save::Every(2), Save::Products, Save::Everything];
    for (name, save) in checkpoint::ALL.into_iter().zip(policies.iter().cycle()) {
        let checkpoint = Checkpoint::open(name);
        let (config, sequences) = (checkpoint.config(), checkpoint.sequences());
        let weights = DeviceWeights::from_weights(runtime(), config, &checkpoint.weights, Dtype::F32).unwrap();
        let (b, t) = (sequences.len(), sequences.iter().map(Vec::len).max().unwrap());
        let (table, rows) = (parameters(config), TensorType::new(Dtype::I32, [b, t]));
        let mut types: Vec<TensorType> = table.iter().map(|p| TensorType::new(Dtype::F32, &p.shape[..])).collect();
        types.extend([rows.clone(), rows.clone(), rows.with_dtype(Dtype::F32)]);
        let loss = trace(&types, |_, values| {
            let (weights, rest) = values.split_at(table.len());
            let weights = ParameterValues::new(table.iter().map(|p| p.role).zip(weights.iter().cloned()));
            let decoder = Decoder::new(config, Compute::F32);
            let hidden = decoder.hidden(&weights, &Rows::of_sequences(&rest[0]), save.clone()).unwrap();
            vec![cross_entropy(&decoder.logits(&weights, &hidden), &rest[1], &rest[2])]
        })
        .unwrap();
        let f = Builder::new();
        let arguments: Vec<Value> = types.iter().map(|ty| f.argument("", ty.clone())).collect();
        let with_respect_to: Vec<usize> = (0..table.len()).collect();
        let (results, pullback) = f.vjp(&loss, &arguments.iter().collect::<Vec<_>>(), &with_respect_to).unwrap();
        let gradients = pullback.call(&[&results[0].like(1.0)]);
        let named: Vec<(&str, &Value)> = results.iter().chain(&gradients).map(|value| ("", value)).collect();
        let program = runtime().compile(&f.finish("gradient", &named).unwrap()).unwrap();

        let (mut ids, mut targets, mut mask) = (vec![0; b * t], vec![0; b * t], vec![0.0f32; b * t]);
        let tokens: usize = sequences.iter().map(|sequence| sequence.len() - 1).sum();
        for (row, sequence) in sequences.iter().enumerate() {
            for (column, id) in sequence.iter().enumerate() {
                ids[row * t + column] = *id as i32;
                if let Some(next) = sequence.get(column + 1) {
                    (targets[row * t + column], mask[row * t + column]) = (*next as i32, 1.0 / tokens as f32);
                }
            }
        }
        let ids = runtime().upload(&ids, &[b, t]).unwrap();
        let targets = runtime().upload(&targets, &[b, t]).unwrap();
        let mask = runtime().upload(&mask, &[b, t]).unwrap();
        let mut arguments = weights.arguments();
        arguments.extend([&ids, &targets, &mask].map(Argument::from));
        let outputs = program.run(arguments).unwrap();
        let (found, expected) =
            (outputs[0].to_vec::<f32>().unwrap()[0], checkpoint.expected.0["expected.loss"].data[0]);
        assert!((found - expected).abs() < 1e-5 * expected, "{name}: {found} {expected}");
        for (parameter, output) in table.iter().zip(&outputs[1..]) {
            let of = |name: &String| &checkpoint.expected.0[&format!("expected.grad.{name}")].data[..];
            let expected: Vec<f32> = parameter.hugging_face().iter().flat_map(of).copied().collect();
            assert_close(&format!("{name}: {}", parameter.name()), &output.to_vec().unwrap(), &expected, 1e-4);
        }
    }
}
