//! `policy.device`: the same run with its weights on a device, here XLA's CPU.

use crate::support::{assert_same_run, grpo_with, refuse, rows, stderr, stdout, tiny};
use pjrt::install::Kind;
use serde_json::Value;
use std::path::Path;

/// Small enough for programs that compile for longer than they run.
const SETTINGS: [&str; 12] = [
    "warmup.steps=4",
    "warmup.batch_size=16",
    "grpo.max_steps=4",
    "grpo.prompts_per_step=4",
    "grpo.gradient_accumulation_steps=2",
    "grpo.num_iterations=2",
    "loss.beta=0.02",
    "grpo.sync_ref_model=true",
    "grpo.ref_model_sync_steps=3",
    "eval.num_problems=8",
    "eval.eval_steps=2",
    "run.save_steps=2",
];

/// Trains to the end on `device` and returns what was printed.
fn train(run: &Path, device: &str, arguments: &[&str]) -> String {
    let (config, run) = (tiny().display().to_string(), run.display().to_string());
    let device = format!("policy.device={device}");
    let mut all = vec!["train", "--config", &config, "--run-dir", &run, "--set", &device];
    all.extend(SETTINGS.iter().chain(arguments).flat_map(|setting| ["--set", setting]));
    succeed(&all)
}

fn succeed(arguments: &[&str]) -> String {
    let output = grpo_with(Kind::Cpu, arguments).output().expect("the binary starts");
    assert_eq!(output.status.code(), Some(0), "{arguments:?}\n{}{}", stdout(&output), stderr(&output));
    stdout(&output)
}

#[test]
fn a_run_learns_the_same_on_a_device_and_goes_on_there_bit_for_bit() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name);
    train(&path("host"), "host", &[]);
    train(&path("whole"), "pjrt:cpu", &[]);
    let of = |name: &str| rows(&path(name).join("metrics.jsonl"));
    let (host, device) = (of("host"), of("whole"));
    assert_eq!(host.len(), device.len());
    let host_rows = host.len();
    let in_warmup = |row: &&Value| row["phase"] == "warmup";
    let mut steps = 0;
    for (host, device) in host.iter().filter(in_warmup).zip(device.iter().filter(in_warmup)) {
        for key in ["loss", "grad_norm", "learning_rate"] {
            let Some(expected) = host[key].as_f64() else { continue };
            let found = device[key].as_f64().expect("a number");
            assert!((found - expected).abs() <= 1e-4 * expected.abs(), "{key}: {found} on the device, {expected}");
            steps += 1;
        }
    }
    assert_eq!(steps, 3 * 4);
    // On policy the first update has ratios of exactly 1, and clips nothing.
    let first = device.iter().find(|row| row["phase"] == "grpo").expect("a step of GRPO");
    assert!(first["grad_norm"].as_f64().is_some_and(|norm| norm > 0.0), "{first}");

    train(&path("again"), "pjrt:cpu", &[]);
    assert_same_run(&path("whole"), &path("again"));
    let again = path("again").display().to_string();
    let text = succeed(&["train", "--resume", &again, "--from", "step-000002"]);
    assert!(text.contains("continued from step-000002"), "{text}");
    assert_same_run(&path("whole"), &path("again"));

    // A run that began on the host goes on there.
    let host = path("host").display().to_string();
    let resume = ["train", "--resume", &host, "--from", "step-000002", "--set", "policy.device=pjrt:cpu"];
    let text = succeed(&resume);
    assert!(text.contains("continued from step-000002") && text.contains("policy.device"), "{text}");
    assert_eq!(of("host").len(), host_rows);
}

#[test]
fn what_a_device_does_not_do_is_refused_by_its_key() {
    let config = tiny().display().to_string();
    let refused = |setting: &str| {
        refuse(&[
            "train",
            "--config",
            &config,
            "--set",
            "policy.device=pjrt:cpu",
            "--set",
            setting,
            "--run-dir",
            "/nowhere",
        ])
    };
    assert!(refused("lora={r: 4}").contains("lora"));
    assert!(refused("grpo.advantages.estimator=gae").contains("value head"));
    assert!(refused("grpo.backend=pjrt:cpu").contains("grpo.backend"));
    assert!(refused("grpo.implementation=logits").contains("grpo.implementation"));
    assert!(refused("policy.device=pjrt:gpu").contains("pjrt:cuda"));
    assert!(refuse(&["train", "--config", &config, "--set", "policy.dtype=bfloat16"]).contains("policy.dtype"));
}
