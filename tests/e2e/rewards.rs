//! Reward programs in a run.

use crate::support::{Runs, command, names, refuse, rows, stderr, succeed, tiny, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use std::path::Path;

const SHORT: [&str; 4] = ["warmup.steps=2", "grpo.max_steps=3", "eval.eval_steps=0", "run.save_steps=0"];

/// Returns the arguments of `train` with a reward `judge` that is a shell script.
fn arguments(runs: &Runs, script: &Path, settings: &[&str]) -> Vec<String> {
    // One batch per rollout, because a failing program is restarted with a delay for each batch.
    let judge = format!("rewards.programs={{judge: {{command: [/bin/sh, {}], batch_size: 256}}}}", script.display());
    let mut arguments: Vec<String> =
        ["train", &tiny().display().to_string(), "--run-dir", &runs.text("a")].map(Into::into).into();
    for setting in SHORT.iter().chain(settings).copied().chain([judge.as_str()]) {
        arguments.extend(["--set".to_owned(), setting.to_owned()]);
    }
    arguments
}

fn as_strs(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

#[test]
fn a_program_that_is_missing_or_cannot_work_leaves_nothing_behind() {
    let runs = Runs::new(&[]);
    let missing = "rewards.programs={judge: {command: [/nowhere/judge]}}";
    let text = refuse(&["train", &tiny().display().to_string(), "--run-dir", &runs.text("a"), "--set", missing]);
    assert!(text.contains("rewards.programs.judge.command") && text.contains("/nowhere/judge"), "{text}");
    let text = refuse(&as_strs(&arguments(&runs, Path::new("/nowhere/judge.sh"), &[])));
    assert!(text.contains("`judge` cannot judge a completion") && text.contains("/nowhere/judge.sh"), "{text}");
    assert!(!runs.path("a").exists());
}

#[test]
fn a_reward_program_may_answer_true_and_false() {
    let runs = Runs::new(&[]);
    let script = runs.path("judge.sh");
    let judge = "while read -r l; do case $l in *'\"completion\":\"1'*) echo '{\"reward\": false}';; *) echo '{\"reward\": true}';; esac; done";
    std::fs::write(&script, judge).expect("a script");
    succeed(&as_strs(&arguments(&runs, &script, &[])));
    let rows = rows(&runs.path("a/metrics.jsonl"));
    let means: Vec<f64> = rows.iter().filter_map(|row| row["rewards/judge/mean"].as_f64()).collect();
    assert!(means.len() == 3 && means.iter().all(|mean| (0.0..=1.0).contains(mean) && *mean > 0.0), "{means:?}");
}

#[test]
fn a_run_survives_a_program_that_fails_now_and_then_and_stops_where_it_always_does() {
    let runs = Runs::new(&[]);
    let script = runs.path("judge.sh");
    // The program fails to score every seventh completion.
    let now_and_then = "n=0; while read -r l; do n=$((n+1)); if [ $((n % 7)) = 0 ]; then echo '{\"error\": \"odd\"}'; else echo 1; fi; done";
    std::fs::write(&script, now_and_then).expect("a script");
    let arguments = arguments(&runs, &script, &["rewards.max_consecutive_failures=8"]);
    succeed(&as_strs(&arguments));
    let rows = rows(&runs.path("a/metrics.jsonl"));
    let failures = rows.iter().filter(|row| row["phase"] == "grpo").map(|row| row["rewards/judge/failures"].as_f64());
    assert!(failures.clone().count() == 3 && failures.clone().all(|count| count > Some(0.0)), "{rows:?}");

    // This program exits after the first completion, which is the probe's.
    std::fs::remove_dir_all(runs.path("a")).expect("a run");
    std::fs::write(
        &script,
        "if [ -e \"$0.done\" ]; then echo gone >&2; exit 1; fi; touch \"$0.done\"; read -r l; echo 1; exit 1",
    )
    .expect("a script");
    let text = refused_at_last(&as_strs(&arguments));
    assert!(text.contains("`judge`") && text.contains("gone") && text.contains("--resume"), "{text}");
    assert_eq!(names(&runs.path("a/checkpoints")), ["step-000000"]);
    // With a fixed program, the run resumes and finishes.
    std::fs::write(&script, now_and_then).expect("a script");
    succeed(&["train", "--resume", &runs.text("a")]);
    assert!(runs.path("a/summary.json").exists());
}

/// Returns the last line on standard error of a command that exits with code 2 after warnings.
fn refused_at_last(arguments: &[&str]) -> String {
    let output = command(arguments)
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .output()
        .expect("the binary starts");
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    stderr(&output).lines().last().unwrap_or_default().to_owned()
}

#[test]
fn a_second_signal_kills_a_program_that_hangs() {
    let runs = Runs::new(&[]);
    let (script, id) = (runs.path("judge.sh"), runs.path("id"));
    let hang = format!("read -r l; echo 1; read -r l; echo $$ > {0}.new; mv {0}.new {0}; sleep 1000", id.display());
    std::fs::write(&script, hang).expect("a script");
    let arguments = arguments(&runs, &script, &[]);
    let mut train = crate::support::spawn(&as_strs(&arguments));
    wait_until(&mut train, "a question to the program", || id.exists());
    let process = Pid::from_child(&train);
    for _ in 0..2 {
        kill_process(process, Signal::INT).expect("a signal");
        std::thread::sleep(std::time::Duration::from_millis(300));
    }
    assert_eq!(train.wait().expect("an end").code(), Some(130));
    let id = std::fs::read_to_string(&id).expect("an id");
    let stat = Path::new("/proc").join(id.trim()).join("stat");
    let limit = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z")) {
        assert!(std::time::Instant::now() < limit, "the program still runs");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}
