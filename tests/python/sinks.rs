//! TensorBoard and Weights & Biases files of a run, read with their own programs.

use crate::readers::{Readers, WandbServer};
use crate::support::{Call, Runs, assert_has, grpo, names, refuse, rows};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const SHORT: [&str; 4] = ["warmup.steps=3", "grpo.max_steps=4", "eval.eval_steps=2", "run.save_steps=2"];

/// Returns `{TAG: {STEP: VALUE}}` of metrics.jsonl with the sinks' tags; null is NaN.
fn metrics(run: &Path) -> BTreeMap<String, BTreeMap<u64, f64>> {
    let mut metrics: BTreeMap<String, BTreeMap<u64, f64>> = BTreeMap::new();
    for row in rows(&run.join("metrics.jsonl")) {
        let series = match row["phase"].as_str().expect("a phase") {
            "grpo" => "train",
            other => other,
        };
        let step = row["step"].as_u64().expect("a step");
        for (name, value) in row.as_object().expect("an object") {
            if !["phase", "step", "pass_rule"].contains(&name.as_str()) {
                let tag = format!("{series}/{}", name.strip_prefix("eval/").unwrap_or(name));
                metrics.entry(tag).or_default().insert(step, value.as_f64().unwrap_or(f64::NAN));
            }
        }
    }
    metrics
}

fn same(a: f64, b: f64) -> bool {
    (a.is_nan() && b.is_nan()) || (a - b).abs() <= 1e-6 * b.abs()
}

#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn online_run_is_readable_in_tensorboard_and_wandb() {
    let (readers, server) = (Readers::install(), WandbServer::start());
    let settings = [
        "logging.tensorboard=true",
        "wandb.mode=online",
        "wandb.project=tests",
        "wandb.name=short",
        "wandb.tags=[a, b]",
    ];
    let runs = Runs::new(&[&SHORT[..], &settings].concat());
    let run = runs.path("a");
    let home = tempfile::tempdir().expect("a folder");
    let packages = readers.command("wandb", home.path());
    let Call(mut train) = runs.tiny("a");
    train.envs(packages.get_envs().filter_map(|(name, value)| Some((name, value?)))).envs(server.environment());
    let text = Call(train).exit(0).to_string();
    assert_has(&text, &["uploaded to Weights & Biases", "tensorboard --logdir"]);
    let metrics = metrics(&run);
    assert!(metrics.contains_key("train/reward") && metrics["eval/pass@1"].len() == 3);

    let board = readers.tensorboard(&run.join("tensorboard"));
    let scalars = board["scalars"].as_object().expect("scalars");
    assert_eq!(scalars.keys().collect::<BTreeSet<_>>(), metrics.keys().collect::<BTreeSet<_>>());
    for (tag, values) in &metrics {
        let read = scalars[tag].as_array().expect("points");
        assert_eq!(read.len(), values.len(), "{tag}");
        for (point, (step, value)) in read.iter().zip(values) {
            let found: f64 = point[1].as_str().and_then(|text| text.parse().ok()).expect("a number");
            assert!(point[0] == *step && same(found, *value), "{tag}: {point} for {value} at {step}");
        }
    }
    assert!(board["texts"]["config/text_summary"].as_str().expect("a text").contains("hidden_size: 32"));

    let id = std::fs::read_to_string(run.join("wandb-id")).expect("an id");
    let seen = server.seen();
    let seen = &seen[id.trim()];
    let created = &seen["runs"][0];
    assert_eq!((&created["project"], &created["displayName"]), (&json!("tests"), &json!("short")));
    assert_eq!(created["tags"], json!(["a", "b"]));
    assert_eq!(created["config"]["grpo"]["value"]["max_steps"], 4);
    let history = seen["history"].as_array().expect("rows");
    assert_eq!(history.len(), 3 + 4 + 3);
    for (tag, values) in &metrics {
        let series = tag.split('/').next().expect("a series");
        for (step, value) in values {
            let axis = format!("{series}/global_step");
            let row = history.iter().find(|row| row[&axis] == *step).expect("the row of the step");
            let found = row[tag].as_f64().or_else(|| row[tag].as_str()?.parse().ok()).expect("a number");
            assert!(same(found, *value), "{tag}: {found} for {value} at {step}");
        }
    }
    assert_eq!(seen["exit_codes"], json!([0]));
}

#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn benchmark_logs_every_variant_as_a_run() {
    let (readers, folder) = (Readers::install(), Runs::new(&[]));
    let text = "
name: tiny
shape: { batch: 2, tokens: 12, hidden: 16, vocab: 50 }
dtypes: [f32, bf16]
rounds: { warmup: 0, steps: 3 }
logging: { tensorboard: true }
wandb: { mode: offline, group: benches }
variants:
  fused: { threads: 1 }
  reference: { implementation: reference, threads: 1 }
";
    let (config, logs) = (folder.write("config.yaml", text), folder.path("logs"));
    let bench = || grpo(["bench", &config, "--json", "--log-dir", &folder.text("logs")]);
    let said = bench().exit(0);
    assert_has(&said.stderr, &["tensorboard --logdir", "wandb sync"]);
    let document = said.json();
    assert_eq!(names(&logs), ["tiny-bf16", "tiny-f32"]);
    for case in document["cases"].as_array().expect("problems") {
        for (name, measured) in case["variants"].as_object().expect("variants") {
            let run = logs.join(case["name"].as_str().expect("a name")).join(name);
            let rows = rows(&run.join("metrics.jsonl"));
            let times = measured["step_ms"]["all"].as_array().expect("times");
            assert_eq!((rows.len(), times.len()), (3, 3));
            for (row, ms) in rows.iter().zip(times) {
                assert!(same(row["bench/step_s"].as_f64().expect("a time") * 1e3, ms.as_f64().expect("a time")));
            }
            for field in ["bench/step_s_p50", "bench/compile_s", "mem/inputs_bytes"] {
                let (logged, said) = (rows[2][field].as_f64(), measured[field].as_f64());
                assert!(logged.is_some() && logged == said, "{field}: {logged:?} and {said:?}");
            }
            let board = readers.tensorboard(&run.join("tensorboard"));
            let scalars = board["scalars"].as_object().expect("scalars");
            assert_eq!(scalars["bench/step_s"].as_array().expect("points").len(), 3);
            assert!(scalars.contains_key("mem/workspace_bytes") && scalars.contains_key("bench/avg_step_ms"));
            assert_eq!(names(&run.join("wandb")).len(), 1);
        }
    }
    // A folder that is not empty is refused before the first measurement, and log files need a folder.
    assert_has(&bench().refuse(), &["is not empty"]);
    assert_has(&refuse(["bench", &config]), &["--log-dir"]);
}
