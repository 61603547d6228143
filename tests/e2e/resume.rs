//! A run that was killed or stopped ends like one that was not.

use crate::support::{Runs, Said, assert_has, assert_same_run, copy, json, names, signal, wait_until};
use rustix::process::Signal;
use serde_json::Value;
use std::path::Path;
use std::process::Child;

/// Slow enough to be caught in the act, in both phases.
const SETTINGS: [&str; 8] = [
    "warmup.steps=60",
    "grpo.max_steps=200",
    "grpo.num_iterations=2",
    "loss.beta=0.02",
    "eval.eval_steps=8",
    "run.save_steps=5",
    "run.save_total_limit=2",
    "run.log_completions_steps=4",
];

/// Waits until the log of a run has a row of `phase` at `step` or later. Its last row may be half written.
fn wait_for_step(child: &mut Child, run: &Path, phase: &str, step: u64) {
    wait_until(child, &format!("step {step} of {phase}"), || {
        let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
        let mut rows = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        rows.any(|row| row["phase"] == phase && row["step"].as_u64().is_some_and(|at| at >= step))
    });
}

/// Kills a run that is still going on.
fn kill(mut child: Child, run: &Path) {
    child.kill().expect("SIGKILL");
    assert_eq!(child.wait().expect("ended").code(), None, "killed, not ended");
    assert!(!run.join("summary.json").exists(), "killed in mid-run");
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_killed_run_resumes_bit_for_bit() {
    let runs = Runs::new(&SETTINGS);
    runs.train("whole");
    let killed = runs.path("killed");
    // In the warm-up between two checkpoints, in GRPO, and in GRPO again.
    let mut child = runs.tiny("killed").spawn();
    for (phase, step) in [("warmup", 23), ("grpo", 12), ("grpo", 37)] {
        wait_for_step(&mut child, &killed, phase, step);
        kill(child, &killed);
        child = runs.resume("killed").spawn();
    }
    let said: Said = child.wait_with_output().expect("ended").into();
    assert_eq!(said.code, Some(0));
    assert_has(&said.stdout, &["continued from step-"]);
    assert_same_run(&runs.path("whole"), &killed);
}

#[test]
fn a_run_killed_before_its_first_checkpoint_begins_again() {
    let runs = Runs::new(&["warmup.steps=40", "grpo.max_steps=2", "run.save_steps=0"]);
    runs.train("whole");
    let mut child = runs.tiny("killed").spawn();
    wait_for_step(&mut child, &runs.path("killed"), "warmup", 1);
    kill(child, &runs.path("killed"));
    runs.resume("killed").succeed();
    assert_same_run(&runs.path("whole"), &runs.path("killed"));
}

#[test]
fn half_a_row_and_half_a_checkpoint_are_taken_back() {
    let runs = Runs::new(&["warmup.steps=3", "grpo.max_steps=8", "run.save_steps=4"]);
    runs.train("whole");
    let torn = runs.path("torn");
    copy(&runs.path("whole"), &torn);
    // What a crash in the middle of step 7 would leave.
    for file in ["metrics.jsonl", "completions.jsonl"] {
        let file = format!("torn/{file}");
        runs.write(&file, runs.read(&file) + "{\"phase\":\"grpo\",\"st");
    }
    std::fs::remove_dir_all(torn.join("checkpoints/step-000008")).expect("removed");
    std::fs::create_dir(torn.join("checkpoints/.tmp-step-000008")).expect("created");
    runs.write("torn/checkpoints/.tmp-step-000008/model.safetensors", "half");
    runs.resume("torn").succeed();
    assert_same_run(&runs.path("whole"), &torn);
    assert!(names(&torn.join("checkpoints")).iter().all(|name| !name.starts_with('.')));
}

#[test]
fn an_earlier_checkpoint_can_be_chosen_and_later_ones_are_kept() {
    let runs = Runs::new(&["warmup.steps=3", "grpo.max_steps=8", "run.save_steps=2", "run.save_total_limit=0"]);
    runs.train("whole");
    copy(&runs.path("whole"), &runs.path("again"));
    let text = runs.resume("again").args(["--from", "step-000004"]).succeed();
    assert_has(&text, &["continued from step-000004", "kept as "]);
    assert_same_run(&runs.path("whole"), &runs.path("again"));
    assert!(names(&runs.path("again/checkpoints")).contains(&"step-000006.old-1".to_owned()));
    let text = runs.resume("again").args(["--from", "step-000005"]).refuse();
    assert_has(&text, &["no checkpoint `step-000005`", "step-000006"]);
}

#[test]
fn coefficients_and_a_reference_that_move_go_on_where_they_were() {
    let runs = Runs::new(&[
        "warmup.steps=15",
        "grpo.max_steps=6",
        "run.save_steps=2",
        "grpo.use_kl_in_reward=true",
        "grpo.kl_ctrl={type: adaptive, horizon: 2000}",
        "grpo.use_adaptive_entropy=true",
        "grpo.entropy_target=10",
        "grpo.sync_ref_model=true",
        "grpo.ref_model_sync_steps=3",
        "grpo.filter_groups.enable=true",
    ]);
    runs.train("whole");
    copy(&runs.path("whole"), &runs.path("again"));
    runs.resume("again").args(["--from", "step-000002"]).succeed();
    assert_same_run(&runs.path("whole"), &runs.path("again"));
    let saved = |name: &str, step: &str| {
        let checkpoint = runs.path(name).join("checkpoints").join(step);
        let reference = std::fs::read(checkpoint.join("reference.safetensors")).expect("a reference");
        (json(&checkpoint.join("state.json"))["coefficients"].clone(), reference)
    };
    let (coefficients, reference) = saved("whole", "step-000006");
    assert!((coefficients.clone(), reference.clone()) == saved("again", "step-000006"));
    let (before, followed) = saved("whole", "step-000002");
    assert!(reference != followed, "the reference has followed after step 3");
    for key in ["kl_coef", "entropy_coef"] {
        assert!(coefficients[key].is_string() && coefficients[key] != before[key], "{key}: {before} {coefficients}");
    }
}

#[test]
fn a_changed_configuration_is_not_the_same_run() {
    let runs = Runs::new(&["warmup.steps=1", "grpo.max_steps=2"]);
    runs.train("a");
    let text = runs.read("a/config.yaml");
    runs.write("a/config.yaml", text.replace("num_generations: 8", "num_generations: 9"));
    assert_has(&runs.resume("a").refuse(), &["has changed in grpo.num_generations (from 8 to 9)"]);
    let both = "grpo.num_generations (from 8 to 9), loss.beta (from 0.0 to 0.5)";
    assert_has(&runs.resume("a").set(["loss.beta=0.5"]).refuse(), &[both]);
    // What is only shown or saved may change.
    runs.write("a/config.yaml", text.replace("save_total_limit: 3", "save_total_limit: 1"));
    assert_has(&runs.resume("a").succeed(), &["changed: run.save_total_limit (from 3 to 1)"]);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
#[cfg(unix)]
fn an_interrupted_run_saves_says_how_to_go_on_and_does() {
    let runs = Runs::new(&SETTINGS);
    runs.train("whole");
    for (name, sent, phase, step) in [("int", Signal::INT, "warmup", 12), ("term", Signal::TERM, "grpo", 27)] {
        let run = runs.path(name);
        let mut child = runs.tiny(name).spawn();
        wait_for_step(&mut child, &run, phase, step);
        signal(&child, sent);
        let said: Said = child.wait_with_output().expect("ended").into();
        assert_eq!(said.code, Some(3), "a stopped run is neither done nor failed");
        assert_has(&said.stdout, &[&format!("grpo train --resume {}", run.display())]);
        assert!(!run.join("summary.json").exists() && run.join("curves.svg").exists());
        // The step at hand was finished and is in the checkpoint.
        let newest = names(&run.join("checkpoints")).pop().expect("a checkpoint");
        let saved = json(&run.join("checkpoints").join(newest).join("state.json"));
        let bytes = std::fs::metadata(run.join("metrics.jsonl")).expect("metrics").len();
        assert_eq!(saved["metrics_bytes"].as_u64(), Some(bytes));
        runs.resume(name).succeed();
        assert_same_run(&runs.path("whole"), &run);
    }
}

#[test]
fn two_processes_do_not_share_a_run() {
    let runs = Runs::new(&SETTINGS);
    let mut child = runs.tiny("a").spawn();
    wait_for_step(&mut child, &runs.path("a"), "warmup", 1);
    assert_has(&runs.resume("a").refuse(), &["another process"]);
    kill(child, &runs.path("a"));
}
