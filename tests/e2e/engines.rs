//! Runs whose completions are sampled by a server of our own, in both protocols.

use crate::fake_server::{Fake, Program, Reply};
use crate::support::{Runs, assert_has, grpo, rows, signal};
use crate::tiny_model::{call, train};
use rstest::rstest;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::process::Stdio;

/// The name of a program in a configuration.
fn name(program: Program) -> &'static str {
    match program {
        Program::Vllm => "vllm",
        Program::Sglang => "sglang",
    }
}

/// Returns the settings of a run with this server.
fn settings(server: &Fake, program: Program) -> [String; 6] {
    [
        format!("rollout.engine={}", name(program)),
        format!("rollout.server={{base_urls: ['{}'], retries: 3}}", server.url),
        "grpo.max_steps=3".into(),
        // Weights of the step before would be noticed.
        "optimizer.learning_rate=0.02".into(),
        "optimizer.lr_scheduler_type=constant".into(),
        "rollout.temperature=0.7".into(),
    ]
}

fn with<'a>(settings: &'a [String], more: &[&'a str]) -> Vec<&'a str> {
    settings.iter().map(String::as_str).chain(more.iter().copied()).collect()
}

/// Returns the metrics of all steps, without times.
fn steps(runs: &Runs, run: &str) -> Vec<Value> {
    let mut all = rows(&runs.path(run).join("metrics.jsonl"));
    all.retain(|row| row["phase"] == "grpo");
    for row in &mut all {
        row.as_object_mut().unwrap().retain(|key, _| {
            let is_time = ["timing_s/", "tokens_per_second/"].iter().any(|prefix| key.starts_with(prefix));
            !is_time && key != "step_time" && key != "mfu"
        });
    }
    all
}

const LORA: &str = "lora={r: 2, target_modules: [q_proj, down_proj]}";

#[rstest]
fn runs_train_on_policy_with_completions_of_a_server(
    #[values(Program::Vllm, Program::Sglang)] program: Program,
    #[values("", LORA)] lora: &str,
) {
    let runs = Runs::small();
    let server = Fake::start(program, &runs.path("model")).with_info(fit);
    let settings = settings(&server, program);
    train(&runs, "model", "run", &with(&settings, &[lora].map(|lora| if lora.is_empty() { "seed=0" } else { lora })));
    let steps = steps(&runs, "run");
    assert_eq!(steps.len(), 3);
    for row in &steps {
        let difference = row["sampling/sampling_logp_difference/max"].as_f64().unwrap();
        assert!(difference < 1e-4, "{difference}");
        let ratio = row["sampling/importance_sampling_ratio/min"].as_f64().unwrap();
        assert!((ratio - 1.0).abs() < 1e-3, "{ratio}");
    }
    let moved = |row: &Value| row["grad_norm"].as_f64().unwrap() > 0.0;
    assert!(steps[..2].iter().any(moved), "later steps have other weights than the first");
}

/// Fits the server's settings to the small model.
fn fit(info: &mut Value) {
    info["max_model_len"] = 256.into();
    info["context_length"] = 256.into();
}

/// A server that is restarted during a run, and one that goes on, give the same run.
#[rstest]
#[case::vllm(Program::Vllm, "seed=0")]
#[case::sglang_with_adapters(Program::Sglang, LORA)]
#[ignore = "GRPO_TESTS=all"]
#[case::vllm_with_adapters(Program::Vllm, LORA)]
#[ignore = "GRPO_TESTS=all"]
#[case::sglang(Program::Sglang, "seed=0")]
fn restarted_servers_change_nothing(#[case] program: Program, #[case] lora: &str) {
    let runs = Runs::small();
    let path = if program == Program::Vllm { "/v1/completions" } else { "/generate" };
    let steady = Fake::start(program, &runs.path("model")).with_info(fit);
    train(&runs, "model", "steady", &with(&settings(&steady, program), &[lora]));
    let restarted = Fake::behaving(program, &runs.path("model"), move |server, number, found, right| {
        match found == path && number == 6 {
            true => {
                server.restart();
                Reply::Close
            }
            false => right,
        }
    });
    let restarted = restarted.with_info(fit);
    train(&runs, "model", "restarted", &with(&settings(&restarted, program), &[lora]));
    assert_eq!(steps(&runs, "steady"), steps(&runs, "restarted"));
    assert!(restarted.requests(path).len() > steady.requests(path).len());
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn resumed_runs_ask_for_the_same_completions() {
    let runs = Runs::small();
    let server = Fake::start(Program::Vllm, &runs.path("model")).with_info(fit);
    let settings = settings(&server, Program::Vllm);
    train(&runs, "model", "whole", &with(&settings, &[]));
    train(&runs, "model", "resumed", &with(&settings, &["grpo.max_steps=2"]));
    // The server of the second session has another address.
    let other = Fake::start(Program::Vllm, &runs.path("model")).with_info(fit);
    let resume = grpo(["train", "--resume", &runs.text("resumed")]);
    let urls = format!("rollout.server.base_urls=['{}']", other.url);
    resume.set(["grpo.max_steps=3", &urls]).succeed();
    assert_eq!(steps(&runs, "whole"), steps(&runs, "resumed"));
    assert!(!other.requests("/v1/completions").is_empty());
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn later_steps_are_sampled_while_the_policy_trains() {
    let runs = Runs::small();
    let server = Fake::start(Program::Vllm, &runs.path("model")).with_info(fit);
    let settings = settings(&server, Program::Vllm);
    let more = ["rollout.max_staleness=1", "run.log_completions_steps=1", "grpo.max_steps=2"];
    let said = call(&runs, "model", "ahead", &with(&settings, &more)).exit(0);
    assert!(!said.stderr.contains("warning: the run goes on"), "{said}");
    let resume = || grpo(["train", "--resume", &runs.text("ahead")]);
    let said = resume().set(["grpo.max_steps=4"]).exit(0);
    assert!(said.stderr.contains("its numbers are not those of a run that was never stopped"), "{said}");
    let staleness: Vec<f64> =
        steps(&runs, "ahead").iter().map(|row| row["sampling/staleness"].as_f64().unwrap()).collect();
    // A resumed run begins with completions of its current weights.
    assert!(staleness[0] == 0.0 && staleness[2] == 0.0 && staleness.iter().all(|steps| *steps <= 1.0), "{staleness:?}");
    let samples = rows(&runs.path("ahead").join("completions.jsonl"));
    assert!(samples.iter().all(|row| row["weight_versions"][0]["version"].is_u64()), "{samples:?}");
}

#[test]
fn conversations_need_a_context_of_the_longest_row_and_completion() {
    fn narrow(info: &mut Value) {
        info["max_model_len"] = 600.into();
    }
    // The model has a context of 1024 tokens.
    let runs = crate::conversations::runs();
    runs.write_rows(8, |_| json!({"question": "Which word?", "answer": "plane"}));
    let server = Fake::start(Program::Vllm, &runs.path("model")).with_info(narrow);
    let settings = settings(&server, Program::Vllm);
    let more = [
        "environments={game: {built_in: word_guess}}",
        "data.training_chat_template=chatml",
        "rewards.environment=1",
        "data.held_out_fraction=0",
        "rollout.max_completion_length=20",
    ];
    train(&runs, "model", "run", &with(&settings, &more));
    assert_eq!(steps(&runs, "run").len(), 3);
    let wide = ["rollout.max_completion_length=590"];
    let text = call(&runs, "model", "wide", &with(&settings, &[&more[..4], &wide].concat())).refuse();
    assert!(text.contains("--max-model-len") && text.contains("a context of 600 tokens"), "{text}");
}

#[test]
fn servers_are_checked_before_weights_are_read() {
    let runs = Runs::small();
    std::fs::remove_file(runs.path("model/model.safetensors")).unwrap();
    let none = ["rollout.engine=vllm", "rollout.server={base_urls: ['http://127.0.0.1:9'], retries: 0}"];
    let text = call(&runs, "model", "run", &none).refuse();
    assert!(text.contains("http://127.0.0.1:9") && text.contains("after 1 attempt"), "{text}");
    let text = call(&runs, "model", "run", &["rollout.max_staleness=1"]).refuse();
    assert!(text.contains("`rollout.max_staleness`"), "{text}");
    let text = call(&runs, "model", "run", &["rollout.engine=vllm"]).refuse();
    assert!(text.contains("`rollout.server`") && text.contains("base_urls"), "{text}");
}

#[rstest]
#[case(Program::Vllm, "vllm serve ")]
#[case(Program::Sglang, "sglang.launch_server ")]
fn a_missing_server_is_reported_at_once_with_its_command(#[case] program: Program, #[case] command: &str) {
    let runs = Runs::small();
    let url = "http://127.0.0.1:9";
    let engine = [format!("rollout.engine={}", name(program)), format!("rollout.server.base_urls=['{url}']")];
    let mut call = call(&runs, "model", "run", &[&engine[0], &engine[1], LORA]);
    call.0.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = call.0.spawn().expect("the binary starts");
    let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
    let attempt = lines.by_ref().map_while(Result::ok).find(|line| line.contains("attempt")).expect("a line");
    let model = runs.text("model");
    assert_has(&attempt, &[url, "(attempt 1 of 9, ", command, &model, " --port 9 ", "--enable-lora --max-lora-rank "]);
    signal(&child, Signal::INT);
    assert_eq!(child.wait().expect("an end").code(), Some(130), "the first signal ends it");
    assert!(!runs.path("run").exists());
}
