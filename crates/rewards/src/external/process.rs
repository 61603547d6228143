//! Programs that answer lines of JSON with lines of JSON: time limits, restarts, and what they write to standard error.

use super::group::Group;
use super::lock;
use super::message::{expand, parsed, seconds, shown};
use crate::error::{Error, Result as ConfigResult, check};
use grpo_files::Secrets;
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The maximum length of a line that a program may write, in bytes, unless its [`Launch`] has another one.
const MAX_LINE: u64 = 1 << 20;
/// The maximum number of dropped bytes of a line that is too long.
const MAX_DROPPED: u64 = 1 << 30;
/// The maximum number of buffered output lines. A program that writes more blocks, so that it cannot fill the memory.
const LINES_AHEAD: usize = 16;
/// The maximum length in bytes of a log line from standard error; longer lines are split.
const MAX_ERROR_LINE: u64 = 1 << 13;
/// The maximum number of logged bytes of standard error per batch; later lines are read slowly and dropped.
const LOGGED_BYTES: u64 = 1 << 16;
/// The pause after each dropped line.
const DROPPED_LINE_PAUSE: Duration = Duration::from_millis(1);
/// The number of last lines of standard error that errors show.
const KEPT_LINES: usize = 3;
/// The maximum wait for the exit of a program and the rest of its standard error.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// The place of output that is no answer, for messages.
const OTHER_OUTPUT: &str =
    "other output than answers belongs on standard error (in Python, print(..., file=sys.stderr))";

/// A program with its arguments, variables and time limit.
pub struct Launch {
    name: String,
    program: PathBuf,
    arguments: Vec<String>,
    env: BTreeMap<String, String>,
    timeout: Duration,
    max_line: u64,
    /// Values that are hidden in messages, even if the program writes them.
    secrets: Secrets,
}

impl Launch {
    /// Checks the settings of a program. `section` is the section of its configuration, such as `rewards.programs.judge`, `field` its key for
    /// `command`, and `name` its name in logs. `timeout` is the time in seconds that it has for its answers, including its start.
    ///
    /// # Errors
    /// [`Error::Config`] for invalid settings; [`Error::Reference`] for a missing environment variable; [`Error::Program`] if the program
    /// does not exist.
    pub fn new(
        section: &str,
        field: &str,
        name: &str,
        command: &[String],
        env: &BTreeMap<String, String>,
        timeout: f64,
    ) -> ConfigResult<Self> {
        let key = |field: &str| format!("{section}.{field}");
        let is_named = command.first().is_some_and(|program| !program.is_empty());
        check(is_named, &key(field), "a program and its arguments", "none")?;
        let timeout = seconds(&key("timeout"), timeout)?;
        let mut secrets = Secrets::of(&json!({ "command": command, "env": env }));
        let expanded = command.iter().map(|text| expand(&key(field), text, &mut secrets));
        let mut arguments = expanded.collect::<ConfigResult<Vec<String>>>()?;
        let variable = |(name, value): (&String, &String)| {
            Ok((name.clone(), expand(&key(&format!("env.{name}")), value, &mut secrets)?))
        };
        let env = env.iter().map(variable).collect::<ConfigResult<BTreeMap<_, _>>>()?;
        // Includes the resolved variables.
        secrets.extend(Secrets::of(&json!({ "command": arguments, "env": env })));
        let program = find(&arguments.remove(0))
            .map_err(|reason| Error::Program { key: key(field), reason: secrets.hide(&reason) })?;
        Ok(Self { name: name.to_owned(), program, arguments, env, timeout, max_line: MAX_LINE, secrets })
    }

    /// Returns the program with another maximum length of its lines, in bytes.
    #[must_use]
    pub fn with_max_line(self, max_line: u64) -> Self {
        Self { max_line, ..self }
    }

    /// Returns the name of the program in logs.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the time that the program has for its answers.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns the values that are hidden in messages.
    pub fn secrets(&self) -> &Secrets {
        &self.secrets
    }
}

/// The reason why a program gives no more answers.
#[derive(Debug)]
pub enum Stop {
    /// The program exited; its questions may be asked again.
    Ended(String),
    /// The program exceeded the time limit or wrote an invalid answer. It is unusable.
    Broken(String),
    /// The program wrote a line that belongs to no question, so that earlier answers may belong to other questions. It is unusable.
    Surplus(String),
    /// The program wrote a line that is too long, which was dropped. It can be asked other questions.
    TooLong(String),
}

impl Stop {
    /// Returns the text for users.
    pub fn into_message(self) -> String {
        let (Self::Ended(message) | Self::Broken(message) | Self::Surplus(message) | Self::TooLong(message)) = self;
        message
    }
}

/// The reason why a line of a program's output cannot be read.
enum Unread {
    /// The line is dropped, and the next one can be read.
    TooLong(String),
    /// Nothing behind it can be read.
    Broken(String),
}

impl From<Unread> for Stop {
    fn from(unread: Unread) -> Self {
        match unread {
            Unread::TooLong(message) => Self::TooLong(message),
            Unread::Broken(message) => Self::Broken(message),
        }
    }
}

/// A line of a program's output. The channel is disconnected when the output ends.
type Line = Result<String, Unread>;

/// A running program.
pub struct Process {
    group: Group,
    launch: Arc<Launch>,
    questions: Sender<Vec<u8>>,
    answers: Receiver<Line>,
    last_words: Arc<Mutex<VecDeque<String>>>,
    /// The number of bytes of standard error that may still be logged for this batch.
    log_budget: Arc<AtomicU64>,
    /// Behind `group`, so that the program has ended when this is dropped.
    stderr: Stderr,
}

/// Waits, when it is dropped, until the rest of a program's standard error is logged. Disconnected when standard error is closed.
struct Stderr(Receiver<()>);

impl Stderr {
    /// Returns when standard error is closed, or after `timeout`. Nothing is sent on the channel.
    fn wait(&self, timeout: Duration) {
        let _ = self.0.recv_timeout(timeout);
    }
}

impl Drop for Stderr {
    fn drop(&mut self) {
        self.wait(LAST_WORDS);
    }
}

impl Process {
    /// Starts a program.
    ///
    /// # Errors
    /// [`Stop::Broken`] if it cannot be started.
    pub fn start(launch: &Arc<Launch>) -> Result<Self, Stop> {
        Self::start_with(launch, &[])
    }

    /// Like [`Process::start`], with more environment variables.
    ///
    /// # Errors
    /// [`Stop::Broken`] if it cannot be started.
    pub fn start_with(launch: &Arc<Launch>, env: &[(&str, &str)]) -> Result<Self, Stop> {
        let mut command = Command::new(&launch.program);
        command.args(&launch.arguments).envs(env.iter().copied()).envs(&launch.env);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut group = Group::spawn(&mut command).map_err(|error| {
            let message = format!("cannot start {}: {error}", launch.program.display());
            Stop::Broken(launch.secrets.hide(&message))
        })?;
        let (questions, asked) = channel();
        let (answered, answers) = sync_channel(LINES_AHEAD);
        let (stderr_open, stderr) = channel();
        let (last_words, log_budget) = (Arc::default(), Arc::new(AtomicU64::new(LOGGED_BYTES)));
        if let Some(stdin) = group.leader.stdin.take() {
            std::thread::spawn(move || write_questions(stdin, &asked));
        }
        if let Some(stdout) = group.leader.stdout.take() {
            let launch = Arc::clone(launch);
            std::thread::spawn(move || read_answers(BufReader::new(stdout), &launch, &answered));
        }
        if let Some(output) = group.leader.stderr.take() {
            let (launch, words, budget) = (Arc::clone(launch), Arc::clone(&last_words), Arc::clone(&log_budget));
            std::thread::spawn(move || {
                let _open = stderr_open;
                log_lines(BufReader::new(output), &launch, &words, &budget);
            });
        }
        Ok(Self {
            group,
            launch: Arc::clone(launch),
            questions,
            answers,
            last_words,
            log_budget,
            stderr: Stderr(stderr),
        })
    }

    /// Sends lines, each with its line end. Their answers are read with [`Process::answer`], one per line.
    ///
    /// # Errors
    /// [`Stop::Surplus`] if the program has written a line before it was asked.
    pub fn ask(&mut self, lines: Vec<u8>) -> Result<(), Stop> {
        self.settle(Instant::now())?;
        self.log_budget.store(LOGGED_BYTES, Ordering::Relaxed);
        // If writing fails, the program's output ends, which is reported with the answers.
        let _ = self.questions.send(lines);
        Ok(())
    }

    /// Waits until `deadline` for a line of the program, which it was not asked for.
    ///
    /// # Errors
    /// [`Stop::Surplus`] if there is one.
    pub fn settle(&mut self, deadline: Instant) -> Result<(), Stop> {
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok(line) = self.answers.recv_timeout(left) else { return Ok(()) };
        let line = line.map_err(Stop::from)?;
        let line = shown(&line, &self.launch.secrets);
        Err(Stop::Surplus(format!("it writes lines that nobody has asked for: `{line}`; {OTHER_OUTPUT}")))
    }

    /// Returns the next line of the program's output, which is JSON; the program has answered `answered` of `count` lines before.
    ///
    /// # Errors
    /// [`Stop::Broken`] if there is no line until `deadline`, or it is not JSON; [`Stop::Ended`] if the program exited.
    pub fn answer(&mut self, deadline: Instant, answered: usize, count: usize) -> Result<Value, Stop> {
        self.line(deadline, answered, count)?.ok_or_else(|| {
            let limit = self.launch.timeout.as_secs_f64();
            let message = format!("it has given {answered} of {count} answers in {limit} seconds, its timeout");
            Stop::Broken(self.with_last_words(message))
        })
    }

    /// Returns the next line of the program's output, which is JSON; `None` if there is none until `deadline`.
    ///
    /// # Errors
    /// [`Stop::Broken`] for a line that is not JSON; [`Stop::Ended`] if the program exited.
    pub fn poll(&mut self, deadline: Instant) -> Result<Option<Value>, Stop> {
        self.line(deadline, 0, 1)
    }

    /// Returns `true` if the program has exited with status 0.
    pub fn has_succeeded(&mut self) -> bool {
        self.group.leader.try_wait().is_ok_and(|status| status.is_some_and(|status| status.success()))
    }

    fn line(&mut self, deadline: Instant, answered: usize, count: usize) -> Result<Option<Value>, Stop> {
        let left = deadline.saturating_duration_since(Instant::now());
        let line = match self.answers.recv_timeout(left) {
            Ok(line) => line?,
            Err(RecvTimeoutError::Timeout) => return Ok(None),
            Err(RecvTimeoutError::Disconnected) => return Err(self.ended(answered, count)),
        };
        let secrets = &self.launch.secrets;
        parsed(&line).map(Some).map_err(|error| {
            let (line, error) = (shown(&line, secrets), shown(&error.to_string(), secrets));
            Stop::Broken(format!("expected a line of JSON for each question, got `{line}` ({error}); {OTHER_OUTPUT}"))
        })
    }

    /// Returns the error for a program that exited, or closed its output.
    fn ended(&mut self, answered: usize, count: usize) -> Stop {
        let began = Instant::now();
        let mut status = self.group.leader.try_wait();
        // The output ends shortly before the process.
        while matches!(status, Ok(None)) && began.elapsed() < LAST_WORDS {
            std::thread::sleep(Duration::from_millis(5));
            status = self.group.leader.try_wait();
        }
        let how = match status {
            Ok(Some(status)) => format!("it has ended ({status})"),
            _ => "it has closed its output".to_owned(),
        };
        Stop::Ended(self.with_last_words(format!("{how} after {answered} of {count} answers")))
    }

    /// Returns the message with the last lines of standard error.
    pub fn with_last_words(&self, message: String) -> String {
        self.stderr.wait(if message.contains("ended") { LAST_WORDS } else { Duration::ZERO });
        let words = lock(&self.last_words);
        if words.is_empty() {
            return message;
        }
        let words: Vec<String> = words.iter().map(|line| shown(line, &self.launch.secrets)).collect();
        format!("{message}; the last it wrote to standard error: {}", words.join(" | "))
    }
}

fn write_questions(mut stdin: ChildStdin, asked: &Receiver<Vec<u8>>) {
    // Ends when the process is dropped, or when it stops reading.
    while let Ok(lines) = asked.recv() {
        if stdin.write_all(&lines).and_then(|()| stdin.flush()).is_err() {
            return;
        }
    }
}

fn read_answers(mut stdout: impl BufRead, launch: &Launch, answered: &SyncSender<Line>) {
    let max_line = launch.max_line;
    loop {
        let mut bytes = Vec::new();
        let mut is_cut = false;
        let line = match stdout.by_ref().take(max_line).read_until(b'\n', &mut bytes) {
            Ok(0) => return,
            Ok(_) if bytes.last() != Some(&b'\n') && bytes.len() as u64 == max_line => {
                is_cut = true;
                Err(Unread::TooLong(format!("it has written a line of more than {max_line} bytes")))
            }
            Ok(_) => String::from_utf8(bytes).map_err(|error| {
                let text = String::from_utf8_lossy(error.as_bytes());
                let text = shown(&text, &launch.secrets);
                Unread::Broken(format!("it has written what is not UTF-8: `{text}`"))
            }),
            Err(error) => Err(Unread::Broken(format!("its output cannot be read: {error}"))),
        };
        let ends = matches!(line, Err(Unread::Broken(_)));
        if answered.send(line).is_err() || ends || (is_cut && !drop_line(&mut stdout)) {
            return;
        }
    }
}

/// Drops the rest of a line. Returns `false` if it does not end.
fn drop_line(stdout: &mut impl BufRead) -> bool {
    let mut dropped = 0;
    while dropped < MAX_DROPPED {
        let Ok(bytes) = stdout.fill_buf() else { return false };
        let end = bytes.iter().position(|byte| *byte == b'\n');
        let count = end.map_or(bytes.len(), |at| at + 1);
        stdout.consume(count);
        if count == 0 || end.is_some() {
            return count > 0;
        }
        dropped += count as u64;
    }
    false
}

/// Logs the standard error of a program, and keeps its last lines.
fn log_lines(mut stderr: impl BufRead, launch: &Launch, last: &Mutex<VecDeque<String>>, budget: &AtomicU64) {
    let (name, mut bytes) = (&launch.name, Vec::new());
    while stderr.by_ref().take(MAX_ERROR_LINE).read_until(b'\n', &mut bytes).is_ok_and(|read| read > 0) {
        let line = String::from_utf8_lossy(&bytes).trim_end().to_owned();
        let length = bytes.len() as u64;
        bytes.clear();
        if line.is_empty() {
            continue;
        }
        match budget.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| Some(left.saturating_sub(length))) {
            Ok(0) => std::thread::sleep(DROPPED_LINE_PAUSE),
            Ok(left) => {
                tracing::info!(program = name, "{}", launch.secrets.hide(&line));
                if left <= length {
                    tracing::info!(
                        program = name,
                        "the rest of what it writes to standard error for this batch is left out"
                    );
                }
            }
            Err(_) => {}
        }
        let mut last = lock(last);
        if last.len() == KEPT_LINES {
            last.pop_front();
        }
        last.push_back(line);
    }
}

/// Returns the file of a program, or the reason why it is unusable.
fn find(program: &str) -> std::result::Result<PathBuf, String> {
    if program.contains('/') {
        let path = Path::new(program);
        return match std::fs::metadata(path) {
            Err(error) => Err(format!("{program}: {error}")),
            Ok(file) if !file.is_file() => Err(format!("{program} is no file")),
            Ok(file) if !is_executable(&file) => Err(format!(
                "{program} is not executable: make it so (chmod +x), or name its interpreter first, as in [python3, {program}]"
            )),
            // Symbolic links are not resolved: the Python of a virtual environment is a link, and finds its packages by the link's path.
            Ok(_) => std::path::absolute(path).map_err(|error| format!("{program}: {error}")),
        };
    }
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let there = |folder: PathBuf| {
        let path = folder.join(program);
        std::fs::metadata(&path).ok().filter(|file| file.is_file() && is_executable(file)).map(|_| path)
    };
    std::env::split_paths(&paths).find_map(there).ok_or_else(|| {
        format!("there is no program `{program}` in PATH; a file is named with its folder, as in ./{program}")
    })
}

#[cfg(unix)]
fn is_executable(file: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::PermissionsExt;
    file.permissions().mode() & 0o111 != 0
}

#[cfg(not(unix))]
fn is_executable(_: &std::fs::Metadata) -> bool {
    true
}
