//! Models and adapters saved by runs, loaded by transformers and peft, which compute the same logits as `grpo`.

use crate::support::{Runs, Said, grpo, repository};
use crate::tiny_model::{prepare_shape, small, train};
use grpo_models::{ModelConfig, RopeScaling};
use serde_json::{Value, json};

/// Returns a small model of each family.
fn families() -> [(&'static str, ModelConfig); 3] {
    let scaling = RopeScaling { factor: 8.0, original_max_position_embeddings: 32, ..RopeScaling::default() };
    let plain = ModelConfig { qk_norm: false, ..small() };
    let llama = ModelConfig { rope_scaling: Some(scaling), rope_theta: 5e5, ..plain.clone() };
    [
        ("qwen2", ModelConfig { attention_bias: true, tie_word_embeddings: true, head_dim: None, ..plain }),
        ("qwen3", small()),
        ("llama", llama),
    ]
}

/// Loads folders with transformers and peft and writes their results.
fn load(jobs: &[Value]) {
    let mut load = grpo_testkit::python::Python::install().command();
    load.arg(repository("tests/python/load.py")).arg(Value::from(jobs).to_string());
    let said: Said = load.output().expect("python3 starts").into();
    assert_eq!(said.code, Some(0), "{said}");
    assert_eq!(said.stdout.lines().count(), jobs.len(), "{said}");
}

#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn transformers_and_peft_load_saved_models_and_compute_the_same_logits() {
    let mut jobs = Vec::new();
    let all = families().map(|(family, shape)| {
        let runs = Runs::new(&[]);
        prepare_shape(&runs, &shape);
        // In bf16, the dtype that both sides read, and in several files.
        train(&runs, "model", "whole", &["export.dtype=bfloat16", "export.max_shard_size=16000"]);
        // There is more than one file.
        assert!(runs.path("whole/model/model.safetensors.index.json").exists(), "{family}");
        // The first family has a tied head.
        let targets = "lora={r: 4, target_modules: [q_proj, v_proj, down_proj, lm_head]}";
        train(&runs, "model", "lora", &[targets]);
        let merge = grpo(["export", &runs.text("lora"), "--to", &runs.text("merged")]);
        merge.set(["export.merge_adapters=true"]).succeed();
        jobs.push(json!({"model": runs.path("whole/model"), "out": runs.path("whole.safetensors")}));
        let adapter = runs.path("lora/model");
        jobs.push(json!({"model": runs.path("model"), "adapter": adapter, "out": runs.path("lora.safetensors")}));
        jobs.push(json!({"model": runs.path("merged"), "out": runs.path("merged.safetensors")}));
        runs
    });
    load(&jobs);
    for runs in all {
        let of =
            |file: &str, model: &[&str]| grpo(["parity", &runs.text(file), "--device", "host", "--model"]).args(model);
        let same = |file: &str, model: &[&str]| drop(of(file, model).succeed());
        same("whole.safetensors", &[&runs.text("whole/model")]);
        same("lora.safetensors", &[&runs.text("model"), "--adapter", &runs.text("lora/model")]);
        same("lora.safetensors", &[&runs.text("merged")]);
        same("merged.safetensors", &[&runs.text("merged")]);
        same("merged.safetensors", &[&runs.text("model"), "--adapter", &runs.text("lora/model")]);
        // The untrained model gives other results.
        for file in ["whole.safetensors", "lora.safetensors"] {
            of(file, &[&runs.text("model")]).exit(1);
        }
    }
}
