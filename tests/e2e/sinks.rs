//! Settings of TensorBoard and Weights & Biases, and a run that is not uploaded. What their own programs read is in tests/python.

use crate::support::{Runs, assert_has, grpo, json, names};
use serde_json::Value;

const SHORT: [&str; 4] = ["warmup.steps=3", "grpo.max_steps=4", "eval.eval_steps=2", "run.save_steps=2"];

#[test]
fn a_run_that_cannot_be_uploaded_is_done_all_the_same_and_says_how_to_upload_it() {
    let runs = Runs::new(&SHORT);
    // The mode of the environment counts where the configuration has none.
    let warning = runs.tiny("a").env("WANDB_MODE", "online").env("PATH", "/nonexistent").exit(0).stderr;
    let part = names(&runs.path("a/wandb")).pop().expect("a part");
    assert_eq!(warning.matches("no program `wandb` on PATH").count(), 2, "at the beginning and at the end: {warning}");
    assert_has(&warning, &[&format!("wandb sync {}", runs.path("a/wandb").join(&part).display())]);
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
        assert_has(&grpo(["train", "--print-config"]).set([setting]).refuse(), &[key]);
    }
    let text = grpo(["train", "--print-config"]).env("WANDB_MODE", "shared").refuse();
    assert_has(&text, &["WANDB_MODE", "shared"]);
}
