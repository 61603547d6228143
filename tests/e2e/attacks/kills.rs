//! A run that is killed at random moments again and again ends with the bits of an undisturbed run.

use super::rng;
use crate::support::{Runs, assert_same_run, finish};
use rand::RngExt;
use std::path::Path;
use std::process::Child;
use std::time::Duration;

/// Both phases, several updates, a reference, evaluations and checkpoints in between.
const SETTINGS: [&str; 8] = [
    "warmup.steps=40",
    "grpo.max_steps=60",
    "grpo.num_iterations=2",
    "loss.beta=0.02",
    "eval.eval_steps=8",
    "run.save_steps=5",
    "run.save_total_limit=2",
    "run.log_completions_steps=4",
];

/// Begins the run, or goes on with what there is.
fn go_on(runs: &Runs, name: &str, run: &Path) -> Child {
    let call = if run.join("config.yaml").exists() { runs.resume(name) } else { runs.tiny(name) };
    call.spawn()
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn sigkill_at_random_moments() {
    let runs = Runs::new(&SETTINGS);
    runs.train("whole");
    let (run, mut rng) = (runs.path("killed"), rng(1));
    for _ in 0..12 {
        let mut child = go_on(&runs, "killed", &run);
        std::thread::sleep(Duration::from_millis(rng.random_range(1..700)));
        child.kill().expect("SIGKILL, or it has ended");
        finish(child, "killed");
    }
    let said = finish(go_on(&runs, "killed", &run), "the end");
    assert_eq!(said.code, Some(0), "{said}");
    assert_same_run(&runs.path("whole"), &run);
}
