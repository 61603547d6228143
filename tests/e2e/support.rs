//! Running the binary and reading what it left behind.

use pjrt::install::{Kind, cache_dir, install};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// `configs/train/tiny.yaml` of this repository.
pub(crate) fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/train/tiny.yaml")
}

/// The binary in an environment of its own: no `GRPO__` variable of the caller reaches it.
pub(crate) fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_grpo"));
    command.env_clear().args(arguments).stdin(Stdio::null());
    command
}

pub(crate) fn grpo(arguments: &[&str]) -> Output {
    command(arguments).output().expect("the binary starts")
}

/// The binary with this machine's plugins, which are installed first, and nothing else of the environment.
pub(crate) fn grpo_with(kind: Kind, arguments: &[&str]) -> Command {
    install(kind, |_| {}).expect("the plugin can be installed");
    let cache = cache_dir().expect("this user has a cache");
    let mut command = command(arguments);
    command.env("XDG_CACHE_HOME", cache.ancestors().nth(2).expect("grpo/plugins is below it"));
    command
}

/// [`grpo_with`] XLA's CPU, for programs that are compiled for longer than they run.
pub(crate) fn grpo_with_quick_cpu(arguments: &[&str]) -> Command {
    let mut command = grpo_with(Kind::Cpu, arguments);
    let (name, flags) = testkit::xla_cpu::quick_environment();
    command.env(name, flags);
    command
}

/// Standard output of a call that must succeed.
pub(crate) fn succeed(arguments: &[&str]) -> String {
    let output = grpo(arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}\n{}{}", stdout(&output), stderr(&output));
    stdout(&output)
}

/// The lines about programs that were compiled, and the rest of standard error.
pub(crate) fn split_progress(text: &str) -> (Vec<&str>, Vec<&str>) {
    text.lines().partition(|line| line.starts_with("compiling ") || line.starts_with("compiled "))
}

/// The one line on standard error of a call that must end with exit code 2, but for lines about programs that were compiled.
pub(crate) fn refuse(arguments: &[&str]) -> String {
    refused(arguments, &grpo(arguments))
}

pub(crate) fn refused(arguments: &[&str], output: &Output) -> String {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}\n{}{text}", stdout(output));
    let (_, lines) = split_progress(&text);
    assert_eq!(lines.len(), 1, "an error is one line: {text}");
    let text = format!("{}\n", lines[0]);
    assert!(text.starts_with("error: ") && !text.contains("panicked"), "{text}");
    text
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A temporary folder with runs of the tiny configuration.
pub(crate) struct Runs {
    folder: tempfile::TempDir,
    settings: Vec<String>,
}

impl Runs {
    /// Every run gets `settings` (`a.b=value`).
    pub(crate) fn new(settings: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        Self { folder, settings: settings.iter().map(|s| (*s).to_owned()).collect() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    fn arguments(&self, name: &str) -> Vec<String> {
        let mut arguments: Vec<String> =
            ["train", "--config", &tiny().display().to_string(), "--run-dir", &self.text(name)].map(Into::into).into();
        for setting in &self.settings {
            arguments.extend(["--set".to_owned(), setting.clone()]);
        }
        arguments
    }

    /// Trains to the end.
    pub(crate) fn train(&self, name: &str) -> String {
        succeed(&self.arguments(name).iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Begins to train.
    pub(crate) fn spawn(&self, name: &str) -> Child {
        spawn(&self.arguments(name).iter().map(String::as_str).collect::<Vec<_>>())
    }
}

pub(crate) fn spawn(arguments: &[&str]) -> Child {
    command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts")
}

/// Waits until `ready` holds; a process that ends before is a failure of the test.
pub(crate) fn wait_until(child: &mut Child, what: &str, mut ready: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(120);
    while !ready() {
        let ended = child.try_wait().expect("the process can be asked");
        assert!(ended.is_none(), "the run ended before {what}: {ended:?}");
        assert!(Instant::now() < limit, "no {what} after two minutes");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Rows of a jsonl file.
pub(crate) fn rows(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).expect("the file is there");
    text.lines().map(|line| serde_json::from_str(line).expect("a row of JSON")).collect()
}

pub(crate) fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).expect("the file is there")).expect("JSON")
}

/// Names in a folder, sorted.
pub(crate) fn names(path: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(path) else { return Vec::new() };
    let mut names: Vec<_> = entries.filter_map(|e| e.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Everything in which two runs may not differ: weights and moments bit for bit, every row but its timing.
pub(crate) fn assert_same_run(a: &Path, b: &Path) {
    for file in ["metrics.jsonl", "completions.jsonl"] {
        assert_eq!(without_times(rows(&a.join(file))), without_times(rows(&b.join(file))), "{file}");
    }
    let summary = |run: &Path| without_times(vec![json(&run.join("summary.json"))]);
    assert_eq!(summary(a), summary(b));
    let last = |run: &Path| {
        let names = names(&run.join("checkpoints"));
        names.into_iter().rfind(|n| n.len() == "step-000000".len() && n.starts_with("step-")).expect("a checkpoint")
    };
    assert_eq!(last(a), last(b));
    for file in ["model.safetensors", "optimizer.safetensors"] {
        let bytes = |run: &Path| std::fs::read(run.join("checkpoints").join(last(run)).join(file)).expect("a file");
        assert!(bytes(a) == bytes(b), "{file} differs");
    }
}

fn without_times(mut rows: Vec<Value>) -> Vec<Value> {
    for row in rows.iter_mut().filter_map(Value::as_object_mut) {
        row.retain(|key, _| !["step_time", "seconds", "name"].contains(&&**key) && !key.starts_with("timing_s/"));
    }
    rows
}
