//! Runs whose environments are real servers of OpenEnv.

use crate::engines::is_healthy;
use crate::support::{Runs, assert_has, assert_same_run, both, processes, repository, rows};
use crate::tiny_model::{call, prepare_shape, small, train};
use grpo_models::ModelConfig;
use grpo_testkit::python::Python;
use serde_json::{Value, json};
use std::fs::File;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// The time that a server has to start.
const START: Duration = Duration::from_secs(300);

/// A server of OpenEnv, which ends with its value.
struct Server {
    process: Child,
    url: String,
}

impl Server {
    /// Starts the server `app`, a module and a name, in `folder`.
    fn start(python: &Python, app: &str, folder: &Path, log: &Path) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let log = File::create(log).unwrap();
        let mut command = python.command();
        command.args(["-m", "uvicorn", app, "--host", "127.0.0.1", "--port", &port.to_string()]).current_dir(folder);
        // A connection whose pings stay unanswered is closed while the model writes.
        command.args(["--ws-ping-interval", "2", "--ws-ping-timeout", "30"]);
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        let process = command.spawn().expect("python3 starts");
        let mut server = Self { process, url: format!("http://127.0.0.1:{port}") };
        let began = Instant::now();
        while !is_healthy(port) {
            let ended = server.process.try_wait().unwrap();
            assert!(ended.is_none(), "the server has ended: {ended:?}");
            assert!(began.elapsed() < START, "the server does not start");
            std::thread::sleep(Duration::from_millis(250));
        }
        server
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn runs() -> Runs {
    let runs = Runs::new(&[]);
    prepare_shape(&runs, &ModelConfig { max_position_embeddings: 1024, ..small() });
    runs
}

fn value(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("no {name} in {row}"))
}

#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn the_environment_of_openenvs_template_is_one_of_ours() {
    let (runs, python) = (runs(), Python::install_openenv());
    let made = python.command().args(["-m", "openenv.cli", "init", "echo_env"]).current_dir(runs.path("")).output();
    let made = made.expect("python3 starts");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    // The template allows one session, and says where to allow more. All else is unchanged.
    let (app, one) = (runs.path("echo_env/server/app.py"), "max_concurrent_envs=1,");
    let text = std::fs::read_to_string(&app).unwrap();
    assert_has(&text, &[one]);
    std::fs::write(&app, text.replace(one, "max_concurrent_envs=16,")).unwrap();
    let server = Server::start(&python, "server.app:app", &runs.path("echo_env"), &runs.path("server.log"));

    let environment =
        format!("environments={{echo: {{url: '{}', observation: echoed_message, workers: 4}}}}", server.url);
    let settings = [
        &*environment,
        "data.training_chat_template=chatml",
        "rollout.multi_turn.max_assistant_turns=2",
        "rollout.max_completion_length=100",
        // A model of random weights seldom ends a turn.
        &format!("rollout.stop_token_ids={:?}", (0..80).collect::<Vec<_>>()),
        "rewards.environment=1",
        "run.log_completions_steps=1",
    ];
    train(&runs, "model", "a", &settings);
    let steps = runs.phase("a", "grpo");
    assert_eq!(steps.len(), 2);
    for row in &steps {
        assert_eq!((value(row, "num_turns/max"), value(row, "environments/failures")), (2.0, 0.0), "{row}");
        // 0.1 for each character of a message, at most 1.
        let reward = value(row, "rewards/environment/mean");
        assert!(reward > 0.0 && reward <= 2.0 && value(row, "grad_norm") > 0.0, "{row}");
    }
    // The second message of a conversation is the echo of the first.
    let text = runs.read("a/completions.jsonl");
    assert_has(&text, &["<|im_end|>\\n<|im_start|>user\\n", "<|im_end|>\\n<|im_start|>assistant\\n"]);
    // Every conversation had a session of its own, and the second step used the sessions of the first.
    let log = runs.read("server.log");
    let accepted = log.matches("[accepted]").count();
    assert!((16..=17).contains(&accepted), "{accepted} connections: {log}");

    // Process 0 of two holds all conversations, and both processes take the steps of one.
    let [leader, follower] = processes();
    let start = |name: &str, of_process: [String; 4]| call(&runs, "model", name, &settings).set(of_process).spawn();
    let [leader, follower] = both([start("two", leader), start("of-process-1", follower)]);
    assert_eq!((leader.code, follower.code), (Some(0), Some(0)), "{leader}{follower}");
    assert_same_run(&runs.path("a"), &runs.path("two"));
    let more = runs.read("server.log").matches("[accepted]").count() - accepted;
    assert!((16..=17).contains(&more), "{more} connections");
}

#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn tools_of_a_server_of_openenv_are_called_and_its_failures_counted() {
    let (runs, python) = (runs(), Python::install_openenv());
    let folder = repository("tests/python");
    let server = Server::start(&python, "openenv_sums:app", Path::new(&folder), &runs.path("server.log"));
    let environment = format!("environments={{sums: {{url: '{}', workers: 4}}}}", server.url);
    let call_text = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 2, \"b\": 3}}\n</tool_call>";
    let row = json!({"question": "What is 2+3?", "answer": "5", "completion": call_text});
    // The warm-up memorises a call, with the tools of the server in the prompt.
    runs.write_rows(8, |_| row.clone());
    let settings = [
        &*environment,
        "data.held_out_fraction=0",
        "warmup={steps: 80, batch_size: 4, optimizer: {learning_rate: 0.03, lr_scheduler_type: constant}}",
        "rollout={max_completion_length: 120, temperature: 0.2, multi_turn: {max_tool_calling_iterations: 1}}",
        "rewards.environment=1",
        "run.log_completions_steps=1",
    ];
    train(&runs, "model", "a", &settings);
    let steps = runs.phase("a", "grpo");
    assert_eq!(steps.len(), 2);
    assert!(value(&steps[0], "tools/call_frequency") > 0.5, "{:?}", steps[0]);
    assert!(value(&steps[0], "rewards/environment/mean") > 0.5, "{:?}", steps[0]);
    assert_has(&runs.read("a/completions.jsonl"), &["user\\n<tool_response>\\n5\\n</tool_response>"]);

    // The columns of a row are the arguments of the reset. A failure is counted, and its row left out.
    let mut broken = row.clone();
    broken["broken"] = true.into();
    runs.write_rows(8, |i| if i % 2 == 0 { row.clone() } else { broken.clone() });
    let few = ["warmup.steps=0", "grpo.max_steps=3", "data.shuffle=false"];
    train(&runs, "a/model", "b", &[&settings[..], &few].concat());
    let steps = runs.phase("b", "grpo");
    let failures: f64 = steps.iter().map(|row| value(row, "environments/failures")).sum();
    // Half of the rows.
    assert!((1.0..=32.0).contains(&failures) && steps.len() == 3, "{steps:?}");
    assert!(rows(&runs.path("b/completions.jsonl")).iter().any(|row| row["reward"].is_f64()));

    // Too many in a row end the run.
    runs.write_rows(8, |_| broken.clone());
    let most = ["rollout.multi_turn.max_consecutive_failures=2", "run.save_steps=0"];
    let text = call(&runs, "a/model", "c", &[&settings[..], &few, &most].concat()).exit(2).stderr;
    assert_has(
        text.lines().last().expect("an error"),
        &["`sums` has failed in 2 conversations", &server.url, "EXECUTION_ERROR out of numbers", "--resume"],
    );
}
