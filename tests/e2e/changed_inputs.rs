//! Resumed runs refuse changed models and data, and name the change.

use crate::support::{Call, Runs, assert_has, grpo, rows};
use crate::tiny_model::train;
use serde_json::{Value, json};
use std::path::Path;

/// Resumes the run `a` for one more step.
fn resume(runs: &Runs, settings: &[&str]) -> Call {
    runs.resume("a").set(["grpo.max_steps=3"]).set(settings)
}

/// Returns the content of a JSON file with another value of a field.
fn with_field(path: &Path, name: &str, to: Value) -> Vec<u8> {
    let mut value: Value = serde_json::from_slice(&std::fs::read(path).expect("a file")).expect("JSON");
    value[name] = to;
    value.to_string().into_bytes()
}

/// With LoRA, the base model is read from its folder again; without LoRA, only the reference may be.
#[test]
#[ignore = "GRPO_TESTS=all"]
fn another_model_of_a_run_is_refused() {
    for settings in [&["lora={r: 4}"][..], &[]] {
        let runs = Runs::small();
        train(&runs, "model", "a", settings);
        let model = runs.path("model");
        let of = |file: &str, name: &str, to: Value| with_field(&model.join(file), name, to);
        let mut weights = std::fs::read(model.join("model.safetensors")).expect("weights");
        let last = weights.len() - 4;
        weights[last..].copy_from_slice(&0.123_f32.to_le_bytes());
        let template = runs.read("model/chat_template.jinja") + "!";
        let edits: [(&str, Vec<u8>, &[&str]); 6] = [
            ("model.safetensors", weights, &["weights: ", "other content"]),
            (
                "config.json",
                of("config.json", "rope_theta", json!(12345.0)),
                &["config.json: rope_theta", "to 12345.0"],
            ),
            ("tokenizer.json", of("tokenizer.json", "normalizer", Value::Null), &["tokenizer.json: normalizer"]),
            (
                "tokenizer_config.json",
                of("tokenizer_config.json", "pad_token", json!("!")),
                &["tokenizer_config.json: pad_token"],
            ),
            ("chat_template.jinja", template.into_bytes(), &["chat_template.jinja"]),
            ("generation_config.json", br#"{"eos_token_id": [3]}"#.to_vec(), &["generation_config.json: eos_token_id"]),
        ];
        for (file, content, named) in edits {
            let path = model.join(file);
            let before = std::fs::read(&path).ok();
            assert_ne!(before.as_ref(), Some(&content), "{file}");
            std::fs::write(&path, content).expect("written");
            let export = grpo(["export", &runs.text("a")]);
            for call in [resume(&runs, &["run.allow_changed_data=true"]), export] {
                let error = call.refuse();
                assert_has(&error, named);
                assert_has(&error, &["not the one that the run was begun with"]);
            }
            match before {
                Some(before) => std::fs::write(&path, before).expect("restored"),
                None => std::fs::remove_file(&path).expect("removed"),
            }
        }
        // Another name, another form of the same JSON: the same model.
        std::fs::rename(model.join("model.safetensors"), model.join("model-00001-of-00001.safetensors"))
            .expect("renamed");
        let config: Value = serde_json::from_str(&runs.read("model/config.json")).expect("JSON");
        runs.write("model/config.json", config.to_string());
        resume(&runs, &[]).succeed();
    }
}

#[test]
fn changed_rows_are_named_and_refused_unless_they_are_allowed() {
    let runs = Runs::small();
    train(&runs, "model", "a", &["lora={r: 4}"]);
    let original = runs.read("rows.jsonl");
    let lines: Vec<&str> = original.lines().collect();
    let text = |lines: &[&str]| lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    let reordered = [&lines[1..2], &lines[..1], &lines[2..]].concat();
    for changed in [original.replacen("What", "what", 1), text(&reordered), text(&lines[..59])] {
        runs.write("rows.jsonl", changed);
        assert_has(&resume(&runs, &[]).refuse(), &["rows.jsonl", "run.allow_changed_data=true"]);
    }
    // The weights of the run do not depend on its rows.
    grpo(["export", &runs.text("a"), "--to", &runs.text("exported")]).succeed();
    let said = resume(&runs, &["run.allow_changed_data=true"]).exit(0);
    assert_has(&said.stderr, &["rows.jsonl"]);
    let changes = rows(&runs.path("a/changes.jsonl"));
    let change = changes.iter().find(|row| row["key"].as_str().is_some_and(|key| key.contains("rows.jsonl")));
    let change = change.expect("the change is written down");
    assert_eq!((&change["from"]["lines"], &change["to"]["lines"]), (&json!(60), &json!(59)));
    // These are its rows from here on.
    runs.resume("a").set(["run.allow_changed_data=false", "grpo.max_steps=4"]).succeed();
}

#[test]
fn a_run_without_its_fingerprint_is_refused() {
    let runs = Runs::small();
    train(&runs, "model", "a", &["lora={r: 4}"]);
    let path = runs.path("a/fingerprint.json");
    std::fs::write(&path, "{}").expect("written");
    assert_has(&resume(&runs, &[]).refuse(), &["fingerprint.json", "expected the fingerprint of a run"]);
    std::fs::remove_file(&path).expect("removed");
    assert_has(&resume(&runs, &[]).refuse(), &["fingerprint.json", "start a new run"]);
}
