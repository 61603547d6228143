//! The official readers of the sinks' files: TensorBoard and the W&B SDK.

use grpo_testkit::python::Python;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

pub(crate) struct Readers(Python);

impl Readers {
    pub(crate) fn install() -> Self {
        Self(Python::install())
    }

    /// Creates a command with the packages, with `home` as `HOME`, and otherwise without the caller's environment.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>, home: &Path) -> Command {
        let mut command = Command::new(program);
        command.env_clear().envs(self.0.python_path().map(|folder| ("PYTHONPATH", folder)));
        command.env("PATH", self.path()).env("HOME", home);
        // The folder of the log that `wandb` writes.
        command.env("WANDB_DIR", home).stdin(Stdio::null());
        command
    }

    pub(crate) fn path(&self) -> std::ffi::OsString {
        let caller = std::env::var_os("PATH").unwrap_or_default();
        let paths = [self.0.scripts()].into_iter().chain(std::env::split_paths(&caller));
        std::env::join_paths(paths).expect("a PATH")
    }

    /// Reads a folder with TensorBoard: `{"scalars": {TAG: [[STEP, "VALUE"], ...]}, "texts": {TAG: TEXT}}`.
    pub(crate) fn tensorboard(&self, folder: &Path) -> serde_json::Value {
        let home = tempfile::tempdir().expect("a folder");
        let script = ["-c", include_str!("read_tensorboard.py")];
        let output =
            self.command(self.0.program(), home.path()).args(script).arg(folder).output().expect("python3 starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("JSON")
    }
}

/// A server that implements the requests of `wandb sync` and records them.
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

    /// Returns the environment variables with which `wandb` uses this server.
    pub(crate) fn environment(&self) -> [(&'static str, String); 3] {
        let quiet = ("WANDB_ERROR_REPORTING", "false".into());
        [("WANDB_BASE_URL", self.url.clone()), ("WANDB_API_KEY", "0".repeat(40)), quiet]
    }

    /// Returns the runs as the server has recorded them: `{ID: {"runs": [VARIABLES, ...], "history": [ROW, ...], "summary": {...},
    /// "exit_codes": [...], "files": {NAME: TEXT}}}`. Numbers that JSON lacks are strings.
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
