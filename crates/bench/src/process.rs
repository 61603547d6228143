//! A worker's process, from the benchmark's side.

use super::protocol::{Reply, Request};
use crate::error::{Error, Result};
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A process that answers requests. Dropping this value kills it.
pub(crate) struct Process {
    child: Child,
    requests: ChildStdin,
    replies: BufReader<ChildStdout>,
    /// The file with the process's standard error.
    log: PathBuf,
}

impl Process {
    /// Starts `command` with `environment` added to this process's.
    pub(crate) fn start(command: &[OsString], environment: &[(&str, String)], log: PathBuf) -> Result<Self> {
        let Some((program, arguments)) = command.split_first() else {
            return Err(Error::argument("start a worker", "a program", "none"));
        };
        let failed = |source| Error::io("start the worker", program.as_ref(), source);
        // If GRPO_LOG is set, the workers' messages are shown; otherwise they are kept in a file to report the last ones of a failed worker.
        let stderr = match std::env::var_os("GRPO_LOG") {
            Some(_) => Stdio::inherit(),
            None => File::create(&log).map_err(|e| Error::io("write", &log, e))?.into(),
        };
        let mut command = Command::new(program);
        command.args(arguments).envs(environment.iter().map(|(name, value)| (name, value)));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(stderr).spawn().map_err(failed)?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(requests), Some(replies)) => Ok(Self { child, requests, replies: BufReader::new(replies), log }),
            _ => unreachable!("both were asked for"),
        }
    }

    /// Sends a request and waits for the reply.
    pub(crate) fn ask(&mut self, request: &Request) -> Result<Reply> {
        let mut line = serde_json::to_string(request).map_err(|e| Error::Text(format!("no request: {e}")))?;
        line.push('\n');
        let sent = self.requests.write_all(line.as_bytes()).and_then(|()| self.requests.flush());
        let mut answer = String::new();
        let read = sent.and_then(|()| self.replies.read_line(&mut answer));
        if !matches!(read, Ok(1..)) {
            return Err(self.gone());
        }
        serde_json::from_str(&answer).map_err(|e| {
            let start: String = answer.trim_end().chars().take(80).collect();
            Error::Text(format!("the worker answered with something else than a reply ({e}): `{start}`"))
        })
    }

    fn gone(&mut self) -> Error {
        let status = self.child.wait().map_or_else(|e| e.to_string(), |status| status.to_string());
        let text = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let last = text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
        Error::Text(format!("the worker's process ended with {status}: {last}"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Kill the process: it owns nothing that outlives it, and a running compilation would delay the exit.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
