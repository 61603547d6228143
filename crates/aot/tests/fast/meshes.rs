//! Every family with frozen weights of every format, on the meshes that the planner recommends.

use crate::report;
use grpo_aot::{ProgramName, RunPrograms};
use grpo_backend_tpu::aot::{Report, Target};
use grpo_files::Layers;
use grpo_models::{ModelFolder, Quantization};
use grpo_planner::{Devices, longest_prompt, plan};
use grpo_run_config::{MeshChoice, MeshConfig, TrainConfig};
use rstest::rstest;
use serde_json::{Map, Value, json};
use std::path::Path;

/// The number of the planner's meshes that are built.
const RECOMMENDED: usize = 5;

/// Writes `config.json` of a committed checkpoint with the sizes of a released model, whose number of layers does not change shardings.
fn folder(checkpoint: &str, sizes: &Value) -> tempfile::TempDir {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/checkpoints/{checkpoint}/config.json"));
    let mut config: Map<String, Value> = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    config.extend(sizes.as_object().unwrap().clone());
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("config.json"), Value::Object(config).to_string()).unwrap();
    place
}

/// Returns a run with adapters on all matrices of the model in `folder`.
fn run(folder: &Path, quantization: Option<Quantization>) -> TrainConfig {
    let settings = json!({
        "model": folder,
        "lora": {"target_modules": "all-linear"},
        "policy": {"device": "pjrt:tpu", "dtype": "bfloat16", "quantization": quantization},
        "data": {"files": "train.jsonl", "max_prompt_length": 64},
        "rollout": {"max_completion_length": 64},
        "grpo": {"prompts_per_step": 4, "num_generations": 4},
    });
    TrainConfig::from_layers(Layers::new().value("a test", settings).unwrap()).unwrap()
}

/// Builds the programs of an update, of scoring and of sampling, and returns the number of devices of each.
fn partitions(config: &TrainConfig, target: &Target) -> grpo_aot::Result<Vec<usize>> {
    let programs = RunPrograms::of_target(config, target)?;
    let names = programs.names().into_iter().filter(|name| !matches!(name, ProgramName::Decode(_)));
    names.chain(programs.longest_decode()).map(|name| Ok(programs.module(name)?.partitions)).collect()
}

#[rstest]
#[case::qwen2_5_0_5b("qwen2", json!({"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936}))]
#[ignore = "GRPO_TESTS=all"]
#[case::qwen2_5_7b("qwen2", json!({"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064}))]
#[ignore = "GRPO_TESTS=all"]
#[case::qwen3_0_6b("qwen3", json!({"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}))]
#[ignore = "GRPO_TESTS=all"]
#[case::llama_3_2_3b("llama3", json!({"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256}))]
#[case::mistral_7b("mistral", json!({"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32768}))]
#[ignore = "GRPO_TESTS=all"]
#[case::ministral3_3b("ministral3", json!({"hidden_size": 3072, "intermediate_size": 9216, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072}))]
#[ignore = "GRPO_TESTS=all"]
#[case::smollm3_3b("smollm3", json!({"hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128256}))]
#[ignore = "GRPO_TESTS=all"]
#[case::olmo2_1b("olmo2", json!({"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 100352}))]
#[ignore = "GRPO_TESTS=all"]
#[case::olmo3_7b("olmo3", json!({"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100278}))]
#[case::granite_3_2b("granite", json!({"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 49155}))]
#[ignore = "GRPO_TESTS=all"]
#[case::phi_3_mini("phi3", json!({"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064, "partial_rotary_factor": 1.0, "rope_scaling": null}))]
#[ignore = "GRPO_TESTS=all"]
#[case::gemma_3_270m("gemma3", json!({"hidden_size": 640, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144}))]
#[ignore = "GRPO_TESTS=all"]
#[case::gemma_3_1b("gemma3", json!({"hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144}))]
#[ignore = "GRPO_TESTS=all"]
#[case::gemma_4_31b("gemma4", json!({"hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256, "vocab_size": 262144,
    "per_layer_config": {"1": {"head_dim": 512, "num_key_value_heads": 4}, "2": {"head_dim": 512, "num_key_value_heads": 4}, "4": {"head_dim": 512, "num_key_value_heads": 4}, "5": {"head_dim": 512, "num_key_value_heads": 4}, "7": {"head_dim": 512, "num_key_value_heads": 4}}}))]
#[ignore = "GRPO_TESTS=all"]
#[case::qwen3_5_0_8b("qwen3_5", json!({"hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320,
    "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128}))]
#[case::qwen3_30b_a3b("qwen3_moe", json!({"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_local_experts": 128, "vocab_size": 151936}))]
#[case::gpt_oss_20b("gpt_oss", json!({"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "vocab_size": 201088}))]
fn recommended_meshes_build_for_every_format_of_frozen_weights(#[case] checkpoint: &str, #[case] sizes: Value) {
    let folder = folder(checkpoint, &sizes);
    let shape = ModelFolder::open(folder.path()).unwrap().config().clone();
    for target in ["v6e:2x4", "v6e:4x4"] {
        let target = Target::parse(target).unwrap();
        for quantization in [None, Some(Quantization::Int8), Some(Quantization::Nf4)] {
            if quantization.is_some_and(|quantization| {
                grpo_policy_pjrt::decoder::check_quantization(&shape, quantization).is_err()
            }) {
                assert!(shape.experts.is_some(), "{checkpoint}: {quantization:?}");
                continue;
            }
            let config = run(folder.path(), quantization);
            let plan = plan(&config, &shape, longest_prompt(&config, &shape), &Devices::of(&target)).unwrap();
            let mut chosen: Vec<TrainConfig> =
                plan.by_mesh().iter().take(RECOMMENDED).map(|best| best.settings.applied_to(&config)).collect();
            let mut auto = config.clone();
            auto.policy.mesh = Some(MeshChoice::Auto);
            chosen.push(auto);
            for config in chosen {
                let mesh = &config.policy.mesh;
                let found = partitions(&config, &target);
                let found = found.unwrap_or_else(|error| panic!("{quantization:?} on {mesh:?}: {error}"));
                assert!(
                    found.iter().all(|devices| *devices == target.devices()),
                    "{quantization:?} {mesh:?}: {found:?}"
                );
            }
        }
    }
}

#[rstest]
#[case::shards_of_the_mlp(json!({"intermediate_size": 24}), None)]
#[case::blocks_of_nf4(json!({"hidden_size": 128, "intermediate_size": 64}), Some(Quantization::Nf4))]
fn programs_of_an_mlp_without_a_legal_half_build(#[case] sizes: Value, #[case] quantization: Option<Quantization>) {
    let heads = json!({"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64});
    let sizes: Map<String, Value> = [heads, sizes].iter().filter_map(Value::as_object).flat_map(Map::clone).collect();
    let folder = folder("qwen2", &Value::Object(sizes));
    let target = Target::parse("v6e:2x4").unwrap();
    let mut config = run(folder.path(), quantization);
    config.policy.mesh = Some(MeshChoice::Axes(MeshConfig { data: 1, fsdp: 1, tensor: 8 }));
    assert!(partitions(&config, &target).unwrap().iter().all(|devices| *devices == 8));
    let programs = RunPrograms::of_target(&config, &target).unwrap();
    assert!(!programs.names().contains(&ProgramName::HalfMlp));
    let report = Report { estimate_seconds: Some(1.0), ..report(1) };
    let shares = programs.times(|_| Some(&report), target.chip()).unwrap().shares;
    assert!(shares.iter().any(|(part, _)| part == "layers"), "{shares:?}");
}
