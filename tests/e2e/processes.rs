//! Runs of two processes: they take the same steps as one, and both end if one of them ends.

use crate::support::{
    Call, Runs, assert_has, assert_same_run, both, copy, grpo, names, processes, signal, tiny, wait_until,
};
use rustix::process::Signal;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

/// Settings of a run that takes a second, with an evaluation and two checkpoints.
const SHORT: [&str; 5] =
    ["warmup.steps=4", "grpo.max_steps=4", "run.save_steps=2", "eval.eval_steps=2", "eval.num_problems=8"];

/// Settings of a run that is long enough to be killed.
const LONG: [&str; 5] =
    ["warmup.steps=4", "grpo.max_steps=4000", "run.save_steps=2", "run.save_total_limit=0", "eval.eval_steps=0"];

/// Starts both processes of a run in the folder `name`. The second one has no folder.
fn start(runs: &Runs, name: &str, prepare: impl Fn(Call) -> Call) -> [Child; 2] {
    let [leader, follower] = processes();
    let leader = prepare(runs.tiny(name).set(leader)).spawn();
    [leader, prepare(grpo(["train", &tiny(), "--run-dir", "/nowhere"]).set(runs.settings()).set(follower)).spawn()]
}

fn wait_for_checkpoint(runs: &Runs, name: &str, child: &mut Child, checkpoint: &str) {
    let folder = runs.path(name).join("checkpoints");
    wait_until(child, checkpoint, || {
        names(&folder).iter().any(|name| name.starts_with("step-") && &**name >= checkpoint)
    });
}

/// Settings that make a run of one process of it.
pub(crate) const ALONE: [&str; 3] =
    ["distributed.coordinator_address=null", "distributed.num_processes=null", "distributed.process_id=null"];

#[test]
fn two_processes_train_bit_for_bit_like_one() {
    let runs = Runs::new(&SHORT);
    runs.train("one");
    let [leader, follower] = both(start(&runs, "two", |call| call));
    assert_eq!((leader.code, follower.code), (Some(0), Some(0)), "{leader}{follower}");
    assert_eq!(follower.stdout, "", "a follower prints nothing");
    assert_same_run(&runs.path("one"), &runs.path("two"));
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn two_processes_with_a_mesh_each_train_bit_for_bit_like_one() {
    let mesh = [
        "policy.device=pjrt:cpu",
        "policy.mesh.fsdp=2",
        // The characters of the tiny model, 53, do not divide.
        "policy.logical_axis_rules.vocab=[tensor]",
        "grpo.max_steps=2",
    ];
    let runs = Runs::new(&[&SHORT[..], &mesh].concat());
    runs.tiny("one").quick_cpu().succeed();
    let [leader, follower] = both(start(&runs, "two", Call::quick_cpu));
    assert_eq!((leader.code, follower.code), (Some(0), Some(0)), "{leader}{follower}");
    assert_same_run(&runs.path("one"), &runs.path("two"));
}

#[test]
fn if_a_process_is_killed_the_other_names_it_and_the_run_resumes() {
    for killed in 0..2 {
        let runs = Runs::new(&LONG);
        let mut children = start(&runs, "run", |call| call);
        wait_for_checkpoint(&runs, "run", &mut children[0], "step-000004");
        children[killed].kill().expect("SIGKILL");
        let said = both(children);
        let other = &said[1 - killed];
        assert_eq!((said[killed].code, other.code), (None, Some(2)), "{}{}", said[0], said[1]);
        assert_has(&other.stderr, &[&format!("process {killed} (127.0.0.1:"), "has closed its connection"]);
        // The checkpoint is whole: two processes go on from it like one. Only the first has the folder.
        copy(&runs.path("run"), &runs.path("alone"));
        let from = ["--from", "step-000002"];
        let settings = ["grpo.max_steps=4", "eval.eval_steps=2", "eval.num_problems=8"];
        let [leader, follower] = processes();
        let leader = runs.resume("run").args(from).set(settings).set(leader).spawn();
        // Assignments of other sections are the leader's; this one is not complete without its configuration.
        let of_leader = ["rewards.http.judge.headers.X-Api-Key=secret"];
        let follower = grpo(["train", "--resume", "/nowhere"]).args(from).set(of_leader).set(follower).spawn();
        let [leader, follower] = both([leader, follower]);
        assert_eq!((leader.code, follower.code), (Some(0), Some(0)), "{leader}{follower}");
        runs.resume("alone").args(from).set(settings).set(ALONE).succeed();
        assert_same_run(&runs.path("alone"), &runs.path("run"));
    }
}

/// Settings of a run that is long enough to be killed and resumes like a shorter one, because its learning rate does not depend on its length.
const KILLED: [&str; 7] = [
    "warmup.steps=4",
    "run.save_steps=3",
    "run.save_total_limit=0",
    "eval.eval_steps=4",
    "eval.num_problems=8",
    "optimizer.lr_scheduler_type=constant",
    "optimizer.warmup_ratio=0",
];

/// Returns which process a seed kills, and the number of rows in the log after which it does.
fn victim(seed: u64) -> (usize, usize) {
    let random = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407) >> 33;
    ((random % 2) as usize, 1 + (random / 2 % 16) as usize)
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn runs_that_are_killed_at_random_resume_to_the_result_of_an_uninterrupted_run() {
    let seeds = 0..6;
    let victims: Vec<(usize, usize)> = seeds.map(victim).collect();
    assert!([0, 1].iter().all(|process| victims.iter().any(|(victim, _)| victim == process)), "{victims:?}");
    let runs = Runs::new(&KILLED);
    for (killed, after) in victims {
        let (what, name) = (format!("process {killed}, killed after {after} rows"), format!("run-{killed}-{after}"));
        let log = runs.path(&name).join("metrics.jsonl");
        let mut children = start(&runs, &name, |call| call.set(["grpo.max_steps=4000"]));
        wait_until(&mut children[0], &what, || {
            std::fs::read(&log).is_ok_and(|text| text.iter().filter(|byte| **byte == b'\n').count() >= after)
        });
        children[killed].kill().expect("SIGKILL");
        let said = both(children);
        let other = &said[1 - killed];
        assert_eq!((said[killed].code, other.code), (None, Some(2)), "{what}: {}{}", said[0], said[1]);
        assert_has(&other.stderr, &[&format!("process {killed} (127.0.0.1:")]);
        // The last row may be incomplete.
        let text = std::fs::read_to_string(&log).expect("the log");
        let rows = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let done = rows.filter_map(|row| row["step"].as_u64()).max().expect("a row");
        let steps = [format!("grpo.max_steps={}", done + 2)];
        let [leader, follower] = processes();
        let leader = runs.resume(&name).set(&steps).set(leader).spawn();
        let follower = grpo(["train", "--resume", "/nowhere"]).set(follower).spawn();
        let [leader, follower] = both([leader, follower]);
        assert_eq!((leader.code, follower.code), (Some(0), Some(0)), "{what}: {leader}{follower}");
        let uninterrupted = format!("{name}-uninterrupted");
        runs.tiny(&uninterrupted).set(&steps).succeed();
        assert_same_run(&runs.path(&uninterrupted), &runs.path(&name));
    }
}

#[test]
fn a_signal_to_any_process_stops_all_after_a_checkpoint() {
    for stopped in 0..2 {
        let runs = Runs::new(&LONG);
        let mut children = start(&runs, "run", |call| call);
        wait_for_checkpoint(&runs, "run", &mut children[0], "step-000002");
        signal(&children[stopped], Signal::TERM);
        let [leader, follower] = both(children);
        assert_eq!((leader.code, follower.code), (Some(3), Some(3)), "{leader}{follower}");
    }
}

#[test]
fn a_process_with_another_configuration_ends_both_and_the_key_is_named() {
    let runs = Runs::new(&SHORT);
    let [leader, follower] = processes();
    let leader = runs.tiny("run").set(leader).spawn();
    let follower =
        grpo(["train", &tiny()]).set(runs.settings()).set(follower).set(["optimizer.learning_rate=0.25"]).spawn();
    for said in both([leader, follower]) {
        assert_eq!(said.code, Some(2), "{said}");
        assert_has(&said.stderr, &["process 1 (127.0.0.1:", "optimizer.learning_rate (0.25, and 0.005 at process 0)"]);
    }
    assert!(!runs.path("run").exists(), "the folder is created when all processes agree");
}

#[test]
fn a_missing_process_is_named_after_the_limit() {
    let runs = Runs::new(&SHORT);
    let [leader, _] = processes();
    let error = runs.tiny("run").set(leader).set(["distributed.initialization_timeout=1"]).refuse();
    assert_has(&error, &["process 1 is not connected", "within 1 seconds"]);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_process_that_waits_says_for_whom_and_ends_at_once() {
    for process in 0..2 {
        let runs = Runs::new(&SHORT);
        let mut call = runs.tiny("run").set(processes()[process].clone());
        call.0.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = call.0.spawn().expect("the binary starts");
        let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
        let waits = lines.by_ref().map_while(Result::ok).find(|line| line.contains(" waits ")).expect("a line");
        let expected = ["for process 1 (", "process 1 waits for process 0 at "];
        assert_has(&waits, &[expected[process], " of 300 seconds)"]);
        signal(&child, Signal::INT);
        assert_eq!(child.wait().expect("an end").code(), Some(130), "the first signal ends it");
        assert!(!runs.path("run").exists());
    }
}

#[test]
fn processes_may_have_other_settings_of_the_run() {
    let runs = Runs::new(&SHORT);
    let [leader, follower] = processes();
    let leader = runs.tiny("run").set(leader).spawn();
    let own = ["run.name=other", "run.save_steps=1", "run.log_completions_steps=7"];
    let follower =
        grpo(["train", &tiny(), "--run-dir", "/nowhere"]).set(runs.settings()).set(follower).set(own).spawn();
    let [leader, follower] = both([leader, follower]);
    assert_eq!((leader.code, follower.code), (Some(0), Some(0)), "{leader}{follower}");
    assert_eq!(names(&runs.path("run/checkpoints")).last().map(String::as_str), Some("step-000004"));
}
