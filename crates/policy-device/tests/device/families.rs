//! Every family of models: logits are those of transformers, hidden states those of the host.

use crate::checkpoint::{self, Checkpoint};
use crate::support::{assert_close, forward, runtime};
use policy_burn::decoder::PackedBatch;
use policy_device::DeviceWeights;
use policy_device::decoder::Compute;
use stablehlo::Dtype;

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
