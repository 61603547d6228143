//! A run that diverges ends with the way back, and the way back works.

use crate::support::{Runs, assert_has, grpo, named_call, names, rows};

/// 1e40 is beyond f32: the first update leaves no finite weight.
const SETTINGS: [&str; 4] =
    ["warmup.steps=2", "grpo.max_steps=1", "loss.entropy_coef=0.1", "optimizer.learning_rate=1e40"];

#[test]
fn a_last_step_that_diverges_fails_and_the_command_that_it_names_goes_on() {
    let runs = Runs::new(&SETTINGS);
    let error = runs.tiny("a").refuse();
    assert_has(&error, &["the last finite checkpoint is step-000000"]);
    assert_eq!(names(&runs.path("a/checkpoints")), ["step-000000"]);
    assert!(!runs.path("a/summary.json").exists());
    // The command that the error names, with a rate that is low enough.
    let said = named_call(&error.replace("5e39", "1e-4")).succeed();
    assert_has(&said, &["changed: optimizer.learning_rate (from 1e+40 to 0.0001)"]);
    let change = rows(&runs.path("a/changes.jsonl")).pop().expect("a row");
    assert_eq!(
        (&change["checkpoint"], &change["key"], &change["to"]),
        (&"step-000000".into(), &"optimizer.learning_rate".into(), &1e-4.into())
    );
    assert!(runs.path("a/summary.json").exists());
}

#[test]
fn the_guard_skips_counts_and_gives_up() {
    let settings = [
        "warmup.steps=2",
        "grpo.max_steps=6",
        "loss.entropy_coef=0.1",
        "optimizer.skip_grad_norm=1e-30",
        "optimizer.max_consecutive_skips=3",
    ];
    let runs = Runs::new(&settings);
    let error = runs.tiny("a").exit(2).stderr;
    assert_has(&error, &["3 updates in a row were skipped", "--from step-000000"]);
    let steps = runs.phase("a", "grpo");
    assert_eq!(steps.iter().map(|row| &row["skipped_updates"]).collect::<Vec<_>>(), [1.0, 1.0]);
    let error = grpo(["train"]).set(["optimizer.skip_grad_norm=0"]).refuse();
    assert_has(&error, &["optimizer.skip_grad_norm"]);
}
