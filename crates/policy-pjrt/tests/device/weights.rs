//! Upload and export of weights.

use crate::checkpoint::{self, Checkpoint};
use crate::support::{assert_close, forward, runtime};
use policy_pjrt::decoder::Compute;
use policy_pjrt::{DeviceWeights, Error};
use stablehlo::Dtype;

#[test]
fn exported_weights_equal_the_uploaded_ones() {
    for name in checkpoint::ALL {
        let checkpoint = Checkpoint::open(name);
        let config = checkpoint.config();
        let weights = DeviceWeights::from_weights(runtime(), config, &checkpoint.weights, Dtype::F32).unwrap();
        let mut tensors = Vec::new();
        weights.export(&mut tensors).unwrap();
        let mut found: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        let mut expected: Vec<String> = config.parameters().into_iter().map(|parameter| parameter.name).collect();
        found.sort_unstable();
        expected.sort_unstable();
        assert_eq!(found, expected, "{name}");
        for tensor in &tensors {
            let stored = checkpoint.weights.tensor(&tensor.name).unwrap();
            assert_eq!(
                (&tensor.shape[..], &tensor.data),
                (stored.shape(), &stored.to_vec()),
                "{name}: {}",
                tensor.name
            );
        }
        // Again, with tensors in host memory as the source.
        let again = DeviceWeights::from_tensors(runtime(), config, &tensors, Dtype::F32).unwrap();
        let mut second = Vec::new();
        again.export(&mut second).unwrap();
        assert_eq!(tensors, second, "{name}");
    }
}

#[test]
fn bf16_weights_and_arithmetic_are_close_to_f32() {
    let checkpoint = Checkpoint::open("llama3_bf16");
    let (config, sequences) = (checkpoint.config(), checkpoint.sequences());
    let weights = DeviceWeights::from_weights(runtime(), config, &checkpoint.weights, Dtype::F32).unwrap();
    let narrow = weights.converted(Dtype::Bf16).unwrap();
    assert_eq!((narrow.dtype(), narrow.table()), (Dtype::Bf16, weights.table()));
    let (_, expected, _) = forward(config, &weights, Compute::F32, &sequences);
    // The file has bf16 numbers, so only the arithmetic rounds.
    let (_, found, _) = forward(config, &narrow, Compute::F32, &sequences);
    assert_eq!(found, expected);
    for weights in [&weights, &narrow] {
        let (_, found, _) = forward(config, weights, Compute::Bf16, &sequences);
        assert_close("bf16", &found, &expected, 3e-2);
        assert_ne!(found, expected);
    }
}

#[test]
fn weights_that_do_not_fit_are_errors() {
    let checkpoint = Checkpoint::open("qwen2");
    let (config, weights) = (checkpoint.config(), &checkpoint.weights);
    let error = DeviceWeights::from_weights(runtime(), config, weights, Dtype::F16).unwrap_err();
    assert!(error.to_string().contains("f32 or bf16") && error.to_string().contains("f16"), "{error}");
    let other = models::ModelConfig { num_hidden_layers: config.num_hidden_layers + 1, ..config.clone() };
    let error = DeviceWeights::from_weights(runtime(), &other, weights, Dtype::F32).unwrap_err();
    assert!(matches!(error, Error::Model(models::Error::MissingTensors { .. })), "{error}");
    let error = DeviceWeights::from_tensors(runtime(), config, &[], Dtype::F32).unwrap_err();
    assert!(error.to_string().contains("model.embed_tokens.weight"), "{error}");
}
