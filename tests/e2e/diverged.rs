//! A run that diverges ends with the way back, and the way back works.

use crate::support::{Runs, names, refuse, refused, rows, stderr, succeed};
use crate::support::{command, tiny};

/// 1e40 is beyond f32: the first update leaves no finite weight.
const SETTINGS: [&str; 4] =
    ["warmup.steps=2", "grpo.max_steps=1", "loss.entropy_coef=0.1", "optimizer.learning_rate=1e40"];

#[test]
fn a_last_step_that_diverges_fails_and_the_command_that_it_names_goes_on() {
    let runs = Runs::new(&[]);
    let (config, run) = (tiny().display().to_string(), runs.text("a"));
    let mut arguments = vec!["train", "--config", &config, "--run-dir", &run];
    SETTINGS.iter().for_each(|setting| arguments.extend(["--set", setting]));
    let output = command(&arguments).output().expect("the binary starts");
    let error = refused(&arguments, &output);
    assert!(error.contains("the last finite checkpoint is step-000000"), "{error}");
    assert_eq!(names(&runs.path("a/checkpoints")), ["step-000000"]);
    assert!(!runs.path("a/summary.json").exists());
    // The command as it stands there, with a rate that is low enough.
    let (_, way) = error.split_once("`grpo ").expect("a command");
    let (way, _) = way.split_once('`').expect("its end");
    let way = way.replace("5e39", "1e-4");
    let said = succeed(&way.split(' ').collect::<Vec<_>>());
    assert!(said.contains("changed: optimizer.learning_rate (from 1e+40 to 0.0001)"), "{said}");
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
    let output = runs.spawn("a").wait_with_output().expect("ended");
    let error = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("3 updates in a row were skipped") && error.contains("--from step-000000"), "{error}");
    let rows = rows(&runs.path("a/metrics.jsonl"));
    let skipped: Vec<_> = rows.iter().filter(|row| row["phase"] == "grpo").map(|row| &row["skipped_updates"]).collect();
    assert_eq!(skipped, [1.0, 1.0]);
    let error = refuse(&["train", "--set", "optimizer.skip_grad_norm=0"]);
    assert!(error.contains("optimizer.skip_grad_norm"), "{error}");
}
