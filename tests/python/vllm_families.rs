//! Saved models of all families, loaded by vLLM, which computes the same logits as `grpo`.

use crate::support::{Runs, Said, grpo, json, repository};
use crate::tiny_model::train;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// A checkpoint of tests/checkpoints, which the test makes with wider heads.
struct Case {
    name: &'static str,
    /// The arguments of `vllm.LLM` that the model needs.
    options: Value,
    /// The tolerance of `grpo parity`.
    tolerance: f64,
    /// A part of vLLM's error, if it does not load the model.
    error: Option<&'static str>,
}

/// The default of `grpo parity`: both programs compute in f32 and differ by at most 2e-5, while a tensor in a wrong place or a missing factor
/// changes logits of about 5 by more than 0.1. Log-probabilities differ by at most twice as much.
const F32: f64 = 1e-4;
/// vLLM computes Gated DeltaNets on a CPU in bf16 only, and differs by up to 0.06 from f32.
const BF16: f64 = 0.1;

fn cases() -> Vec<Case> {
    let with = |name, options| Case { name, options, tolerance: F32, error: None };
    let loads = |name| with(name, json!({}));
    let in_bf16 = |name, options| Case { tolerance: BF16, ..with(name, options) };
    let refused = |name, error| Case { error: Some(error), ..loads(name) };
    // vLLM reads this factor of queries from Mistral's own files only, and ignores the field that transformers has for it.
    let scaling = json!({"llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.5}});
    let text = || json!({"language_model_only": true});
    let scaling_of_text = json!({"text_config": scaling});
    // vLLM reads this field where the text has it, and transformers where the model has it.
    let tied = json!({"text_config": {"tie_word_embeddings": true}});
    vec![
        loads("qwen2"),
        loads("qwen2_yarn"),
        refused("qwen2_window", "Sliding window for some but all layers is not supported"),
        loads("qwen3"),
        loads("qwen3_moe"),
        loads("qwen3_moe_fused"),
        in_bf16("qwen3_5", json!({"dtype": "bfloat16"})),
        loads("gpt_oss"),
        loads("llama3"),
        loads("llama_linear"),
        loads("mistral"),
        with("ministral3", json!({"hf_overrides": scaling})),
        loads("smollm3"),
        loads("olmo2"),
        loads("olmo3"),
        loads("granite"),
        loads("phi3"),
        loads("gemma3"),
        loads("gemma4"),
        with("gemma3_vision", text()),
        with("gemma4_vision", text()),
        with("qwen2_5_vl", text()),
        with("qwen3_vl", text()),
        in_bf16("qwen3_5_vision", json!({"dtype": "bfloat16", "language_model_only": true, "hf_overrides": tied})),
        with("mistral3", text()),
        with("ministral3_vision", json!({"language_model_only": true, "hf_overrides": scaling_of_text})),
        loads("qwen2_moe_fused"),
        loads("glm4_moe"),
    ]
}

/// Runs vllm_families.py and returns its standard output.
fn script(mut python: Command, arguments: &[&str]) -> String {
    python.arg(repository("tests/python/vllm_families.py")).args(arguments);
    let said: Said = python.output().expect("python3 starts").into();
    assert_eq!(said.code, Some(0), "{said}");
    said.stdout
}

/// Returns the names of classes in a model folder's config.json.
fn architectures(folder: &Path) -> Vec<String> {
    serde_json::from_value(json(&folder.join("config.json"))["architectures"].clone()).unwrap()
}

#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn vllm_loads_saved_models_of_all_families_and_computes_the_same_logits() {
    let cases = cases();
    let runs = Runs::new(&[]);
    let python = grpo_testkit::python::Python::install_vllm();
    let names: Vec<&str> = cases.iter().map(|case| case.name).collect();
    script(python.command(), &[&["make", &runs.text("models")], &names[..]].concat());

    // Every class of the tiny checkpoints has a case.
    let checkpoints = std::fs::read_dir(repository("tests/checkpoints")).unwrap().map(|entry| entry.unwrap().path());
    let all =
        checkpoints.filter(|folder| folder.join("config.json").exists()).flat_map(|folder| architectures(&folder));
    let tested = names.iter().flat_map(|name| architectures(&runs.path("models").join(name)));
    assert_eq!(all.collect::<BTreeSet<_>>(), tested.collect::<BTreeSet<_>>());

    runs.write_rows(60, |i| json!({"question": format!("What is {i} + 1?"), "answer": format!("#### {}", i + 1)}));
    for Case { name, tolerance, .. } in &cases {
        let model = format!("models/{name}");
        for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
            let fixture = repository(&format!("crates/models/tests/fixtures/chat/qwen3/{file}"));
            std::fs::copy(fixture, runs.path(&model).join(file)).unwrap();
        }
        // Two steps change logits by far more than the tolerance.
        // The logits of a tied head repeat its token, so that only a high temperature gives different completions and a gradient.
        let [rate, temperature] = if *tolerance == F32 { ["0.001", "1.0"] } else { ["0.02", "8.0"] };
        let settings = [format!("optimizer.learning_rate={rate}"), format!("rollout.temperature={temperature}")];
        train(&runs, &model, name, &settings.each_ref().map(String::as_str));
    }

    let saved = |name: &str| runs.path(name).join("model");
    let file = |name: &str| runs.text(&format!("{name}.safetensors"));
    let job = |case: &Case| json!({"model": saved(case.name), "out": file(case.name), "options": case.options});
    let jobs = Value::from_iter(cases.iter().map(job));
    let replies = script(python.command(), &["logits", &jobs.to_string()]);
    let replies: Vec<Value> = replies.lines().map(|line| serde_json::from_str(line).expect("a row of JSON")).collect();
    assert_eq!(replies.len(), cases.len(), "{replies:?}");

    for (case, reply) in cases.iter().zip(&replies) {
        let name = case.name;
        if let Some(error) = case.error {
            // Without an error, the family can be compared like the others.
            assert!(reply["error"].as_str().is_some_and(|text| text.contains(error)), "{name}: {reply}");
            continue;
        }
        assert!(reply["error"].is_null(), "{name}: {reply}");
        let parity = |model: &Path| {
            let (model, tolerance) = (model.display().to_string(), case.tolerance.to_string());
            grpo(["parity", &file(name), "--device", "host", "--json", "--tolerance", &tolerance, "--model", &model])
        };
        let report = parity(&saved(name)).exit(0).json();
        println!("{name}: {} s, {report}", reply["seconds"]);
        // The untrained model gives other results.
        parity(&runs.path("models").join(name)).exit(1);
    }
}
