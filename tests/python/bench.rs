//! `grpo bench` of a model with transformers as a peer.

use crate::support::{Runs, grpo, repository};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;

#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn transformers_samples_and_trains_the_same_model() {
    let runs = Runs::new(&[]);
    let python = grpo_testkit::python::Python::install();
    // An environment's interpreter with the packages of the tests.
    let path = python.python_path().map(|path| format!("PYTHONPATH='{}' ", path.display())).unwrap_or_default();
    let program = python.program().to_str().expect("UTF-8");
    std::fs::create_dir_all(runs.path("venv/bin")).expect("a folder");
    let script = runs.write("venv/bin/python", format!("#!/bin/sh\n{path}exec '{program}' \"$@\"\n"));
    std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).expect("permissions");

    let model = format!("model={}", repository("tests/checkpoints/qwen3"));
    let settings = [
        model.as_str(),
        "rounds=1",
        "generation={rows: [2], prompts: [5], tokens: 4}",
        "update={rows: 4, prompt: 5, completion: 6, micro_batches: 2}",
        "threads=1",
    ];
    let call = grpo(["bench", &repository("configs/bench/generate.yaml"), "--json", "--variants", "grpo,transformers"]);
    let call = call.set(settings).args(["--peers-venv", &runs.text("venv")]).with_path();
    let report = call.exit(0).json();
    for case in report["cases"].as_array().expect("problems") {
        let [ours, theirs] = ["grpo", "transformers"].map(|system| &case["variants"][system]);
        assert_eq!((&ours["status"], &theirs["status"]), (&"measured".into(), &"measured".into()), "{case:#}");
        assert!(theirs["version"].as_str().is_some_and(|version| version.contains("transformers ")), "{theirs:#}");
        let names = |of: &Value| -> Vec<String> {
            let numbers = of.as_object().expect("numbers").iter().filter(|(_, value)| value["median"].is_number());
            // The difference of two short times may be noise.
            let numbers = numbers.filter(|(name, _)| case["work"] == "update" || !name.starts_with("tokens_per"));
            numbers.map(|(name, _)| name.clone()).collect()
        };
        assert_eq!(names(ours), names(theirs), "{case:#}");
        if case["work"] == "update" {
            // The same gradient of the same weights, up to the rounding of the dtype.
            let bound = if case["dtype"] == "f32" { 1e-3 } else { 0.05 };
            let [ours, theirs] = [ours, theirs].map(|system| system["grad_norm"].as_f64().expect("a norm"));
            assert!(ours > 1e-3 && (ours / theirs - 1.0).abs() < bound, "{ours} and {theirs}: {case:#}");
        }
    }
}
