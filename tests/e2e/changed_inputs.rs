//! A run goes on with the model and the data that it was begun with, and says what has changed where it does not.

use crate::support::{Runs, command, refuse, rows, stderr, succeed};
use crate::tiny_model::{prepare, train};
use serde_json::{Value, json};
use std::path::Path;

/// Returns the arguments that resume a run for one more step.
fn resume<'a>(run: &'a str, set: &'a [&'a str]) -> Vec<&'a str> {
    let mut arguments = vec!["train", "--resume", run, "--set", "grpo.max_steps=3"];
    set.iter().for_each(|set| arguments.extend(["--set", *set]));
    arguments
}

/// Replaces the bytes of a file by `change` of them, and returns the old bytes.
fn edit(path: &Path, change: impl FnOnce(Vec<u8>) -> Vec<u8>) -> Vec<u8> {
    let before = std::fs::read(path).unwrap_or_default();
    let after = change(before.clone());
    assert_ne!(before, after, "{}", path.display());
    std::fs::write(path, after).expect("written");
    before
}

/// Sets every field of this name, however deep.
fn set_field(value: &mut Value, name: &str, to: &Value) {
    match value {
        Value::Object(map) => map.iter_mut().for_each(|(key, value)| match key == name {
            true => *value = to.clone(),
            false => set_field(value, name, to),
        }),
        Value::Array(list) => list.iter_mut().for_each(|value| set_field(value, name, to)),
        _ => {}
    }
}

fn with_field(name: &'static str, to: Value) -> Box<dyn FnOnce(Vec<u8>) -> Vec<u8>> {
    Box::new(move |bytes| {
        let mut value: Value = serde_json::from_slice(&bytes).expect("JSON");
        set_field(&mut value, name, &to);
        value.to_string().into_bytes()
    })
}

type Edit = (&'static str, Box<dyn FnOnce(Vec<u8>) -> Vec<u8>>, &'static [&'static str]);

/// With LoRA the base is read from its folder again; without it nothing but the reference may be.
fn another_model_is_refused(settings: &[&str]) {
    let runs = Runs::new(&[]);
    prepare(&runs);
    train(&runs, "model", "a", settings);
    let (model, run) = (runs.path("model"), runs.text("a"));
    let one_value = |mut bytes: Vec<u8>| {
        let last = bytes.len() - 4;
        bytes[last..].copy_from_slice(&0.123_f32.to_le_bytes());
        bytes
    };
    let edits: [Edit; 6] = [
        ("model.safetensors", Box::new(one_value), &["weights: ", "other content"]),
        ("config.json", with_field("rope_theta", json!(12345.0)), &["config.json: rope_theta", "to 12345.0"]),
        ("tokenizer.json", with_field("normalizer", Value::Null), &["tokenizer.json: normalizer"]),
        ("tokenizer_config.json", with_field("pad_token", json!("!")), &["tokenizer_config.json: pad_token"]),
        ("chat_template.jinja", Box::new(|text| [text, b"!".to_vec()].concat()), &["chat_template.jinja"]),
        (
            "generation_config.json",
            Box::new(|_| br#"{"eos_token_id": [3]}"#.to_vec()),
            &["generation_config.json: eos_token_id"],
        ),
    ];
    for (file, change, named) in edits {
        let path = model.join(file);
        let was_there = path.exists();
        let before = edit(&path, change);
        for arguments in [&resume(&run, &["run.allow_changed_data=true"])[..], &["export", &run]] {
            let error = refuse(arguments);
            assert!(named.iter().all(|part| error.contains(part)), "{file}: {error}");
            assert!(error.contains("not the one that the run was begun with"), "{file}: {error}");
        }
        match was_there {
            true => std::fs::write(&path, before).expect("restored"),
            false => std::fs::remove_file(&path).expect("removed"),
        }
    }
    // Another name, another form of the same JSON: the same model.
    std::fs::rename(model.join("model.safetensors"), model.join("model-00001-of-00001.safetensors")).expect("renamed");
    edit(&model.join("config.json"), |bytes| {
        serde_json::to_vec(&serde_json::from_slice::<Value>(&bytes).expect("JSON")).expect("JSON")
    });
    succeed(&resume(&run, &[]));
}

#[test]
fn another_base_of_an_adapter_is_refused() {
    another_model_is_refused(&["lora={r: 4}"]);
}

#[test]
fn another_model_of_a_run_that_trains_every_weight_is_refused() {
    another_model_is_refused(&[]);
}

#[test]
fn changed_rows_are_named_and_refused_unless_they_are_allowed() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    train(&runs, "model", "a", &["lora={r: 4}"]);
    let (file, run) = (runs.path("rows.jsonl"), runs.text("a"));
    let original = std::fs::read_to_string(&file).expect("rows");
    let lines: Vec<&str> = original.lines().collect();
    let text = |lines: &[&str]| lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    let reordered = [&lines[1..2], &lines[..1], &lines[2..]].concat();
    for changed in [original.replacen("What", "what", 1), text(&reordered), text(&lines[..59])] {
        std::fs::write(&file, &changed).expect("written");
        let error = refuse(&resume(&run, &[]));
        assert!(error.contains("rows.jsonl") && error.contains("run.allow_changed_data=true"), "{error}");
    }
    // The weights of the run do not depend on its rows.
    succeed(&["export", &run, "--to", &runs.text("exported")]);
    let output = command(&resume(&run, &["run.allow_changed_data=true"])).output().expect("the binary starts");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains("rows.jsonl"), "{}", stderr(&output));
    let changes = rows(&runs.path("a/changes.jsonl"));
    let change = changes.iter().find(|row| row["key"].as_str().is_some_and(|key| key.contains("rows.jsonl")));
    let change = change.expect("the change is written down");
    assert_eq!((&change["from"]["lines"], &change["to"]["lines"]), (&json!(60), &json!(59)));
    // These are its rows from here on.
    succeed(&["train", "--resume", &run, "--set", "run.allow_changed_data=false", "--set", "grpo.max_steps=4"]);
}

#[test]
fn a_run_without_its_fingerprint_is_refused() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    train(&runs, "model", "a", &["lora={r: 4}"]);
    let (path, run) = (runs.path("a/fingerprint.json"), runs.text("a"));
    std::fs::write(&path, "{}").expect("written");
    let error = refuse(&resume(&run, &[]));
    assert!(error.contains("fingerprint.json") && error.contains("expected the fingerprint of a run"), "{error}");
    std::fs::remove_file(&path).expect("removed");
    let error = refuse(&resume(&run, &[]));
    assert!(error.contains("fingerprint.json") && error.contains("start a new run"), "{error}");
}
