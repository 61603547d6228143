//! Settings of TensorBoard and Weights & Biases, and a run that is not uploaded. What their own programs read is in tests/python.

use crate::support::{Runs, command, json, names, refuse, refused, stderr, tiny};
use serde_json::Value;

const SHORT: [&str; 4] = ["warmup.steps=3", "grpo.max_steps=4", "eval.eval_steps=2", "run.save_steps=2"];

#[test]
fn a_run_that_cannot_be_uploaded_is_done_all_the_same_and_says_how_to_upload_it() {
    let runs = Runs::new(&[]);
    let mut train = command(&["train", "--config", &tiny().display().to_string(), "--run-dir", &runs.text("a")]);
    train.args(SHORT.iter().flat_map(|setting| ["--set", setting]));
    // The mode of the environment counts where the configuration has none.
    let output = train.env("WANDB_MODE", "online").env("PATH", "/nonexistent").output().expect("the binary starts");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let part = names(&runs.path("a/wandb")).pop().expect("a part");
    let warning = stderr(&output);
    assert_eq!(warning.matches("no program `wandb` on PATH").count(), 2, "at the beginning and at the end: {warning}");
    assert!(warning.contains(&format!("wandb sync {}", runs.path("a/wandb").join(&part).display())), "{warning}");
    assert_eq!(json(&runs.path("a/summary.json"))["steps"], Value::from(4));
}

#[test]
fn settings_of_wandb_are_checked_before_anything_runs() {
    for (setting, key) in [
        ("wandb.mode=onlin", "wandb.mode"),
        ("wandb.project=a/b", "wandb.project"),
        ("wandb.tags=['']", "wandb.tags"),
        ("wandb.projct=a", "project"),
        ("logging.tensorbord=true", "tensorboard"),
    ] {
        let text = refuse(&["train", "--print-config", "--set", setting]);
        assert!(text.contains(key), "{setting}: {text}");
    }
    let arguments = ["train", "--print-config"];
    let output = command(&arguments).env("WANDB_MODE", "shared").output().expect("the binary starts");
    let text = refused(&arguments, &output);
    assert!(text.contains("WANDB_MODE") && text.contains("shared"), "{text}");
}
