//! Environments in runs of two processes: process 0 alone runs them, and both take the same steps.

use crate::conversations::{CALL, program, runs, value};
use crate::processes::ALONE;
use crate::support::{Call, Runs, Said, assert_has, assert_same_run, both, grpo, names, processes, signal, wait_until};
use crate::tiny_model::call;
use rustix::process::Signal;
use serde_json::json;
use std::process::Child;

/// Starts both processes of a run in the folder `name`. The second one has no folder.
fn start(runs: &Runs, name: &str, settings: &[&str]) -> [Child; 2] {
    let [leader, follower] = processes();
    let leader = call(runs, "model", name, settings).set(leader).spawn();
    [leader, call(runs, "model", "of-process-1", settings).set(follower).spawn()]
}

fn succeed(children: [Child; 2]) {
    let [leader, follower] = both(children);
    assert_eq!((leader.code, follower.code), (Some(0), Some(0)), "{leader}{follower}");
}

fn resume(runs: &Runs, name: &str, settings: &[&str]) {
    let [leader, follower] = processes();
    let leader = runs.resume(name).set(settings).set(leader).spawn();
    succeed([leader, grpo(["train", "--resume", "/nowhere"]).set(follower).spawn()]);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_calculator_answers_two_processes_like_one() {
    let runs = runs();
    runs.write_rows(8, |_| json!({"question": "What is 2+3?", "answer": "5", "completion": CALL}));
    let settings = [
        "environments={calculator: {built_in: calculator}}",
        "warmup={steps: 80, batch_size: 4, optimizer: {learning_rate: 0.03, lr_scheduler_type: constant}}",
        "rollout={max_completion_length: 120, temperature: 0.2, multi_turn: {max_tool_calling_iterations: 1}}",
        "data.held_out_fraction=0",
        "run.log_completions_steps=1",
        "optimizer.lr_scheduler_type=constant",
        "optimizer.warmup_ratio=0",
    ];
    call(&runs, "model", "one", &settings).succeed();
    succeed(start(&runs, "two", &settings));
    assert!(value(&runs.phase("two", "grpo")[0], "tools/call_frequency") > 0.5);
    assert_same_run(&runs.path("one"), &runs.path("two"));
    // The number of processes may change when a run resumes.
    runs.resume("two").set(["grpo.max_steps=3"]).set(ALONE).succeed();
    resume(&runs, "two", &["grpo.max_steps=4"]);
    runs.resume("one").set(["grpo.max_steps=4"]).succeed();
    assert_same_run(&runs.path("one"), &runs.path("two"));
}

/// Answers with a reward of 1 if the model writes a capital letter, after a time that differs from worker to worker and from answer to answer.
const SLOW: &str = "sleep 0.0$((n * $$ % 5)); case \"$l\" in *[A-Z]*) r=1;; *) r=0;; esac; echo '{\"content\": \"x\", \"reward\": '$r'}'";

#[test]
#[ignore = "GRPO_TESTS=all"]
fn slow_programs_answer_two_processes_like_one_and_run_in_the_leader_alone() {
    let runs = runs();
    let mut settings = program(&runs, &format!("echo $PPID >> {}; {SLOW}", runs.text("parents"))).to_vec();
    settings[0] = settings[0].replace("]}}", "], workers: 3}}");
    let more = ["data.training_chat_template=chatml", "run.log_completions_steps=1"];
    let all: Vec<&str> = settings.iter().map(String::as_str).chain(more).collect();
    call(&runs, "model", "one", &all).succeed();
    runs.write("parents", "");
    let children = start(&runs, "two", &all);
    let leader = children[0].id().to_string();
    succeed(children);
    assert_same_run(&runs.path("one"), &runs.path("two"));
    let parents = runs.read("parents");
    assert!(!parents.is_empty() && parents.lines().all(|parent| parent == leader), "{leader}: {parents}");
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn rewards_and_messages_at_random_are_those_of_the_leader_in_both_processes() {
    let runs = runs();
    let random = "r=$(od -An -N1 -tu1 /dev/urandom); echo '{\"content\": \"'$r'\", \"reward\": '$r'}'";
    let settings = program(&runs, random);
    let more = ["data.training_chat_template=chatml"];
    let all: Vec<&str> = settings.iter().map(String::as_str).chain(more).collect();
    // Checkpoints are only written if both processes have the same weights.
    succeed(start(&runs, "a", &all));
    resume(&runs, "a", &["grpo.max_steps=3"]);
    assert_eq!(names(&runs.path("a/checkpoints")).iter().filter(|name| *name == "step-000003").count(), 1);
    for row in runs.phase("a", "grpo") {
        assert!(value(&row, "grad_norm") > 0.0 && value(&row, "num_turns/max") == 2.0, "{row}");
    }
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn an_environment_that_fails_too_often_ends_both_processes_with_a_checkpoint() {
    let runs = runs();
    let answer = "if [ $n -gt 20 ]; then echo '{\"error\": \"out of words\"}'; else echo '{\"content\": \"x\", \"reward\": 1}'; fi";
    let settings = program(&runs, answer);
    let more =
        ["data.training_chat_template=chatml", "rollout.multi_turn.max_consecutive_failures=8", "run.save_steps=0"];
    let all: Vec<&str> = settings.iter().map(String::as_str).chain(more).collect();
    let [leader, follower] = both(start(&runs, "a", &all));
    assert_eq!((leader.code, follower.code), (Some(2), Some(2)), "{leader}{follower}");
    assert_has(&leader.stderr, &["`game` has failed in 8 conversations", "out of words", "--resume"]);
    assert_has(&follower.stderr, &["process 0 (127.0.0.1:", "`game` has failed in 8 conversations", "out of words"]);
    assert!(!names(&runs.path("a/checkpoints")).is_empty());
    program(&runs, "echo '{\"done\": true, \"reward\": 1}'");
    resume(&runs, "a", &[]);
    assert!(runs.path("a/summary.json").exists());
}

#[test]
fn an_environment_that_does_not_start_is_named_by_both_processes() {
    let runs = runs();
    for (environment, words) in [
        ("environments={game: {command: [/bin/sh, -c, 'exit 3']}}", "`game` cannot start a conversation"),
        ("environments={game: {command: [/nowhere/game]}}", "environments.game.command"),
    ] {
        let [leader, follower] = both(start(&runs, "a", &[environment]));
        assert_eq!((leader.code, follower.code), (Some(2), Some(2)), "{leader}{follower}");
        assert_has(&leader.stderr, &[words]);
        assert_has(&follower.stderr, &["process 0 (127.0.0.1:", words]);
        assert!(!runs.path("a").exists());
    }
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn agents_that_fail_in_the_first_step_end_both_processes() {
    let runs = runs();
    let settings = [
        "environments={game: {agent: [/bin/sh, -c, 'echo no network >&2; exit 3']}}",
        "data.training_chat_template=chatml",
        "data.held_out_fraction=0",
        "rollout.max_completion_length=100",
    ];
    let [leader, follower] = both(start(&runs, "a", &settings));
    assert_eq!((leader.code, follower.code), (Some(2), Some(2)), "{leader}{follower}");
    let words = ["`game` has failed in every conversation so far that asked it (16)", "exit status: 3"];
    assert_has(&leader.stderr, &words);
    assert_has(&follower.stderr, &words);
}

/// A run of two processes whose environment waits in a training step.
struct Waiting {
    runs: Runs,
    children: [Child; 2],
}

impl Waiting {
    /// Starts the processes, and waits until the environment is asked.
    fn start() -> Self {
        let runs = runs();
        let [asked, go] = ["asked", "go"].map(|name| runs.text(name));
        let answer = format!(
            ": > {asked}; until [ -e {go} ] || [ ! -e {asked} ]; do sleep 0.02; done; echo '{{\"done\": true, \"reward\": 1}}'"
        );
        let settings = program(&runs, &answer);
        let more = ["data.training_chat_template=chatml", "data.held_out_fraction=0", "grpo.max_steps=4000"];
        let all: Vec<&str> = settings.iter().map(String::as_str).chain(more).collect();
        let mut children = start(&runs, "a", &all);
        let path = runs.path("asked");
        wait_until(&mut children[0], "a question to the environment", || path.exists());
        Self { runs, children }
    }

    /// Lets the environment answer, and waits for the end of both processes.
    fn end(self) -> ([Said; 2], Runs) {
        self.runs.write("go", "");
        (both(self.children), self.runs)
    }
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_process_that_is_killed_while_an_environment_answers_ends_the_other() {
    for killed in 0..2 {
        let mut run = Waiting::start();
        run.children[killed].kill().expect("SIGKILL");
        let (said, _) = run.end();
        assert_eq!((said[killed].code, said[1 - killed].code), (None, Some(2)), "{}{}", said[0], said[1]);
        assert_has(&said[1 - killed].stderr, &[&format!("process {killed} (127.0.0.1:"), "has closed its connection"]);
    }
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_signal_while_an_environment_answers_stops_both_processes_after_the_step() {
    for stopped in 0..2 {
        let run = Waiting::start();
        signal(&run.children[stopped], Signal::TERM);
        let ([leader, follower], runs) = run.end();
        assert_eq!((leader.code, follower.code), (Some(3), Some(3)), "{leader}{follower}");
        assert!(!names(&runs.path("a/checkpoints")).is_empty());
    }
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn an_environment_that_hangs_fails_at_its_limit_in_both_processes() {
    let runs = runs();
    let mut settings = program(&runs, "sleep 1000").to_vec();
    settings[0] = settings[0].replace("]}}", "], timeout: 5}}");
    let more = [
        "data.training_chat_template=chatml",
        "rollout.multi_turn.max_consecutive_failures=2",
        "grpo={prompts_per_step: 1, num_generations: 2, gradient_accumulation_steps: 1}",
    ];
    let all: Vec<&str> = settings.iter().map(String::as_str).chain(more).collect();
    let [leader, follower] = both(start(&runs, "a", &all));
    assert_eq!((leader.code, follower.code), (Some(2), Some(2)), "{leader}{follower}");
    for said in [leader, follower] {
        assert_has(&said.stderr, &["`game` has failed in 2 conversations"]);
    }
}

/// A mesh of XLA's CPU in each process.
#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_mesh_in_each_process_follows_the_environment() {
    let runs = runs();
    let settings = program(&runs, SLOW);
    let more =
        ["data.training_chat_template=chatml", "policy.device=pjrt:cpu", "policy.mesh.fsdp=2", "grpo.max_steps=1"];
    let all: Vec<&str> = settings.iter().map(String::as_str).chain(more).collect();
    let [leader, follower] = processes();
    let start = |name: &str, of_process: [String; 4]| call(&runs, "model", name, &all).set(of_process).quick_cpu();
    succeed([start("two", leader), start("of-process-1", follower)].map(Call::spawn));
    call(&runs, "model", "one", &all).quick_cpu().succeed();
    assert_same_run(&runs.path("one"), &runs.path("two"));
}
