//! LoRA: the adapted model matches peft, and the base model is frozen.

use crate::checkpoint::{self, Checkpoint, Tensors};
use crate::support::{accumulate, assert_close, logits, policy, policy_loss};
use burn::tensor::Device;
use grpo_models::{Adapter, Dtype, ExportOptions, FolderWriter, LoraConfig, ModelFolder, TargetModules};
use grpo_policy::{
    Policy, RolloutRequest, Sampling, SequenceBatch, StateGroup, StepLoss, Weights, export_all, token_batch,
};
use grpo_policy_cpu::CpuPolicy;
use grpo_policy_cpu::decoder::{Decoder, Mlp, Weight};

/// Returns the checkpoints with adapters, and the folders of these.
fn all_adapted() -> Vec<(&'static str, String)> {
    let of = |suffix: &'static str| move |name: &'static str| (name, format!("{name}{suffix}"));
    let experts = ["qwen3_moe", "qwen3_moe_fused", "gpt_oss"].map(of("_experts_lora"));
    checkpoint::ADAPTED.into_iter().chain(["qwen3_5"]).map(of("_lora")).chain(experts).collect()
}

/// Opens the adapter in a folder, its base model, and the expected results of the adapted model.
fn adapted(name: &str, folder: &str) -> (Checkpoint, Adapter) {
    let mut checkpoint = Checkpoint::open(name);
    let folder = checkpoint::folder(folder);
    checkpoint.expected = Tensors::read(&folder.join("expected.safetensors"));
    let adapter = Adapter::open(&folder, checkpoint.config()).unwrap();
    (checkpoint, adapter)
}

#[test]
fn logits_and_gradients_of_an_adapter_match_peft() {
    for (base, name) in all_adapted() {
        let (checkpoint, adapter) = adapted(base, &name);
        let mut policy = policy(&checkpoint).with_adapter(&adapter).unwrap();
        for (i, sequence) in checkpoint.sequences().iter().enumerate() {
            let expected = checkpoint.logits(i, sequence.len());
            let mut found = Vec::new();
            policy.logits(sequence, |_, logits| found.extend_from_slice(logits)).unwrap();
            assert_close(&format!("{name}: logits"), &found, expected);
            // Sampling merges the adapters into the weights, except those of experts.
            let mut cached = Vec::new();
            policy.cached_logits(&[sequence], |_, _, logits| cached.extend_from_slice(logits)).unwrap();
            assert_close(&format!("{name}: logits over a cache"), &cached, expected);
        }
        let (loss, gradients) = accumulate(&mut policy, &checkpoint);
        let expected = f64::from(checkpoint.expected.0["expected.loss"].data[0]);
        assert!((loss - expected).abs() < 1e-5 * expected, "{name}: {loss} {expected}");
        let of_peft: Vec<_> =
            checkpoint.expected.0.iter().filter_map(|(n, t)| Some((n.strip_prefix("expected.grad.")?, t))).collect();
        assert_eq!(of_peft.len(), 2 * adapter.matrices().len(), "{name}");
        assert_eq!(gradients.len(), of_peft.len(), "{name}: the frozen base has no gradients");
        for (parameter, expected) in of_peft {
            assert_eq!(gradients[parameter].shape, expected.shape, "{name}: {parameter}");
            assert_close(&format!("{name}: {parameter}"), &gradients[parameter].data, &expected.data);
        }
    }
}

#[test]
fn exported_adapters_equal_the_loaded_ones_and_merge_as_in_peft() {
    for (base, name) in all_adapted() {
        let (checkpoint, adapter) = adapted(base, &name);
        let base = Decoder::from_weights(checkpoint.config(), &checkpoint.weights, &Device::flex()).unwrap();
        let model = base.clone().with_adapter(&adapter).unwrap();
        let mut tensors = Vec::new();
        model.export_adapter(&mut tensors).unwrap();
        assert_eq!(tensors.len(), 2 * adapter.matrices().len());
        for matrix in adapter.matrices() {
            for (name, stored) in [(matrix.lora_a(), adapter.lora_a(matrix)), (matrix.lora_b(), adapter.lora_b(matrix))]
            {
                let found = tensors.iter().find(|tensor| tensor.name == name).expect("exported under PEFT's name");
                assert_eq!(found.data, stored.unwrap().to_vec(), "{name}");
            }
        }
        let mut merged = Vec::new();
        model.export(&mut merged).unwrap();
        let expected = Tensors::read(&checkpoint::folder(&name).join("merged.safetensors")).0;
        assert_eq!(merged.len(), expected.len(), "{name}");
        for tensor in &merged {
            let expected = &expected[&tensor.name];
            assert_eq!(tensor.shape, expected.shape);
            let off = tensor.data.iter().zip(&expected.data).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(off < 1e-6, "{name}: {}: off by {off}", tensor.name);
        }
        // Without adapters, the model equals the base model bit for bit.
        let sequences = checkpoint.sequences();
        assert_ne!(logits(&model, &sequences), logits(&base, &sequences));
        assert_eq!(logits(&model.without_adapters(), &sequences), logits(&base, &sequences));
    }
}

/// A memory-mapped base model gives the same results as a copied one, bit for bit: scores, gradients, samples, exports.
#[test]
fn a_mapped_base_model_equals_a_copied_one_bit_for_bit() {
    let lora = |target_modules: TargetModules| LoraConfig { r: 3, target_modules, ..Default::default() };
    let (all, some) = (TargetModules::Pattern("all-linear".into()), TargetModules::Names(vec!["v_proj".into()]));
    let head = TargetModules::Names(vec!["o_proj".into(), "lm_head".into()]);
    let cases = [("llama3_bf16", all.clone()), ("llama3_bf16", head), ("qwen2", some), ("qwen3_f16", all.clone())];
    for (name, targets) in cases.into_iter().chain([
        ("phi3", all.clone()),
        ("olmo3", all.clone()),
        ("gemma3", all.clone()),
        ("gemma4", all.clone()),
        ("qwen3_moe", all.clone()),
        ("qwen3_moe_fused", all.clone()),
        ("qwen3_5", all),
    ]) {
        let mut lora = lora(targets);
        if name.starts_with("qwen3_moe") {
            lora.target_parameters = vec!["experts.gate_up_proj".into(), "experts.down_proj".into()];
        }
        let checkpoint = Checkpoint::open(name);
        let (config, weights) = (checkpoint.config(), &checkpoint.weights);
        let mapped = CpuPolicy::mapped_with_lora(config, weights, &lora, 7, policy_loss()).unwrap();
        let down = match &mapped.model().layers[0].mlp {
            Mlp::Dense(mlp) => &mlp.down_proj.weight,
            Mlp::Experts(mlp) => &mlp.experts_down,
        };
        let stored = matches!(down, Weight::Stored(_));
        assert_eq!(stored, name != "qwen3_f16", "{name}: products cannot read f16");
        let sequences = checkpoint.completions();
        let tokens = token_batch(&sequences).unwrap().with_advantages(vec![1.0; sequences.len()]).unwrap();
        let of = |mut policy: CpuPolicy| {
            policy.freeze_ref_policy().unwrap();
            let batch = || SequenceBatch { routed_experts: &[], sequences: &sequences, tokens: tokens.clone() };
            let old = policy.score(Weights::Policy, &[batch()]).unwrap();
            for _ in 0..2 {
                policy.accumulate(&[batch()], StepLoss::Grpo).unwrap();
                policy.apply(0.01).unwrap();
            }
            let new = [Weights::Policy, Weights::RefPolicy].map(|of| policy.score(of, &[batch()]).unwrap());
            let prompts = [vec![1, 5, 9], vec![3]];
            let sampling = Sampling::Random {
                temperature: 1.0,
                processors: Default::default(),
                seed: 1,
                purpose: grpo_rng::Purpose::Rollout,
                step: 0,
                first: 0,
            };
            let request = RolloutRequest {
                prompts: &prompts,
                num_generations: 2,
                max_completion_length: 5,
                stop_ids: &[],
                stop: None,
                sampling,
                return_sampling_mask: false,
                return_routed_experts: false,
                turn: None,
            };
            let completions = policy.generate(&request).unwrap();
            let (mut model, mut adapter) = (Vec::new(), Vec::new());
            policy.export_model(&mut model).unwrap();
            policy.export_adapter(&mut adapter).unwrap();
            assert_ne!(old.logp, new[0].logp, "{name}: adapters are trained");
            assert_eq!(old.logp, new[1].logp, "{name}: and the base is not");
            (old, new, completions, model, adapter)
        };
        let read = policy(&checkpoint).with_lora(&lora, 7).unwrap();
        assert_eq!(mapped.num_parameters(), read.num_parameters());
        assert!(of(mapped) == of(read), "{name}");
    }
}

#[test]
fn an_adapter_of_a_tied_head_trains_and_is_merged_into_a_separate_head() {
    let checkpoint = Checkpoint::open("qwen2");
    let lora = LoraConfig { r: 2, target_modules: TargetModules::Names(vec!["lm_head".into()]), ..Default::default() };
    let mut policy = policy(&checkpoint).with_lora(&lora, 1).unwrap();
    let (first, gradients) = accumulate(&mut policy, &checkpoint);
    assert_eq!(gradients.len(), 2);
    policy.apply(0.05).unwrap();
    assert!(accumulate(&mut policy, &checkpoint).0 < first);

    let merged = lora.merged_into(checkpoint.config()).unwrap();
    assert!(checkpoint.config().tie_word_embeddings && !merged.tie_word_embeddings);
    let (place, mut tensors) = (tempfile::tempdir().unwrap(), Vec::new());
    policy.export_model(&mut tensors).unwrap();
    // All other tensors are unchanged, including the embedding.
    assert_eq!(tensors.len(), checkpoint.config().parameters().len() + 1);
    let options = ExportOptions { dtype: Dtype::F32, ..ExportOptions::default() };
    let mut writer = FolderWriter::create(&place.path().join("merged"), &merged, None, options).unwrap();
    for tensor in &tensors {
        let stored = checkpoint.weights.tensor(&tensor.name).map(|stored| stored.to_vec());
        assert_eq!(stored.ok().as_ref(), (tensor.name != "lm_head.weight").then_some(&tensor.data), "{}", tensor.name);
        writer.write(&tensor.name, &tensor.data).unwrap();
    }
    writer.finish().unwrap();
    let folder = ModelFolder::open(&place.path().join("merged")).unwrap();
    let read = Decoder::from_weights(folder.config(), &folder.weights().unwrap(), &Device::flex()).unwrap();
    let sequences = checkpoint.sequences();
    let (found, expected) = (logits(&read, &sequences), logits(policy.model(), &sequences));
    assert_close("logits of the merged model", &found, &expected);
    let base = Decoder::from_weights(checkpoint.config(), &checkpoint.weights, &Device::flex()).unwrap();
    let moved = logits(&base, &sequences).iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(moved > 1e-2, "the adapter changes logits only by {moved}");
}

#[test]
fn a_value_head_is_trained_with_adapters_and_not_exported_with_the_model() {
    let checkpoint = Checkpoint::open("qwen3");
    let lora = LoraConfig { r: 2, ..Default::default() };
    let value_loss = grpo_core::objective::ValueLossConfig::default;
    let first = policy(&checkpoint).with_value_head(value_loss()).unwrap().with_lora(&lora, 7).unwrap();
    let last = policy(&checkpoint).with_lora(&lora, 7).unwrap().with_value_head(value_loss()).unwrap();
    let weights = export_all(&first, StateGroup::Weights(Weights::Policy)).unwrap();
    assert_eq!(weights, export_all(&last, StateGroup::Weights(Weights::Policy)).unwrap());
    let heads = weights.iter().filter(|tensor| tensor.name.starts_with("value_head.")).count();
    assert_eq!((heads, weights.len()), (2, 2 + lora.parameters(checkpoint.config()).unwrap().len()));
    let mut model = Vec::new();
    first.export_model(&mut model).unwrap();
    assert_eq!(model.len(), checkpoint.config().parameters().len());
}
