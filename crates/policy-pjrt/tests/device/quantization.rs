//! LoRA on quantised weights equals LoRA on their dequantised values, on one device and on meshes, and matches the CPU policy.

use crate::mesh_support::{on_mesh, rules, sequences};
use crate::mesh_training::{assert_same, train, train_beside};
use crate::support::{
    assert_close, assert_same_tensors, both, cross_entropy, gradients, halves, host_gradients, host_loss, moved,
    narrow, runtime, whole,
};
use grpo_core::LossConfig;
use grpo_models::{
    Dtype, ExportOptions, FolderWriter, LayerSpec, LinearAttention, LoraConfig, ModelConfig, Quantization,
    QuantizedMatrix, TargetModules,
};
use grpo_policy::{Policy, Weights};
use grpo_policy_cpu::CpuPolicy;
use grpo_policy_pjrt::decoder::{AxisRules, check_quantization, quantized_parameters};
use grpo_policy_pjrt::{
    DeviceWeights, PjrtPolicy, PjrtPolicyOptions, RolloutSizes, Runtime, TrainShape, TrainingSizes,
};
use grpo_testkit::margin::assert_below;
use rstest::rstest;

/// A model whose rows have two blocks of 64 values.
pub(crate) fn config() -> ModelConfig {
    ModelConfig {
        vocab_size: 32,
        hidden_size: 128,
        intermediate_size: 256,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        ..ModelConfig::default()
    }
}

fn lora() -> LoraConfig {
    LoraConfig { r: 2, target_modules: TargetModules::Pattern("all-linear".into()), ..LoraConfig::default() }
}

/// Writes random weights; with `quantization`, the matrices of layers are quantised and dequantised.
pub(crate) fn weights(
    config: &ModelConfig,
    dtype: Dtype,
    quantization: Option<Quantization>,
) -> (tempfile::TempDir, grpo_models::Weights) {
    let place = tempfile::tempdir().unwrap();
    let target = place.path().join("model");
    let mut writer =
        FolderWriter::create(&target, config, None, ExportOptions { dtype, ..ExportOptions::default() }).unwrap();
    let matrices: Vec<String> = (0..config.num_hidden_layers)
        .flat_map(|layer| config.layer_matrices(layer).into_iter().map(move |of| (layer, of.name)))
        .map(|(layer, name)| format!("model.layers.{layer}.{name}.weight"))
        .collect();
    for parameter in config.parameters() {
        let mut values = grpo_rng::normal_weights(0..parameter.len(), 0.2, 1, &parameter.name);
        if dtype == Dtype::Bf16 {
            values.iter_mut().for_each(|value| *value = half::bf16::from_f32(*value).to_f32());
        }
        if let Some(quantization) = quantization.filter(|_| matrices.contains(&parameter.name)) {
            let shape = parameter.shape[..].try_into().unwrap();
            values = QuantizedMatrix::new(quantization, &values, shape).dequantized();
        }
        writer.write(&parameter.name, &values).unwrap();
    }
    writer.finish().unwrap();
    let weights = grpo_models::Weights::open(&target).unwrap();
    (place, weights)
}

pub(crate) fn policy(
    runtime: &Runtime,
    config: &ModelConfig,
    weights: &grpo_models::Weights,
    options: PjrtPolicyOptions,
) -> PjrtPolicy {
    let loss = LossConfig::default();
    let mut policy = PjrtPolicy::from_weights_with_lora(runtime, config, weights, &lora(), 1, loss, options).unwrap();
    // Fresh adapters have gradients of 0.
    policy.import_weights(&moved(&policy, 0.05)).unwrap();
    policy
}

pub(crate) fn quantized(quantization: Quantization) -> PjrtPolicyOptions {
    PjrtPolicyOptions { quantization: Some(quantization), ..PjrtPolicyOptions::default() }
}

/// On one device, on a mesh, and with a rollout on a mesh of its own.
#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case::one_device(Quantization::Nf4, &[], None)]
#[ignore = "GRPO_TESTS=all"]
#[case::every_axis(Quantization::Int8, &[("data", 2), ("fsdp", 2), ("tensor", 2)], None)]
#[ignore = "GRPO_TESTS=all"]
#[case::one_device(Quantization::Int8, &[], None)]
#[ignore = "GRPO_TESTS=all"]
#[case::every_axis(Quantization::Nf4, &[("data", 2), ("fsdp", 2), ("tensor", 2)], None)]
#[ignore = "GRPO_TESTS=all"]
#[case::fsdp(Quantization::Int8, &[("fsdp", 2)], None)]
#[ignore = "GRPO_TESTS=all"]
#[case::fsdp(Quantization::Nf4, &[("fsdp", 2)], None)]
#[ignore = "GRPO_TESTS=all"]
#[case::own_mesh(Quantization::Int8, &[("data", 2), ("fsdp", 2)], Some(rules(&[("data", 2), ("tensor", 2)])))]
#[ignore = "GRPO_TESTS=all"]
#[case::own_mesh(Quantization::Nf4, &[("data", 2), ("fsdp", 2)], Some(rules(&[("data", 2), ("tensor", 2)])))]
fn quantised_training_and_sampling_equal_those_of_dequantised_weights(
    #[case] quantization: Quantization,
    #[case] axes: &[(&str, usize)],
    #[case] rollout_rules: Option<AxisRules>,
) {
    let config = config();
    let (_stored, exact) = weights(&config, Dtype::F32, None);
    let (_place, values) = weights(&config, Dtype::F32, Some(quantization));
    let expected = train(policy(runtime(), &config, &values, PjrtPolicyOptions::default()));
    let runtime = if axes.is_empty() { runtime().clone() } else { on_mesh(axes) };
    let options = PjrtPolicyOptions { rollout_rules, ..quantized(quantization) };
    let found = train_beside(&expected, policy(&runtime, &config, &exact, options));
    assert_same(&format!("{quantization:?}, {axes:?}"), &found, &expected);
}

/// A model with Gated DeltaNets, whose layers have other matrices.
#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case(Quantization::Nf4)]
#[ignore = "GRPO_TESTS=all"]
#[case(Quantization::Int8)]
fn quantised_gated_delta_nets_match_the_cpu(#[case] quantization: Quantization) {
    let linear = LinearAttention {
        linear_num_key_heads: 2,
        linear_num_value_heads: 8,
        linear_key_head_dim: 16,
        linear_value_head_dim: 16,
        ..LinearAttention::default()
    };
    let config = ModelConfig {
        linear_attention: Some(linear),
        layers: vec![LayerSpec::GATED_DELTA_NET, LayerSpec::default()],
        attention_bias: false,
        attention_output_gate: true,
        qk_norm: true,
        zero_centered_norms: true,
        partial_rotary_factor: 0.5,
        ..config()
    };
    // These layers amplify rounding errors.
    matches_the_cpu(&config, quantization, 1e-4);
}

#[rstest]
#[case(Quantization::Int8)]
#[ignore = "GRPO_TESTS=all"]
#[case(Quantization::Nf4)]
fn quantised_policies_match_the_cpu(#[case] quantization: Quantization) {
    matches_the_cpu(&config(), quantization, 1e-5);
}

/// Compares scores within `tolerance`, and gradients within ten times as much.
fn matches_the_cpu(config: &ModelConfig, quantization: Quantization, tolerance: f32) {
    let (_place, weights) = weights(config, Dtype::Bf16, None);
    let mut device = policy(runtime(), config, &weights, quantized(quantization));
    let loss = host_loss(LossConfig::default());
    let mut host = CpuPolicy::quantized_with_lora(config, &weights, quantization, &lora(), 1, loss).unwrap();
    host.import_weights(&moved(&device, 0.05)).unwrap();
    let all = sequences();
    let [found, expected] = both(&mut device, &mut host, |policy| {
        policy.freeze_ref_policy().unwrap();
        [Weights::Policy, Weights::RefPolicy].map(|of| policy.score(of, &[whole(&all)]).unwrap())
    });
    for (what, found, expected) in [("policy", &found[0], &expected[0]), ("reference policy", &found[1], &expected[1])]
    {
        assert_close(what, &found.logp, &expected.logp, tolerance);
        assert_close(what, &found.entropy, &expected.entropy, tolerance);
    }
    assert_ne!(found[0].logp, found[1].logp);
    let [found, expected] =
        both(&mut device, &mut host, |policy| policy.accumulate(&halves(&all), cross_entropy(&all)).unwrap().loss);
    assert_below("loss", (found - expected).abs() / expected, tolerance.into());
    assert_same_tensors("gradients", &gradients(&mut device), &host_gradients(&host), 10.0 * tolerance);
    let error = device.export_model(&mut Vec::new()).unwrap_err().to_string();
    assert!(error.contains("expected weights that are not quantised"), "{error}");
}

#[rstest]
#[case(Quantization::Nf4)]
#[ignore = "GRPO_TESTS=all"]
#[case(Quantization::Int8)]
fn bf16_products_dequantise_to_bf16(#[case] quantization: Quantization) {
    let config = config();
    let (_stored, exact) = weights(&config, Dtype::Bf16, None);
    // Files of bf16 have the nearest bf16 number of each dequantised value.
    let (_rounded, rounded) = weights(&config, Dtype::Bf16, Some(quantization));
    let all = sequences();
    let of = |weights, options| {
        policy(runtime(), &config, weights, options).score(Weights::Policy, &[whole(&all)]).unwrap().logp
    };
    let found = of(&exact, PjrtPolicyOptions { quantization: Some(quantization), ..narrow() });
    assert_eq!(found, of(&rounded, narrow()));
    assert_ne!(found, of(&exact, narrow()));
}

#[test]
fn quantisation_of_unsuitable_weights_is_an_error() {
    let config = config();
    let (_place, weights) = weights(&config, Dtype::F32, None);
    let loss = LossConfig::default;
    let options = quantized(Quantization::Nf4);
    let error = PjrtPolicy::from_weights(runtime(), &config, &weights, loss(), options.clone());
    let error = error.map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("from_weights_with_lora") && error.contains("nf4"), "{error}");
    let error = PjrtPolicy::new(runtime(), &config, 1, loss(), options.clone()).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("from_weights_with_lora"), "{error}");
    for (wrong, quantization, words) in [
        (ModelConfig { hidden_size: 96, head_dim: Some(32), ..config.clone() }, Quantization::Nf4, "q_proj [128, 96]"),
        (ModelConfig { intermediate_size: 254, ..config.clone() }, Quantization::Int8, "gate_proj [254, 128]"),
    ] {
        let error = check_quantization(&wrong, quantization).unwrap_err().to_string();
        assert!(error.contains("`policy.quantization`") && error.contains(words), "{error}");
    }
}

#[test]
fn a_quantised_model_takes_as_much_memory_as_its_table_says() {
    let config = config();
    let (_place, weights) = weights(&config, Dtype::Bf16, None);
    for quantization in [Quantization::Int8, Quantization::Nf4] {
        let policy = policy(runtime(), &config, &weights, quantized(quantization));
        let weights: &DeviceWeights = policy.weights().unwrap();
        let table = quantized_parameters(&config, Some(quantization));
        let bytes = |of_codes: bool| {
            let tensors = weights.table().iter().zip(weights.tensors()).filter(|(p, _)| p.role.is_of_model());
            let of = tensors.filter(|(p, _)| (p.format != grpo_policy_pjrt::decoder::Format::Values) == of_codes);
            of.map(|(p, _)| (p.shape.iter().product::<usize>() * p.dtype(grpo_stablehlo::Dtype::Bf16).bytes()) as u64)
                .sum::<u64>()
        };
        assert_eq!(bytes(true), quantization.memory(&config).bytes, "{quantization:?}");
        assert_eq!(table.len(), weights.table().iter().filter(|p| p.role.is_of_model()).count());
        let sizes = TrainingSizes {
            micro_batch: TrainShape { rows: 1, length: 16, tokens: 16, ..TrainShape::default() },
            rollout: RolloutSizes {
                prompts: 1,
                longest_prompt: 8,
                num_generations: 1,
                max_completion_length: 8,
                conversations: false,
            },
            weights: Dtype::Bf16,
            trained: grpo_models::Trained::Adapters { weights: 1, of_experts: 0 },
            optimizer: grpo_models::OptimizerName::AdamW,
            ref_policy: false,
            mixes_ref_policy: false,
        };
        let table = sizes.memory(&config, &quantized(quantization), &AxisRules::default()).unwrap();
        let row = format!("quantised weights ({})", quantization.name());
        let of_table = |name: &str| table.rows().iter().find(|(row, _)| row == name).map(|(_, bytes)| *bytes);
        assert_eq!(of_table(&row), Some(bytes(true)), "{table}");
    }
}
