//! Every family of models: logits are those of transformers, hidden states those of the host.

use crate::checkpoint::{self, Checkpoint};
use crate::support::{assert_close, forward, runtime};
use pjrt::Argument;
use policy_burn::decoder::PackedBatch;
use policy_device::DeviceWeights;
use policy_device::decoder::{Compute, Decoder, Rows};
use stablehlo::{Builder, Dtype, Save, TensorType};

#[test]
fn logits_are_those_of_transformers() {
    for name in checkpoint::ALL {
        let checkpoint = Checkpoint::open(name);
        let (config, sequences) = (checkpoint.config(), checkpoint.sequences());
        let weights = DeviceWeights::from_weights(runtime(), config, &checkpoint.weights, Dtype::F32).unwrap();
        let (_, logits, t) = forward(config, &weights, Compute::F32, &sequences);
        let vocab = config.vocab_size;
        for (i, sequence) in sequences.iter().enumerate() {
            let found = &logits[i * t * vocab..][..sequence.len() * vocab];
            let expected = checkpoint.logits(i, sequence.len());
            assert_close(&format!("{name}, sequence {i}"), found, expected, 1e-5);
        }
    }
}

#[test]
fn hidden_states_are_those_of_the_host() {
    for name in checkpoint::ALL {
        let checkpoint = Checkpoint::open(name);
        let (config, sequences) = (checkpoint.config(), checkpoint.sequences());
        let weights = DeviceWeights::from_weights(runtime(), config, &checkpoint.weights, Dtype::F32).unwrap();
        let (hidden, _, t) = forward(config, &weights, Compute::F32, &sequences);
        let device = burn::tensor::Device::flex();
        let host = policy_burn::decoder::Decoder::from_weights(config, &checkpoint.weights, &device).unwrap();
        let expected = host.forward(&PackedBatch::new(&sequences).unwrap()).unwrap();
        let expected: Vec<f32> = expected.into_data().try_into_vec().unwrap();
        let h = config.hidden_size;
        let rows = sequences.iter().enumerate().flat_map(|(i, s)| &hidden[i * t * h..][..s.len() * h]);
        assert_close(name, &rows.copied().collect::<Vec<_>>(), &expected, 1e-5);
    }
}

#[test]
fn sequences_in_one_row_do_not_see_each_other() {
    let checkpoint = Checkpoint::open("qwen3");
    let (config, sequences) = (checkpoint.config(), checkpoint.sequences());
    let weights = DeviceWeights::from_weights(runtime(), config, &checkpoint.weights, Dtype::F32).unwrap();
    let tokens: usize = sequences.iter().map(Vec::len).sum();
    let f = Builder::new();
    let values = DeviceWeights::declare(&f, config, Dtype::F32);
    let [ids, positions, segments] =
        ["ids", "positions", "segments"].map(|name| f.argument(name, TensorType::new(Dtype::I32, [1, tokens])));
    let rows = Rows { ids, positions, segments: Some(segments) };
    let decoder = Decoder::new(config, Compute::F32);
    let hidden = decoder.hidden(&values, &rows, Save::Carry).unwrap();
    let logits = decoder.logits(&values, &hidden);
    let program = runtime().compile(&f.finish("packed", &[("logits", &logits)]).unwrap()).unwrap();
    let numbered = |of: fn(usize, usize, u32) -> i32| -> Vec<i32> {
        let rows = sequences.iter().enumerate();
        rows.flat_map(|(i, row)| row.iter().enumerate().map(move |(j, id)| of(i, j, *id))).collect()
    };
    let columns = [numbered(|_, _, id| id as i32), numbered(|_, j, _| j as i32), numbered(|i, _, _| i as i32)];
    let columns = columns.map(|column| runtime().upload(&column, &[1, tokens]).unwrap());
    let mut arguments = weights.arguments();
    arguments.extend(columns.iter().map(Argument::from));
    let found: Vec<f32> = program.run_one(arguments).unwrap().to_vec().unwrap();
    let expected = sequences.iter().enumerate().flat_map(|(i, sequence)| checkpoint.logits(i, sequence.len()));
    assert_close("packed", &found, &expected.copied().collect::<Vec<_>>(), 1e-5);
}
