//! A small model with a real tokenizer, and runs that train it.

use crate::support::{Call, Runs, grpo, repository};
use grpo_models::{ExportOptions, FolderWriter, ModelConfig, ModelFolder};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use serde_json::{Value, json};
use std::path::Path;

const SETTINGS: [&str; 11] = [
    "grpo.max_steps=2",
    "grpo.prompts_per_step=4",
    "grpo.num_generations=4",
    "grpo.gradient_accumulation_steps=2",
    "rollout.max_completion_length=8",
    // Random tokens match now and then, so that a group has something to learn.
    "rewards.regex={vowel: {pattern: '[aeiou]{2}'}}",
    "eval.num_problems=0",
    "eval.eval_steps=0",
    "run.save_steps=1",
    "optimizer.learning_rate=0.01",
    "loss.beta=0.05",
];

/// The shape of a Qwen3 that is as small as can be.
pub(crate) fn small() -> ModelConfig {
    ModelConfig {
        vocab_size: 512,
        hidden_size: 16,
        intermediate_size: 32,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: Some(8),
        max_position_embeddings: 256,
        attention_bias: false,
        qk_norm: true,
        ..ModelConfig::default()
    }
}

impl Runs {
    /// Returns a folder with a small Qwen3 in `model` and rows in `rows.jsonl`.
    pub(crate) fn small() -> Self {
        let runs = Self::new(&[]);
        prepare_shape(&runs, &small());
        runs
    }

    /// Replaces the rows.
    pub(crate) fn write_rows(&self, count: usize, row: impl Fn(usize) -> Value) {
        self.write("rows.jsonl", (0..count).map(|i| format!("{}\n", row(i))).collect::<String>());
    }
}

/// Writes a model of random weights with Qwen3's tokenizer and chat template, in `model`, and rows like GSM8K's in `rows.jsonl`.
pub(crate) fn prepare_shape(runs: &Runs, shape: &ModelConfig) {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let model = runs.path("model");
    let options = ExportOptions { dtype: grpo_models::Dtype::F32, ..ExportOptions::default() };
    let mut writer = FolderWriter::create(&model, shape, None, options).unwrap();
    for parameter in shape.parameters() {
        let centre = if parameter.shape.len() == 1 { 1.0 } else { 0.0 };
        let values: Vec<f32> = (0..parameter.len()).map(|_| centre + rng.random_range(-0.2..0.2)).collect();
        writer.write(&parameter.name, &values).unwrap();
    }
    writer.finish().unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        let fixture = repository(&format!("crates/models/tests/fixtures/chat/qwen3/{file}"));
        std::fs::copy(fixture, model.join(file)).unwrap();
    }
    runs.write_rows(60, |i| json!({"question": format!("What is {i} + 1?"), "answer": format!("#### {}", i + 1)}));
}

/// Trains `model` into the run `name`; `settings` take precedence over the common ones.
pub(crate) fn call(runs: &Runs, model: &str, name: &str, settings: &[&str]) -> Call {
    let empty = runs.write("empty.yaml", "{}\n");
    let of_runs = [format!("model={}", runs.text(model)), format!("data.files={}", runs.text("rows.jsonl"))];
    grpo(["train", &empty, "--run-dir", &runs.text(name)]).set(SETTINGS).set(of_runs).set(settings)
}

#[track_caller]
pub(crate) fn train(runs: &Runs, model: &str, name: &str, settings: &[&str]) -> String {
    call(runs, model, name, settings).succeed()
}

pub(crate) fn tensors(folder: &Path) -> Vec<Vec<f32>> {
    let folder = ModelFolder::open(folder).unwrap();
    let weights = folder.weights().unwrap();
    weights.check(folder.config()).unwrap();
    folder.config().parameters().iter().map(|parameter| weights.tensor(&parameter.name).unwrap().to_vec()).collect()
}
