//! The official readers of what the sinks write: TensorBoard and the W&B SDK, from the package index that the machine's
//! own `pip` uses. They are fetched once, into the cache where PJRT plugins are, too.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const REQUIREMENTS: [&str; 2] = ["wandb==0.31.0", "tensorboard==2.21.0"];

/// A folder with Python packages.
pub(crate) struct Readers(PathBuf);

impl Readers {
    /// Fetches the packages unless they are there. Any number of processes may ask at the same time.
    pub(crate) fn install() -> Self {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let cache = variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache")));
        let cache = cache.unwrap_or_else(std::env::temp_dir).join("grpo");
        let folder = cache.join(format!("readers-{}", REQUIREMENTS.join("-").replace("==", "-")));
        fs::create_dir_all(&cache).expect("the cache can be made");
        let lock = File::create(folder.with_added_extension("lock")).expect("a lock file");
        lock.lock().expect("a lock");
        if !folder.exists() {
            let scratch = folder.with_added_extension("tmp");
            let _ = fs::remove_dir_all(&scratch);
            let mut pip = Command::new("python3");
            pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-warn-conflicts"]);
            let pip = pip.arg("--target").arg(&scratch).args(REQUIREMENTS);
            let output = pip.output().expect("these tests need python3 with pip");
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "the official readers cannot be installed by {pip:?}\n{said}");
            fs::rename(&scratch, &folder).expect("the packages can be put into place");
        }
        Self(folder)
    }

    /// A command that finds the packages, whose `HOME` is `home` and that knows nothing else of the caller.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>, home: &Path) -> Command {
        let mut command = Command::new(program);
        command.env_clear().env("PYTHONPATH", &self.0).env("PATH", self.path()).env("HOME", home);
        // Where `wandb` leaves a log of its own.
        command.env("WANDB_DIR", home).stdin(Stdio::null());
        command
    }

    /// `PATH` with the program `wandb`.
    pub(crate) fn path(&self) -> std::ffi::OsString {
        let caller = std::env::var_os("PATH").unwrap_or_default();
        let paths = [self.0.join("bin")].into_iter().chain(std::env::split_paths(&caller));
        std::env::join_paths(paths).expect("a PATH")
    }

    /// What TensorBoard reads in a folder: `{"scalars": {TAG: [[STEP, "VALUE"], ...]}, "texts": {TAG: TEXT}}`.
    pub(crate) fn tensorboard(&self, folder: &Path) -> serde_json::Value {
        let home = tempfile::tempdir().expect("a folder");
        let script = ["-c", include_str!("read_tensorboard.py")];
        let output = self.command("python3", home.path()).args(script).arg(folder).output().expect("python3 starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("JSON")
    }
}

/// A server that answers the W&B SDK as far as `wandb sync` asks, and writes down what it is sent.
pub(crate) struct WandbServer {
    process: Child,
    url: String,
    folder: tempfile::TempDir,
}

impl WandbServer {
    pub(crate) fn start() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut python = Command::new("python3");
        python.args(["-c", include_str!("wandb_server.py")]).arg(folder.path().join("seen.json"));
        let mut process = python.stdout(Stdio::piped()).spawn().expect("python3 starts");
        let mut url = String::new();
        BufReader::new(process.stdout.take().expect("its output")).read_line(&mut url).expect("the server's address");
        Self { process, url: url.trim().to_owned(), folder }
    }

    /// What `wandb` needs of the environment to find this server.
    pub(crate) fn environment(&self) -> [(&'static str, String); 3] {
        let quiet = ("WANDB_ERROR_REPORTING", "false".into());
        [("WANDB_BASE_URL", self.url.clone()), ("WANDB_API_KEY", "0".repeat(40)), quiet]
    }

    /// The runs as the server knows them: `{ID: {"runs": [VARIABLES, ...], "history": [ROW, ...], "summary": {...},
    /// "exit_codes": [...], "files": {NAME: TEXT}}}`. Numbers that JSON does not have are texts.
    pub(crate) fn seen(&self) -> serde_json::Value {
        let text = fs::read(self.folder.path().join("seen.json")).expect("the server was asked");
        serde_json::from_slice(&text).expect("JSON")
    }
}

impl Drop for WandbServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
