//! Runs whose completions are sampled by a real server of vLLM, on this CPU.

use crate::support::{Runs, assert_has, grpo, repository, rows};
use crate::tiny_model::{call, prepare_shape, train};
use grpo_models::{ModelConfig, ModelFolder};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The time that a server has to start: Python imports torch three times.
const START: Duration = Duration::from_secs(900);

/// A server of vLLM, which ends with its value.
pub(crate) struct Vllm {
    process: Child,
    url: String,
}

impl Vllm {
    /// Starts a server of the model in `folder`.
    pub(crate) fn start(folder: &Path, log: &Path) -> Self {
        let (mut command, port) = Self::command(folder, log);
        let server =
            Self { process: command.spawn().expect("python3 starts"), url: format!("http://127.0.0.1:{port}") };
        server.wait(port)
    }

    /// Returns the command of a server, and its port.
    fn command(folder: &Path, log: &Path) -> (Command, u16) {
        let port = free_port();
        let log = File::create(log).unwrap();
        let mut command = grpo_testkit::python::Python::install_vllm().command();
        command.args(["-m", "vllm.entrypoints.openai.api_server", "--model"]).arg(folder);
        command.args(["--served-model-name", "m", "--host", "127.0.0.1", "--port", &port.to_string()]);
        command.args(["--dtype", "float32", "--max-model-len", "256", "--enforce-eager"]);
        command.args(["--logprobs-mode", "processed_logprobs", "--kv-cache-memory-bytes", "67108864"]);
        command.args(["--enable-lora", "--max-lora-rank", "8", "--max-loras", "3"]);
        // On a CPU, vLLM 0.32 ends with an error when it splits the prompt of a request that has a seed.
        command.args(["--max-num-batched-tokens", "8192", "--enable-scale-out"]);
        command.envs([
            ("VLLM_SERVER_DEV_MODE", "1"),
            ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1"),
            ("HF_HUB_OFFLINE", "1"),
            ("VLLM_NO_USAGE_STATS", "1"),
            ("DO_NOT_TRACK", "1"),
            // Otherwise the first request compiles C++ for a quarter of a minute.
            ("TORCH_COMPILE_DISABLE", "1"),
        ]);
        // Its processes are ended together.
        command.process_group(0).stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        (command, port)
    }

    fn wait(mut self, port: u16) -> Self {
        let began = Instant::now();
        while !is_healthy(port) {
            let ended = self.process.try_wait().unwrap();
            assert!(ended.is_none(), "vLLM has ended: {ended:?}");
            assert!(began.elapsed() < START, "vLLM does not start");
            std::thread::sleep(Duration::from_millis(250));
        }
        self
    }

    /// Returns the settings of a run that samples with this server.
    pub(crate) fn settings(&self) -> [String; 2] {
        ["rollout.engine=vllm".into(), format!("rollout.server.base_urls=[{}]", self.url)]
    }
}

impl Drop for Vllm {
    fn drop(&mut self) {
        let group = Pid::from_child(&self.process);
        // Its children ignore the signal for a while, and outlive the first process if it is killed.
        let _ = kill_process_group(group, Signal::TERM);
        let began = Instant::now();
        while self.process.try_wait().is_ok_and(|ended| ended.is_none()) && began.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(100));
        }
        let _ = kill_process_group(group, Signal::KILL);
        let _ = self.process.wait();
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

pub(crate) fn is_healthy(port: u16) -> bool {
    let ask = || {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        write!(stream, "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut status = [0; 12];
        stream.read_exact(&mut status)?;
        Ok::<_, std::io::Error>(status.ends_with(b"200"))
    };
    ask().unwrap_or(false)
}

/// A model that vLLM's attention on a CPU supports.
fn shape() -> ModelConfig {
    ModelConfig {
        vocab_size: 512,
        hidden_size: 64,
        intermediate_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: Some(64),
        max_position_embeddings: 256,
        attention_bias: false,
        qk_norm: true,
        ..ModelConfig::default()
    }
}

/// Returns the GRPO rows of a run's metrics.
fn steps(runs: &Runs, name: &str) -> Vec<Value> {
    let all = rows(&runs.path(&format!("{name}/metrics.jsonl")));
    all.into_iter().filter(|row| row["phase"] == "grpo").collect()
}

fn value(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("no {name} in {row}"))
}

/// Checks that the sampler's log-probabilities are those of the policy in every step.
pub(crate) fn assert_on_policy(runs: &Runs, name: &str, count: usize) {
    let steps = steps(runs, name);
    assert_eq!(steps.len(), count);
    for row in &steps {
        let difference = value(row, "sampling/sampling_logp_difference/max");
        assert!(difference < 1e-4, "{name}: {difference}");
        for bound in ["min", "max"] {
            let ratio = value(row, &format!("sampling/importance_sampling_ratio/{bound}"));
            assert!((ratio - 1.0).abs() < 1e-3, "{name}: {ratio}");
        }
    }
}

#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn runs_sample_with_a_real_vllm() {
    let runs = Runs::new(&[]);
    prepare_shape(&runs, &shape());
    let server = Vllm::start(&runs.path("model"), &runs.path("vllm.log"));
    let [engine, urls] = server.settings();
    // A learning rate at which old weights would be noticed.
    let common = [
        &*engine,
        &urls,
        "grpo.max_steps=4",
        "optimizer.learning_rate=0.01",
        "optimizer.lr_scheduler_type=constant",
        "rollout.temperature=0.7",
    ];
    let with = |more: &[&str]| [&common[..], more].concat().iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    let run = |name: &str, more: &[&str]| {
        let settings = with(more);
        train(&runs, "model", name, &settings.iter().map(String::as_str).collect::<Vec<_>>())
    };

    // Adapters, under a new name for each version.
    run("adapters", &["lora={r: 4, target_modules: [q_proj, v_proj, down_proj]}"]);
    assert_on_policy(&runs, "adapters", 4);

    // All weights, by folder.
    run("whole", &[]);
    assert_on_policy(&runs, "whole", 4);
    let moved = |name: &str| {
        let tensor = |folder: &str| {
            let folder = ModelFolder::open(&runs.path(folder)).unwrap();
            folder.weights().unwrap().tensor("model.layers.0.mlp.down_proj.weight").unwrap().to_vec()
        };
        let (before, after) = (tensor("model"), tensor(&format!("{name}/model")));
        before.iter().zip(&after).fold(0.0_f32, |most, (a, b)| most.max((a - b).abs()))
    };
    assert!(moved("whole") > 0.01, "{}", moved("whole"));

    // All weights, and conversations whose later turns follow the words of a game.
    let stop = format!("rollout.stop_token_ids={:?}", (0..64).collect::<Vec<_>>());
    let row = serde_json::json!({"question": "Guess.", "answer": "apple"});
    let words = format!("data.files={}", runs.write("words.jsonl", format!("{row}\n").repeat(8)));
    let game = [
        &*words,
        "data.held_out_fraction=0",
        "environments={game: {built_in: word_guess}}",
        "data.training_chat_template=chatml",
        "rollout.max_completion_length=150",
        "rollout.multi_turn.max_assistant_turns=3",
        "rewards.environment=1",
        &stop,
    ];
    run("game", &game);
    assert_on_policy(&runs, "game", 4);
    for row in steps(&runs, "game") {
        assert!(value(&row, "num_turns/mean") > 1.5 && value(&row, "environments/failures") == 0.0, "{row}");
    }

    // A resumed run asks for the same completions.
    call(&runs, "model", "resumed", &with(&["grpo.max_steps=2"]).iter().map(String::as_str).collect::<Vec<_>>())
        .succeed();
    let resumed = grpo(["train", "--resume", &runs.text("resumed")]).set(["grpo.max_steps=4"]);
    resumed.succeed();
    for (whole, resumed) in steps(&runs, "whole").iter().zip(&steps(&runs, "resumed")) {
        for name in ["reward", "loss", "completions/mean_length", "grad_norm"] {
            assert_eq!(value(whole, name), value(resumed, name), "{name}");
        }
    }

    // Completions of the next steps are sampled while the policy trains.
    let said = run("ahead", &["rollout.max_staleness=2", "grpo.max_steps=5", "run.log_completions_steps=1"]);
    let staleness: Vec<f64> = steps(&runs, "ahead").iter().map(|row| value(row, "sampling/staleness")).collect();
    assert!(
        staleness[0] == 0.0 && staleness[4] > 0.0 && staleness.iter().all(|steps| *steps <= 2.0),
        "{staleness:?} {said}"
    );
    assert!(steps(&runs, "ahead").iter().all(|row| value(row, "sampling/stale_completions") == 0.0));
    let samples = rows(&runs.path("ahead/completions.jsonl"));
    let versions: Vec<&Value> = samples.iter().map(|row| &row["weight_versions"][0]["version"]).collect();
    assert!(!versions.is_empty() && versions.iter().all(|version| version.is_u64()), "{versions:?}");
}

/// The masks come from the real sampler; only the field of the reply that has them does not.
#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn losses_replay_the_sampling_masks_of_a_real_vllm() {
    let runs = Runs::new(&[]);
    prepare_shape(&runs, &shape());
    // vLLM returns masks on GPUs only.
    let (mut command, _) = Vllm::command(&runs.path("model"), &runs.path("masks.log"));
    let ended = command.arg("--return-sampling-mask").status().expect("python3 starts");
    assert!(!ended.success());
    assert_has(&runs.read("masks.log"), &["sampling distribution replay requires Model Runner V2"]);

    let server = Vllm::start(&runs.path("model"), &runs.path("vllm.log"));
    let [engine, urls] = server.settings();
    let common = [
        &*engine,
        "grpo.max_steps=3",
        "optimizer.learning_rate=0.01",
        "optimizer.lr_scheduler_type=constant",
        "rollout={temperature: 0.7, top_k: 12, top_p: 0.8, replay_sampling_mask: true}",
        // Greedy completions, which such a server refuses unless they have a top_k.
        "eval={num_problems: 4, num_generations: 0}",
    ];
    let text = call(&runs, "model", "plain", &[&common[..], &[&urls]].concat()).refuse();
    assert_has(&text, &["rollout.replay_sampling_mask", "`--return-sampling-mask --enable-scale-out`", &server.url]);

    let port = free_port();
    let mut proxy = grpo_testkit::python::Python::install_vllm().command();
    proxy.args([&repository("tests/python/masking_proxy.py"), &port.to_string(), &server.url]);
    let mut proxy = Vllm { process: proxy.process_group(0).spawn().expect("python3 starts"), url: String::new() };
    proxy = proxy.wait(port);
    let urls = format!("rollout.server.base_urls=['http://127.0.0.1:{port}']");
    train(&runs, "model", "a", &[&common[..], &[&urls]].concat());
    assert_on_policy(&runs, "a", 3);
    // Over all ids, the log-probabilities of the same tokens are lower. A server that returns masks is refused without them.
    let whole = ["rollout.replay_sampling_mask=false", &urls];
    let text = call(&runs, "model", "unread", &[&common[..], &whole].concat()).refuse();
    assert_has(&text, &["rollout.replay_sampling_mask: true", "start vLLM without `--return-sampling-mask`"]);
    let [_, urls] = server.settings();
    let whole = ["rollout.replay_sampling_mask=false", &urls];
    let text = call(&runs, "model", "whole", &[&common[..], &whole].concat()).exit(0).stderr;
    assert_has(&text, &["rollout.replay_sampling_mask"]);
    let of = |name: &str| value(&steps(&runs, name)[0], "sampling/sampling_logp_difference/mean");
    assert!(of("whole") > 0.05 && of("a") < 1e-5, "{} and {}", of("whole"), of("a"));
    drop(proxy);
}
