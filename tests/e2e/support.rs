//! Calls of the binary, and the folders of its runs.

use grpo_pjrt::install::{Kind, cache_dir, install};
use serde_json::Value;
use std::ffi::OsStr;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Returns the path of a file of this repository.
pub(crate) fn repository(path: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path).display().to_string()
}

/// Returns the path of `configs/train/tiny.yaml`.
pub(crate) fn tiny() -> String {
    repository("configs/train/tiny.yaml")
}

/// Returns the path of a golden batch.
pub(crate) fn batch(name: &str) -> String {
    repository(&format!("tests/golden/{name}.safetensors"))
}

/// A call of the binary. It gets none of the caller's environment, so that no `GRPO__` variable reaches it.
pub(crate) struct Call(pub(crate) Command);

pub(crate) fn grpo(arguments: impl IntoIterator<Item: AsRef<OsStr>>) -> Call {
    let mut command = Command::new(env!("CARGO_BIN_EXE_grpo"));
    command.env_clear().args(arguments).stdin(Stdio::null());
    Call(command)
}

impl Call {
    pub(crate) fn args(mut self, arguments: impl IntoIterator<Item: AsRef<OsStr>>) -> Self {
        self.0.args(arguments);
        self
    }

    /// Adds `--set` with each of `settings` (`a.b=value`).
    pub(crate) fn set(mut self, settings: impl IntoIterator<Item: AsRef<OsStr>>) -> Self {
        for setting in settings {
            self.0.arg("--set").arg(setting);
        }
        self
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.0.env(name, value);
        self
    }

    /// Adds the `PATH` of this process, in which programs are found.
    pub(crate) fn with_path(self) -> Self {
        self.env("PATH", std::env::var_os("PATH").unwrap_or_default())
    }

    /// Runs the call in `folder`.
    pub(crate) fn at(mut self, folder: &Path) -> Self {
        self.0.current_dir(folder);
        self
    }

    /// Adds this machine's plugins, after installing `kind`.
    pub(crate) fn plugin(self, kind: Kind) -> Self {
        install(kind, |_| {}).expect("the plugin can be installed");
        let cache = cache_dir().expect("this user has a cache");
        self.env("XDG_CACHE_HOME", cache.ancestors().nth(2).expect("grpo/plugins is below it"))
    }

    /// Adds XLA's CPU with quick compilation, for programs that compile for longer than they run.
    pub(crate) fn quick_cpu(self) -> Self {
        let (name, flags) = grpo_testkit::xla_cpu::quick_environment();
        self.plugin(Kind::Cpu).env(name, flags)
    }

    /// Runs the call below a limit of a POSIX shell's `ulimit`.
    pub(crate) fn limited(self, limit: &str) -> Self {
        let mut command = Command::new("/bin/sh");
        // The signal about a file that is too large would end the process instead of the write.
        command.args(["-c", &format!("trap '' XFSZ; ulimit {limit} && exec \"$@\""), "sh"]);
        command.arg(self.0.get_program()).args(self.0.get_args()).stdin(Stdio::null());
        command.env_clear().envs(self.0.get_envs().filter_map(|(name, value)| Some((name, value?))));
        Self(command)
    }

    pub(crate) fn output(mut self) -> Said {
        self.0.output().expect("the binary starts").into()
    }

    /// Returns the output of a call that must end with `code`.
    #[track_caller]
    pub(crate) fn exit(self, code: i32) -> Said {
        let arguments: Vec<_> = self.0.get_args().map(OsStr::to_owned).collect();
        let said = self.output();
        assert_eq!(said.code, Some(code), "{arguments:?}\n{said}");
        said
    }

    /// Returns standard output of a call that must succeed.
    #[track_caller]
    pub(crate) fn succeed(self) -> String {
        self.exit(0).stdout
    }

    /// Returns the error of a call that must end with exit code 2: one line, except for lines about compiled programs.
    #[track_caller]
    pub(crate) fn refuse(self) -> String {
        let text = self.exit(2).stderr;
        let (_, lines) = split_progress(&text);
        assert_eq!(lines.len(), 1, "an error is one line: {text}");
        assert!(lines[0].starts_with("error: ") && !lines[0].contains("panicked"), "{text}");
        format!("{}\n", lines[0])
    }

    pub(crate) fn spawn(mut self) -> Child {
        self.0.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts")
    }
}

/// The exit code and the output of a call.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl From<Output> for Said {
    fn from(output: Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self { code: output.status.code(), stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }
}

impl std::fmt::Display for Said {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.stdout, self.stderr)
    }
}

impl Said {
    /// Parses standard output as one document.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self}"))
    }
}

#[track_caller]
pub(crate) fn succeed(arguments: impl IntoIterator<Item: AsRef<OsStr>>) -> String {
    grpo(arguments).succeed()
}

#[track_caller]
pub(crate) fn refuse(arguments: impl IntoIterator<Item: AsRef<OsStr>>) -> String {
    grpo(arguments).refuse()
}

/// Returns the call that an error names in backquotes.
pub(crate) fn named_call(error: &str) -> Call {
    let (_, call) = error.split_once("`grpo ").expect("a command");
    grpo(call.split_once('`').expect("its end").0.split(' '))
}

/// Fails unless `text` contains all of `words`.
#[track_caller]
pub(crate) fn assert_has(text: &str, words: &[&str]) {
    words.iter().for_each(|words| assert!(text.contains(words), "{words:?} is not in: {text}"));
}

/// Splits standard error into lines about compiled programs and the rest.
pub(crate) fn split_progress(text: &str) -> (Vec<&str>, Vec<&str>) {
    text.lines().partition(|line| line.starts_with("compiling ") || line.starts_with("compiled "))
}

/// A temporary folder for runs, and settings that runs of the tiny configuration get (`a.b=value`).
pub(crate) struct Runs {
    folder: tempfile::TempDir,
    settings: Vec<String>,
}

impl Runs {
    pub(crate) fn new(settings: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        Self { folder, settings: settings.iter().map(|s| (*s).to_owned()).collect() }
    }

    /// Returns the settings of [`Runs::tiny`].
    pub(crate) fn settings(&self) -> &[String] {
        &self.settings
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the path of `name` as text.
    pub(crate) fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    pub(crate) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// Writes a file and returns its path.
    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        std::fs::write(self.path(name), content).unwrap_or_else(|error| panic!("{name}: {error}"));
        self.text(name)
    }

    /// Returns the rows of a run's `metrics.jsonl`.
    pub(crate) fn metrics(&self, run: &str) -> Vec<Value> {
        rows(&self.path(run).join("metrics.jsonl"))
    }

    /// Returns the rows of one phase of a run.
    pub(crate) fn phase(&self, run: &str, phase: &str) -> Vec<Value> {
        self.metrics(run).into_iter().filter(|row| row["phase"] == phase).collect()
    }

    /// Trains the tiny configuration.
    pub(crate) fn tiny(&self, name: &str) -> Call {
        grpo(["train", &tiny(), "--run-dir", &self.text(name)]).set(&self.settings)
    }

    #[track_caller]
    pub(crate) fn train(&self, name: &str) -> String {
        self.tiny(name).succeed()
    }

    /// Resumes a run.
    pub(crate) fn resume(&self, name: &str) -> Call {
        grpo(["train", "--resume", &self.text(name)])
    }
}

/// After this time, a process hangs: a machine with other work needs minutes for runs of seconds.
const HANGS: Duration = Duration::from_secs(600);

/// Waits until `ready` returns `true`; fails if the process ends before.
pub(crate) fn wait_until(child: &mut Child, what: &str, mut ready: impl FnMut() -> bool) {
    let limit = Instant::now() + HANGS;
    while !ready() {
        let ended = child.try_wait().expect("the process can be asked");
        assert!(ended.is_none(), "the run ended before {what}: {ended:?}");
        assert!(Instant::now() < limit, "no {what} after {HANGS:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Waits for a process that should not take long; a process that hangs is killed and fails the test.
pub(crate) fn finish(child: Child, what: &str) -> Said {
    let process = rustix::process::Pid::from_child(&child);
    let (send, ended) = channel();
    std::thread::spawn(move || send.send(child.wait_with_output()));
    let Ok(output) = ended.recv_timeout(HANGS) else {
        let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
        panic!("{what}: no end after {HANGS:?}");
    };
    let said: Said = output.expect("the process can be waited for").into();
    assert!(!said.stderr.contains("panicked"), "{what}: {said}");
    said
}

/// Returns the settings of two processes at a free port.
pub(crate) fn processes() -> [[String; 4]; 2] {
    let port = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("its address").port();
    [0, 1].map(|process| {
        [
            format!("distributed.coordinator_address=127.0.0.1:{port}"),
            "distributed.num_processes=2".to_owned(),
            format!("distributed.process_id={process}"),
            "distributed.heartbeat_timeout_seconds=20".to_owned(),
        ]
    })
}

/// Waits for the ends of two processes.
pub(crate) fn both([leader, follower]: [Child; 2]) -> [Said; 2] {
    [finish(leader, "process 0"), finish(follower, "process 1")]
}

/// Returns every file below `folder`, sorted.
pub(crate) fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("the folder can be read") {
            let path = entry.expect("an entry").path();
            match path.is_dir() && !path.is_symlink() {
                true => folders.push(path),
                false => found.push(path),
            }
        }
    }
    found.sort();
    found
}

/// Copies the folder `from`.
pub(crate) fn copy(from: &Path, to: &Path) {
    for file in files(from) {
        let target = to.join(file.strip_prefix(from).expect("a file below it"));
        std::fs::create_dir_all(target.parent().expect("a folder")).expect("created");
        std::fs::copy(&file, target).expect("copied");
    }
}

/// Sends a signal to a process, which may have ended.
pub(crate) fn signal(child: &Child, signal: rustix::process::Signal) {
    let _ = rustix::process::kill_process(rustix::process::Pid::from_child(child), signal);
}

/// Waits until the process with this id has ended.
pub(crate) fn wait_for_end(id: &str) {
    let stat = Path::new("/proc").join(id).join("stat");
    let limit = Instant::now() + HANGS;
    while std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z")) {
        assert!(Instant::now() < limit, "process {id} still runs");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns the rows of a jsonl file.
pub(crate) fn rows(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).expect("the file is there");
    text.lines().map(|line| serde_json::from_str(line).expect("a row of JSON")).collect()
}

pub(crate) fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).expect("the file is there")).expect("JSON")
}

/// Returns the names in a folder, sorted.
pub(crate) fn names(path: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(path) else { return Vec::new() };
    let mut names: Vec<_> = entries.filter_map(|e| e.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Asserts that two runs have the same weights and moments bit for bit, and the same rows except for times.
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
        row.retain(|key, _| {
            let is_time = ["timing_s/", "tokens_per_second/"].iter().any(|prefix| key.starts_with(prefix));
            !is_time && !["step_time", "seconds", "mfu", "name"].contains(&&**key)
        });
    }
    rows
}
