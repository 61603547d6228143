//! Reward programs in a run.

use crate::support::{Call, Runs, assert_has, grpo, names, signal, tiny, wait_for_end, wait_until};
use rustix::process::Signal;

const SHORT: [&str; 4] = ["warmup.steps=2", "grpo.max_steps=3", "eval.eval_steps=0", "run.save_steps=0"];

/// Trains into `a` with a reward `judge` that is the shell script `judge.sh`.
fn train(runs: &Runs) -> Call {
    // One batch per rollout, because a failing program is restarted with a delay for each batch.
    let script = runs.text("judge.sh");
    runs.tiny("a").set([format!("rewards.programs={{judge: {{command: [/bin/sh, {script}], batch_size: 256}}}}")])
}

#[test]
fn a_program_that_is_missing_or_cannot_work_leaves_nothing_behind() {
    let runs = Runs::new(&SHORT);
    let missing = "rewards.programs={judge: {command: [/nowhere/judge]}}";
    let text = grpo(["train", &tiny(), "--run-dir", &runs.text("a")]).set([missing]).refuse();
    assert_has(&text, &["rewards.programs.judge.command", "/nowhere/judge"]);
    assert_has(&train(&runs).refuse(), &["`judge` cannot judge a completion", &runs.text("judge.sh")]);
    assert!(!runs.path("a").exists());
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_run_survives_a_program_that_fails_now_and_then_and_stops_where_it_always_does() {
    let runs = Runs::new(&SHORT);
    // The program fails to score every seventh completion.
    let now_and_then = "n=0; while read -r l; do n=$((n+1)); if [ $((n % 7)) = 0 ]; then echo '{\"error\": \"odd\"}'; else echo 1; fi; done";
    runs.write("judge.sh", now_and_then);
    let train = || train(&runs).set(["rewards.max_consecutive_failures=8"]);
    train().succeed();
    let steps = runs.phase("a", "grpo");
    assert!(
        steps.len() == 3 && steps.iter().all(|row| row["rewards/judge/failures"].as_f64() > Some(0.0)),
        "{steps:?}"
    );

    // This program exits after the first completion, which is the probe's.
    std::fs::remove_dir_all(runs.path("a")).expect("a run");
    let gone = "if [ -e \"$0.done\" ]; then echo gone >&2; exit 1; fi; touch \"$0.done\"; read -r l; echo 1; exit 1";
    runs.write("judge.sh", gone);
    // The error follows warnings.
    let text = train().with_path().exit(2).stderr;
    assert_has(text.lines().last().expect("an error"), &["`judge`", "gone", "--resume"]);
    assert_eq!(names(&runs.path("a/checkpoints")), ["step-000000"]);
    // With a fixed program, the run resumes and finishes.
    runs.write("judge.sh", now_and_then);
    runs.resume("a").succeed();
    assert!(runs.path("a/summary.json").exists());
}

#[test]
fn a_second_signal_kills_a_program_that_hangs() {
    let runs = Runs::new(&SHORT);
    let id = runs.path("id");
    let hang = format!("read -r l; echo 1; read -r l; echo $$ > {0}.new; mv {0}.new {0}; sleep 1000", id.display());
    runs.write("judge.sh", hang);
    let mut child = train(&runs).spawn();
    wait_until(&mut child, "a question to the program", || id.exists());
    for _ in 0..2 {
        signal(&child, Signal::INT);
        std::thread::sleep(std::time::Duration::from_millis(300));
    }
    assert_eq!(child.wait().expect("an end").code(), Some(130));
    wait_for_end(runs.read("id").trim());
}
