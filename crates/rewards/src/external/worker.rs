//! One process of a reward program: starts it, sends batches, enforces time limits, and restarts it.

use super::group::Group;
use super::lock;
use super::message::{answer, parsed, question, shown};
use crate::reward_fn::{RewardFailure, RewardInput, Score};
use grpo_files::Secrets;
use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The maximum length of a line that a program may write, in bytes.
const MAX_LINE: u64 = 1 << 20;
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
/// The delay before a failed program is restarted; it doubles with every consecutive failure.
const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(10);
/// The maximum wait for the exit of a program and the rest of its standard error.
const LAST_WORDS: Duration = Duration::from_millis(500);

pub(super) struct Launch {
    pub(super) name: String,
    pub(super) program: PathBuf,
    pub(super) arguments: Vec<String>,
    pub(super) env: BTreeMap<String, String>,
    pub(super) timeout: Duration,
    /// Values that are hidden in messages, even if the program writes them.
    pub(super) secrets: Secrets,
}

/// A slot for a process, which is started and restarted as needed.
pub(super) struct Worker {
    launch: Arc<Launch>,
    process: Option<Process>,
    failures_in_a_row: u32,
}

/// The reason why a batch stopped before its last answer.
enum Stop {
    /// The program exited; the remaining completions may be sent again.
    Ended(String),
    /// The program exceeded the time limit or wrote an invalid answer; it is killed.
    Broken(String),
}

impl Worker {
    pub(super) fn new(launch: Arc<Launch>) -> Self {
        Self { launch, process: None, failures_in_a_row: 0 }
    }

    /// Scores a batch within the time limit. After a restart, the limit starts again.
    pub(super) fn score(&mut self, inputs: &[RewardInput<'_>]) -> Vec<Score> {
        let mut scores = Vec::with_capacity(inputs.len());
        let mut ended: Option<String> = None;
        while scores.len() < inputs.len() {
            let asked = scores.len();
            let Err(stop) = self.ask(inputs, &mut scores) else {
                self.failures_in_a_row = 0;
                if let Some(message) = ended {
                    tracing::warn!(
                        reward = self.launch.name,
                        "{message}; it was started again, and has answered the rest"
                    );
                }
                break;
            };
            self.process = None;
            self.failures_in_a_row = if scores.len() > asked { 1 } else { self.failures_in_a_row + 1 };
            match stop {
                Stop::Ended(message) if ended.is_none() => ended = Some(message),
                Stop::Ended(message) | Stop::Broken(message) => {
                    scores.resize_with(inputs.len(), || Err(RewardFailure::new(message.clone())));
                }
            }
        }
        scores
    }

    /// Sends the completions without an entry in `scores`, and appends their rewards.
    fn ask(&mut self, inputs: &[RewardInput<'_>], scores: &mut Vec<Score>) -> Result<(), Stop> {
        let launch = Arc::clone(&self.launch);
        let (secrets, process) = (&launch.secrets, self.process()?);
        let mut lines = Vec::new();
        for (id, input) in inputs.iter().enumerate().skip(scores.len()) {
            let mut question = question(id, input);
            // Some programs score all completions of a batch at once, and need to know where it ends.
            question["remaining"] = (inputs.len() - id - 1).into();
            lines.extend_from_slice(question.to_string().as_bytes());
            lines.push(b'\n');
        }
        if let Ok(line) = process.answers.try_recv() {
            let unasked =
                |line: String| format!("it writes lines that nobody has asked for: `{}`", shown(&line, secrets));
            return Err(Stop::Broken(line.map_or_else(|reason| reason, unasked)));
        }
        process.log_budget.store(LOGGED_BYTES, Ordering::Relaxed);
        // If writing fails, the program's output ends, which is reported below.
        let _ = process.questions.send(lines);
        let deadline = Instant::now() + launch.timeout;
        while scores.len() < inputs.len() {
            let (id, count) = (scores.len(), inputs.len());
            let left = deadline.saturating_duration_since(Instant::now());
            let line = match process.answers.recv_timeout(left) {
                Ok(line) => line.map_err(Stop::Broken)?,
                Err(RecvTimeoutError::Timeout) => {
                    let limit = launch.timeout.as_secs_f64();
                    let message =
                        format!("it has answered {id} of {count} completions in {limit} seconds, its timeout");
                    return Err(Stop::Broken(process.with_last_words(message)));
                }
                Err(RecvTimeoutError::Disconnected) => return Err(process.ended(id, count)),
            };
            let value = parsed(&line).map_err(|error| {
                let (line, error) = (shown(&line, secrets), shown(&error.to_string(), secrets));
                Stop::Broken(format!("expected a line of JSON for each completion, got `{line}` ({error})"))
            })?;
            scores.push(answer(id, &value, secrets).map_err(Stop::Broken)?);
        }
        Ok(())
    }

    /// Returns the running process, after starting it if there is none.
    fn process(&mut self) -> Result<&mut Process, Stop> {
        match &mut self.process {
            Some(process) => Ok(process),
            none => {
                if self.failures_in_a_row > 0 {
                    let doublings = (self.failures_in_a_row - 1).min(16);
                    std::thread::sleep((FIRST_BACKOFF * (1 << doublings)).min(MAX_BACKOFF));
                }
                Ok(none.insert(Process::start(&self.launch)?))
            }
        }
    }
}

/// A line of a program's output, or the reason why the output is unusable from here on. The channel is disconnected when the output ends.
type Line = Result<String, String>;

struct Process {
    group: Group,
    launch: Arc<Launch>,
    questions: Sender<Vec<u8>>,
    answers: Receiver<Line>,
    last_words: Arc<Mutex<VecDeque<String>>>,
    /// The number of bytes of standard error that may still be logged for this batch.
    log_budget: Arc<AtomicU64>,
    /// Disconnected when standard error is closed.
    stderr: Receiver<()>,
}

impl Process {
    fn start(launch: &Arc<Launch>) -> Result<Self, Stop> {
        let mut command = Command::new(&launch.program);
        command.args(&launch.arguments).envs(&launch.env);
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
            std::thread::spawn(move || read_answers(BufReader::new(stdout), &launch.secrets, &answered));
        }
        if let Some(output) = group.leader.stderr.take() {
            let (launch, words, budget) = (Arc::clone(launch), Arc::clone(&last_words), Arc::clone(&log_budget));
            std::thread::spawn(move || {
                let _open = stderr_open;
                log_lines(BufReader::new(output), &launch, &words, &budget);
            });
        }
        Ok(Self { group, launch: Arc::clone(launch), questions, answers, last_words, log_budget, stderr })
    }

    /// Returns the error for a program that exited, or closed its output, after `answered` of `count` answers.
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
    fn with_last_words(&self, message: String) -> String {
        // Nothing is sent on this channel: the call returns when standard error is closed, or after the timeout.
        let _ = self.stderr.recv_timeout(if message.contains("ended") { LAST_WORDS } else { Duration::ZERO });
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

fn read_answers(mut stdout: impl BufRead, secrets: &Secrets, answered: &SyncSender<Line>) {
    loop {
        let mut bytes = Vec::new();
        let line = match stdout.by_ref().take(MAX_LINE).read_until(b'\n', &mut bytes) {
            Ok(0) => return,
            Ok(_) if bytes.last() != Some(&b'\n') && bytes.len() as u64 == MAX_LINE => {
                Err(format!("it has written a line of more than {MAX_LINE} bytes"))
            }
            Ok(_) => String::from_utf8(bytes).map_err(|error| {
                let text = String::from_utf8_lossy(error.as_bytes());
                format!("it has written what is not UTF-8: `{}`", shown(&text, secrets))
            }),
            Err(error) => Err(format!("its output cannot be read: {error}")),
        };
        let ends = line.is_err();
        if answered.send(line).is_err() || ends {
            return;
        }
    }
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
                tracing::info!(reward = name, "{}", launch.secrets.hide(&line));
                if left <= length {
                    tracing::info!(
                        reward = name,
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
