//! Every model family: logits match transformers, hidden states match the CPU policy.

use crate::checkpoint::{self, Checkpoint};
use crate::support::{assert_close, forward, runtime};
use pjrt::Argument;
use policy_cpu::decoder::PackedBatch;
use policy_pjrt::decoder::{Attention, Compute, Decoder, Rows};
use policy_pjrt::{DeviceWeights, Error, PjrtPolicy, PjrtPolicyOptions, RolloutOptions};
use stablehlo::{Builder, Dtype, Save, TensorType};
use std::num::NonZeroUsize;

#[test]
fn logits_match_transformers() {
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
fn logits_of_a_policy_match_transformers_with_and_without_cache() {
    for name in checkpoint::ALL {
        let checkpoint = Checkpoint::open(name);
        let sequences = checkpoint.sequences();
        let sequences: Vec<&[u32]> = sequences.iter().map(|ids| &ids[..]).collect();
        // Several calls of the decode loop, so that their windows are written to the cache.
        let rollout = RolloutOptions { tokens_per_call: 5, ..RolloutOptions::default() };
        let options = PjrtPolicyOptions { rollout, ..PjrtPolicyOptions::default() };
        let loss = grpo_core::LossConfig::default();
        let mut policy =
            PjrtPolicy::from_weights(runtime(), checkpoint.config(), &checkpoint.weights, loss, options).unwrap();
        let vocab = checkpoint.config().vocab_size;
        let none = || -> Vec<Vec<f32>> { sequences.iter().map(|ids| vec![f32::NAN; ids.len() * vocab]).collect() };
        let put = |all: &mut Vec<Vec<f32>>, sequence: usize, position: usize, logits: &[f32]| {
            let row = &mut all[sequence][position * vocab..][..logits.len()];
            assert!(row.iter().all(|x| x.is_nan()), "{name}: position {position} of {sequence} twice");
            row.copy_from_slice(logits);
        };
        let (mut whole, mut cached) = (none(), none());
        policy.logits(&sequences, |sequence, position, logits| put(&mut whole, sequence, position, logits)).unwrap();
        policy.cached_logits(&sequences, |i, position, logits| put(&mut cached, i, position, logits)).unwrap();
        for (i, ids) in sequences.iter().enumerate() {
            let expected = checkpoint.logits(i, ids.len());
            assert_close(&format!("{name}, sequence {i}"), &whole[i], expected, 1e-5);
            assert_close(&format!("{name}, sequence {i}, cached"), &cached[i], expected, 1e-5);
        }
    }
}

#[test]
fn logits_of_invalid_sequences_are_errors() {
    let checkpoint = Checkpoint::open("qwen2");
    let (config, loss) = (checkpoint.config(), grpo_core::LossConfig::default());
    let options = PjrtPolicyOptions::default();
    let mut policy = PjrtPolicy::from_weights(runtime(), config, &checkpoint.weights, loss, options).unwrap();
    let long = vec![0; config.max_position_embeddings + 1];
    for (sequences, words) in [
        (vec![], "an empty one"),
        (vec![&[1, 2][..], &[]], "an empty one"),
        (vec![&long[..]], "max_position_embeddings"),
        (vec![&[config.vocab_size as u32][..]], "vocab"),
    ] {
        let errors: [Error; 2] = [
            policy.logits(&sequences, |_, _, _| {}).unwrap_err(),
            policy.cached_logits(&sequences, |_, _, _| {}).unwrap_err(),
        ];
        assert!(errors.iter().all(|error| error.to_string().contains(words)), "{errors:?}");
    }
}

#[test]
fn hidden_states_match_the_cpu_policy() {
    for name in checkpoint::ALL {
        let checkpoint = Checkpoint::open(name);
        let (config, sequences) = (checkpoint.config(), checkpoint.sequences());
        let weights = DeviceWeights::from_weights(runtime(), config, &checkpoint.weights, Dtype::F32).unwrap();
        let (hidden, _, t) = forward(config, &weights, Compute::F32, &sequences);
        let device = burn::tensor::Device::flex();
        let host = policy_cpu::decoder::Decoder::from_weights(config, &checkpoint.weights, &device).unwrap();
        let expected = host.forward(&PackedBatch::new(&sequences).unwrap()).unwrap();
        let expected: Vec<f32> = expected.into_data().try_into_vec().unwrap();
        let h = config.hidden_size;
        let rows = sequences.iter().enumerate().flat_map(|(i, s)| &hidden[i * t * h..][..s.len() * h]);
        assert_close(name, &rows.copied().collect::<Vec<_>>(), &expected, 1e-5);
    }
}

#[test]
fn packed_sequences_do_not_attend_to_each_other() {
    let blockwise = Attention::Blockwise { block: NonZeroUsize::new(7).unwrap() };
    for (name, attention) in checkpoint::ALL.into_iter().zip([Attention::Materialised, blockwise].into_iter().cycle()) {
        let checkpoint = Checkpoint::open(name);
        let (config, sequences) = (checkpoint.config(), checkpoint.sequences());
        let weights = DeviceWeights::from_weights(runtime(), config, &checkpoint.weights, Dtype::F32).unwrap();
        let tokens: usize = sequences.iter().map(Vec::len).sum();
        let f = Builder::new();
        let decoder = Decoder::new(config, Compute::F32).with_attention(attention);
        let values = decoder.declare(&f, Dtype::F32);
        let [ids, positions] =
            ["ids", "positions"].map(|name| f.argument(name, TensorType::new(Dtype::I32, [1, tokens])));
        let rows = Rows { ids, positions, shared: true };
        let hidden = decoder.hidden(&values, &rows, Save::Carry).unwrap();
        let logits = decoder.logits(&values, &hidden);
        let program = runtime().compile(&f.finish("packed", &[("logits", &logits)]).unwrap()).unwrap();
        let numbered = |of: fn(usize, u32) -> i32| -> Vec<i32> {
            let rows = sequences.iter();
            rows.flat_map(|row| row.iter().enumerate().map(move |(j, id)| of(j, *id))).collect()
        };
        let columns = [numbered(|_, id| id as i32), numbered(|j, _| j as i32)];
        let columns = columns.map(|column| runtime().upload(&column, &[1, tokens]).unwrap());
        let mut arguments = weights.arguments();
        arguments.extend(columns.iter().map(Argument::from));
        let found: Vec<f32> = program.run_one(arguments).unwrap().to_vec().unwrap();
        let expected = sequences.iter().enumerate().flat_map(|(i, sequence)| checkpoint.logits(i, sequence.len()));
        assert_close(name, &found, &expected.copied().collect::<Vec<_>>(), 1e-5);
    }
}
