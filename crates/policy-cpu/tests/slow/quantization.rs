//! LoRA on quantised weights: results are those of the dequantised weights, and only the adapter is written.

use crate::checkpoint::Checkpoint;
use crate::support::{accumulate, assert_close, logits, policy_loss};
use burn::tensor::Device;
use grpo_models::{
    Dtype, Experts, ExportOptions, FolderWriter, LoraConfig, Quantization, QuantizedMatrix, TargetModules,
};
use grpo_models::{ModelConfig, Weights as Files};
use grpo_policy::{
    OptimizerSettings, Policy, PolicyState, SequenceBatch, StateGroup, StepLoss, Weights, export_all, token_batch,
};
use grpo_policy_cpu::CpuPolicy;
use grpo_policy_cpu::decoder::Decoder;

const ALL: [Quantization; 2] = [Quantization::Int8, Quantization::Nf4];

fn all_linear() -> LoraConfig {
    LoraConfig { r: 3, target_modules: TargetModules::Pattern("all-linear".into()), ..Default::default() }
}

/// Writes the weights of a checkpoint with dequantised matrices of layers.
fn dequantized(checkpoint: &Checkpoint, quantization: Quantization) -> (tempfile::TempDir, Files) {
    let config = checkpoint.config();
    let place = tempfile::tempdir().unwrap();
    let target = place.path().join("model");
    let options = ExportOptions { dtype: Dtype::F32, ..ExportOptions::default() };
    let mut writer = FolderWriter::create(&target, config, None, options).unwrap();
    let matrices = |layer: usize| config.layer_matrices(layer).into_iter().map(move |of| (layer, of.name));
    let names: Vec<String> = (0..config.num_hidden_layers)
        .flat_map(matrices)
        .map(|(layer, name)| format!("model.layers.{layer}.{name}.weight"))
        .collect();
    for parameter in config.parameters() {
        let tensor = checkpoint.weights.tensor(&parameter.name).unwrap();
        let values = match names.contains(&parameter.name) {
            true => {
                let shape = parameter.shape[..].try_into().unwrap();
                let matrix = QuantizedMatrix::new(quantization, &tensor.to_vec(), shape);
                assert_ne!(matrix.dequantized(), tensor.to_vec(), "{}", parameter.name);
                matrix.dequantized()
            }
            false => tensor.to_vec(),
        };
        writer.write(&parameter.name, &values).unwrap();
    }
    writer.finish().unwrap();
    let weights = Files::open(&target).unwrap();
    (place, weights)
}

fn quantized(checkpoint: &Checkpoint, quantization: Quantization) -> CpuPolicy {
    let (config, weights) = (checkpoint.config(), &checkpoint.weights);
    CpuPolicy::quantized_with_lora(config, weights, quantization, &all_linear(), 7, policy_loss()).unwrap()
}

/// Scores, gradients and updates of a family's quantised model equal those of the model with the dequantised values, bit for bit.
#[test]
fn training_on_quantised_weights_equals_training_on_their_dequantised_values() {
    for name in ["llama3_bf16", "qwen2", "qwen3_f16", "phi3", "gemma3", "gemma4", "olmo3", "qwen3_5", "qwen3_vl"] {
        let checkpoint = Checkpoint::open(name);
        for quantization in ALL {
            let (_place, weights) = dequantized(&checkpoint, quantization);
            let plain = CpuPolicy::mapped_with_lora(checkpoint.config(), &weights, &all_linear(), 7, policy_loss());
            let mut policies = [quantized(&checkpoint, quantization), plain.unwrap()];
            let sequences = checkpoint.completions();
            let tokens = token_batch(&sequences).unwrap().with_advantages(vec![1.0; sequences.len()]).unwrap();
            let of = |policy: &mut CpuPolicy| {
                policy.freeze_ref_policy().unwrap();
                let batch = || SequenceBatch { routed_experts: &[], sequences: &sequences, tokens: tokens.clone() };
                let old = policy.score(Weights::Policy, &[batch()]).unwrap();
                policy.accumulate(&[batch()], StepLoss::Grpo).unwrap();
                policy.apply(0.01).unwrap();
                let new = [Weights::Policy, Weights::RefPolicy].map(|of| policy.score(of, &[batch()]).unwrap());
                assert_ne!(old.logp, new[0].logp, "{name}: adapters are trained");
                assert_eq!(old.logp, new[1].logp, "{name}: and the base is not");
                let (_, gradients) = accumulate(policy, &checkpoint);
                let mut adapter = Vec::new();
                policy.export_adapter(&mut adapter).unwrap();
                (old, new, gradients, adapter)
            };
            let [found, expected] = policies.each_mut().map(of);
            assert!(found == expected, "{name}: {quantization:?}");
            // Sampling merges the adapters into weights that are not quantised.
            let all = checkpoint.sequences();
            let all: Vec<&[u32]> = all.iter().map(Vec::as_slice).collect();
            let [found, expected] = policies.each_ref().map(|policy| {
                let mut logits = Vec::new();
                policy.cached_logits(&all, |_, _, of_token| logits.extend_from_slice(of_token)).unwrap();
                logits
            });
            assert_close(&format!("{name}: {quantization:?}: logits over a cache"), &found, &expected);
        }
    }
}

#[test]
fn quantised_weights_differ_from_those_of_the_files() {
    let checkpoint = Checkpoint::open("llama3");
    let (config, weights, device) = (checkpoint.config(), &checkpoint.weights, Device::flex());
    let exact = logits(&Decoder::mapped(config, weights, &device).unwrap(), &checkpoint.sequences());
    let largest = exact.iter().fold(0f32, |largest, logit| largest.max(logit.abs()));
    let off = ALL.map(|quantization| {
        let decoder = Decoder::quantized(config, weights, quantization, &device).unwrap();
        assert!(decoder.is_quantized());
        let found = logits(&decoder, &checkpoint.sequences());
        found.iter().zip(&exact).map(|(found, exact)| (found - exact).abs()).fold(0.0, f32::max) / largest
    });
    assert!(0.0 < off[0] && off[0] < 0.1, "int8: {off:?}");
    assert!(4.0 * off[0] < off[1], "nf4 is less precise: {off:?}");
}

#[test]
fn checkpoints_of_quantised_policies_have_only_the_adapter_and_restore_bit_for_bit() {
    let checkpoint = Checkpoint::open("qwen3");
    for quantization in ALL {
        let mut policy = quantized(&checkpoint, quantization);
        accumulate(&mut policy, &checkpoint);
        policy.apply(0.01).unwrap();
        let weights = export_all(&policy, StateGroup::Weights(Weights::Policy)).unwrap();
        assert!(weights.iter().all(|tensor| tensor.name.contains("lora_")));
        let optimizer = export_all(&policy, StateGroup::Optimizer).unwrap();
        let mut resumed = quantized(&checkpoint, quantization);
        let state = PolicyState {
            policy: &weights,
            ref_policy: None,
            optimizer: &optimizer,
            optimizer_steps: policy.optimizer_steps(),
            optimizer_settings: &OptimizerSettings::default(),
        };
        resumed.import(&state).unwrap();
        for policy in [&mut policy, &mut resumed] {
            accumulate(policy, &checkpoint);
            policy.apply(0.01).unwrap();
        }
        let of = |policy: &CpuPolicy| export_all(policy, StateGroup::Weights(Weights::Policy)).unwrap();
        assert_eq!(of(&policy), of(&resumed));
        assert_ne!(of(&policy), weights);
    }
}

#[test]
fn adapters_are_not_merged_into_quantised_weights() {
    let policy = quantized(&Checkpoint::open("qwen3"), Quantization::Nf4);
    let mut tensors = Vec::new();
    let error = policy.export_model(&mut tensors).unwrap_err().to_string();
    assert!(error.contains("expected weights that are not quantised") && tensors.is_empty(), "{error}");
}

#[test]
fn models_with_experts_are_refused_before_weights_are_read() {
    let checkpoint = Checkpoint::open("qwen3_moe");
    let (config, weights) = (checkpoint.config(), &checkpoint.weights);
    assert_ne!(config.experts, None::<Experts>);
    let other = ModelConfig { hidden_size: 8, ..config.clone() };
    let error = Decoder::quantized(&other, weights, Quantization::Int8, &Device::flex()).unwrap_err().to_string();
    assert!(error.contains("`policy.quantization`") && error.contains("num_experts"), "{error}");
}
