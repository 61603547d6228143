//! Training that starts from an adapter.

use crate::support::{Call, Runs, assert_has, json};
use crate::tiny_model::{call, train};
use grpo_models::{Adapter, ModelFolder};
use serde_json::{Value, json};

/// Returns the tensors of an adapter.
fn tensors(runs: &Runs, adapter: &str) -> Vec<Vec<f32>> {
    let base = ModelFolder::open(&runs.path("model")).unwrap();
    let adapter = Adapter::open(&runs.path(adapter), base.config()).unwrap();
    let of = |matrix| [adapter.lora_a(matrix).unwrap().to_vec(), adapter.lora_b(matrix).unwrap().to_vec()];
    adapter.matrices().iter().flat_map(of).collect()
}

/// Trains an adapter into `first/model`.
fn with_adapter() -> Runs {
    let runs = Runs::small();
    train(&runs, "model", "first", &["lora={r: 3, lora_alpha: 5, target_modules: '.*[qv]_proj'}"]);
    runs
}

/// With advantages of 0, training changes nothing: the exported adapter equals the initial one.
const STILL: [&str; 4] = ["grpo.advantage_scale=0", "loss.beta=0", "optimizer.weight_decay=0", "grpo.max_steps=1"];

#[test]
#[ignore = "GRPO_TESTS=all"]
fn training_starts_from_an_adapter_given_as_the_model() {
    let runs = with_adapter();
    let mut written = json(&runs.path("first/model/adapter_config.json"));
    assert_eq!((&written["target_modules"], &written["r"]), (&json!(["q_proj", "v_proj"]), &json!(3)));
    let first = tensors(&runs, "first/model");
    assert!(first.iter().flatten().any(|value| *value != 0.0));
    train(&runs, "first/model", "second", &STILL);
    assert_eq!(tensors(&runs, "second/model"), first);
    let (base, folder) = (format!("model: {}", runs.text("model")), format!("adapter: {}", runs.text("first/model")));
    assert_has(&runs.read("second/config.yaml"), &[&base, "r: 3", "- q_proj", &folder]);
    // The same adapter as `lora.adapter`, and a resumed run.
    let adapter = format!("lora={{adapter: {}}}", runs.text("first/model"));
    train(&runs, "model", "third", &[&STILL[..], &[&adapter]].concat());
    assert_eq!(tensors(&runs, "third/model"), first);
    let evaluated = |run: &str| runs.metrics(run)[0]["eval/pass@1"].clone();
    assert_eq!(evaluated("second"), evaluated("third"));
    train(&runs, "first/model", "fourth", &[]);
    assert_ne!(tensors(&runs, "fourth/model"), first);
    runs.resume("fourth").set(["grpo.max_steps=3"]).succeed();

    let error = call(&runs, "first/model", "refused", &["lora={r: 4}"]).refuse();
    assert_has(&error, &["`lora.r`: expected 3", "got 4"]);
    written["base_model_name_or_path"] = Value::Null;
    runs.write("first/model/adapter_config.json", written.to_string());
    let error = call(&runs, "first/model", "refused", &[]).refuse();
    assert_has(&error, &["`model`: expected the base of the adapter", "lora: { adapter"]);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn training_on_a_device_starts_from_an_adapter_given_as_the_model() {
    let runs = with_adapter();
    let train = |name: &str, settings: &[&str]| {
        let call: Call = call(&runs, "first/model", name, settings).set(["policy.device=pjrt:cpu"]);
        call.quick_cpu().succeed();
        tensors(&runs, &format!("{name}/model"))
    };
    let first = tensors(&runs, "first/model");
    assert_eq!(train("second", &STILL), first);
    let third = train("third", &[]);
    assert_ne!(third, first);
    runs.resume("third").set(["grpo.max_steps=3"]).quick_cpu().succeed();
    assert_ne!(tensors(&runs, "third/model"), third);
}
