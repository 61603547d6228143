//! Training that starts from an adapter.

use crate::support::{Runs, grpo_with_quick_cpu, refuse, rows, stderr, succeed};
use crate::tiny_model::{arguments, prepare, train};
use models::{Adapter, ModelFolder};
use serde_json::{Value, json};

/// Returns the tensors of an adapter.
fn tensors(runs: &Runs, adapter: &str) -> Vec<Vec<f32>> {
    let base = ModelFolder::open(&runs.path("model")).unwrap();
    let adapter = Adapter::open(&runs.path(adapter), base.config()).unwrap();
    let of = |matrix| [adapter.lora_a(matrix).unwrap().to_vec(), adapter.lora_b(matrix).unwrap().to_vec()];
    adapter.matrices().iter().flat_map(of).collect()
}

#[test]
fn training_starts_from_an_adapter_given_as_the_model() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    train(&runs, "model", "first", &["lora={r: 3, lora_alpha: 5, target_modules: '.*[qv]_proj'}"]);
    let written: Value =
        serde_json::from_slice(&std::fs::read(runs.path("first/model/adapter_config.json")).unwrap()).unwrap();
    assert_eq!((&written["target_modules"], &written["r"]), (&json!(["q_proj", "v_proj"]), &json!(3)));
    assert!(tensors(&runs, "first/model").iter().flatten().any(|value| *value != 0.0));
    // With advantages of 0, training changes nothing: the exported adapter equals the initial one.
    let still = ["grpo.advantage_scale=0", "loss.beta=0", "optimizer.weight_decay=0", "grpo.max_steps=1"];
    train(&runs, "first/model", "second", &still);
    assert_eq!(tensors(&runs, "second/model"), tensors(&runs, "first/model"));
    let config = std::fs::read_to_string(runs.path("second/config.yaml")).unwrap();
    let base = runs.text("model");
    for part in
        [format!("model: {base}"), "r: 3".into(), "- q_proj".into(), format!("adapter: {}", runs.text("first/model"))]
    {
        assert!(config.contains(&part), "{part} is not in {config}");
    }
    // The same adapter as `lora.adapter`, and a resumed run.
    let adapter = format!("lora={{adapter: {}}}", runs.text("first/model"));
    train(&runs, "model", "third", &[&still[..], &[&adapter]].concat());
    assert_eq!(tensors(&runs, "third/model"), tensors(&runs, "first/model"));
    let evaluated = |run: &str| rows(&runs.path(run)).iter().map(|row| row["eval/pass@1"].clone()).next();
    assert_eq!(evaluated("second/metrics.jsonl"), evaluated("third/metrics.jsonl"));
    train(&runs, "first/model", "fourth", &[]);
    assert_ne!(tensors(&runs, "fourth/model"), tensors(&runs, "first/model"));
    succeed(&["train", "--resume", &runs.text("fourth"), "--set", "grpo.max_steps=3"]);

    let refused = |settings: &[&str]| {
        let arguments = arguments(&runs, "first/model", "refused", settings);
        refuse(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let error = refused(&["lora={r: 4}"]);
    assert!(error.contains("`lora.r`: expected 3") && error.contains("got 4"), "{error}");
    let mut config = written;
    config["base_model_name_or_path"] = Value::Null;
    std::fs::write(runs.path("first/model/adapter_config.json"), config.to_string()).unwrap();
    let error = refused(&[]);
    assert!(
        error.contains("`model`: expected the base of the adapter") && error.contains("lora: { adapter"),
        "{error}"
    );
}

#[test]
fn training_on_a_device_starts_from_an_adapter_given_as_the_model() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    train(&runs, "model", "first", &["lora={r: 3, lora_alpha: 5, target_modules: '.*[qv]_proj'}"]);
    let on_device = |arguments: &[&str]| {
        let output = grpo_with_quick_cpu(arguments).output().expect("the binary starts");
        assert_eq!(output.status.code(), Some(0), "{arguments:?}\n{}", stderr(&output));
    };
    let train = |name: &str, settings: &[&str]| {
        let arguments = arguments(&runs, "first/model", name, &[settings, &["policy.device=pjrt:cpu"]].concat());
        on_device(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        tensors(&runs, &format!("{name}/model"))
    };
    // With advantages of 0, training changes nothing.
    let still = ["grpo.advantage_scale=0", "loss.beta=0", "optimizer.weight_decay=0", "grpo.max_steps=1"];
    let first = tensors(&runs, "first/model");
    assert_eq!(train("second", &still), first);
    let third = train("third", &[]);
    assert_ne!(third, first);
    on_device(&["train", "--resume", &runs.text("third"), "--set", "grpo.max_steps=3"]);
    assert_ne!(tensors(&runs, "third/model"), third);
}
