//! Environments that are programs, over JSON lines.

use crate::config::EnvironmentConfig;
use crate::environment::{Environment, Episode, Failure, Reply, Start, check_messages};
use crate::error::Result;
use grpo_data::{Item, Prompt};
use grpo_files::long_integers_as_digits;
use grpo_rewards::programs::{Launch, Process, Stop, back_off, shown};
use serde_json::{Map, Value, json};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The maximum length of an answer in bytes.
const MAX_ANSWER: u64 = 8 << 20;
/// The event that ends a conversation.
const CLOSE: &str = "close";
/// The shortest and the longest wait for lines that no question belongs to, after the last answer of a rollout.
const SETTLES: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];

/// An environment that is a program, which runs as long as the environment exists.
///
/// The program reads one JSON object per line from standard input and answers each with one line on standard output:
///
/// ```text
/// {"id": 3, "number": 7, "event": "reset", "row": {"prompt": ..., "answer": ..., "answers": [...], "columns": {...}, "source": ...}}
/// {"id": 3, "number": 9, "event": "step", "message": {"role": "assistant", "content": ..., "tool_calls": [...]}}
/// {"id": 3, "number": 12, "event": "close"}
/// ```
///
/// The answer to `reset` may have `messages`, which follow the row's. The answer to `step` has `messages`, or `content` for one message
/// of a tool or the user, and may have `reward` (a number, true, false or null) and `done`. `close` ends a conversation that the program has
/// not ended; its answer is not read. `{"error": "why"}` ends the conversation without a reward. Every worker has many conversations at
/// the same time; `id` tells them apart.
///
/// An answer may repeat `id` and `number`, the number of the question. Once a program has sent one of them, its answers to `reset` and `step`
/// must have it. After the last answer of a rollout, a program that has not sent `number` has a moment to write a line too many.
///
/// If the program exits, exceeds the time limit, or writes anything else, it is restarted with the next conversation, and its open
/// conversations fail. A line that belongs to no question also fails the conversations of the rollout that have ended, as the program's earlier
/// answers may belong to other questions. An answer of more than 8 MiB fails its conversation alone.
pub struct EnvironmentProgram {
    shared: Arc<Shared>,
    tools: Option<Value>,
}

struct Shared {
    launch: Arc<Launch>,
    workers: Vec<Mutex<Worker>>,
    /// The id of the next conversation.
    next: AtomicU64,
    /// `true` after the first restart, which is the only one that is a warning: a program may end after each conversation.
    has_restarted: AtomicBool,
}

/// A slot for a process, which is started and restarted as needed.
#[derive(Default)]
struct Worker {
    process: Option<Process>,
    /// The number of processes so far: conversations belong to one of them.
    started: u64,
    failures_in_a_row: u32,
    /// The reason why the last process has ended.
    cause: String,
    /// The number of the last process that has written a line too many.
    unreliable: Option<u64>,
    /// The number of questions so far.
    questions: u64,
    /// `true` if the process has sent an `id`, or a `number`.
    repeats: [bool; 2],
    /// The time of the last answer to `reset` and `step`, if lines behind it were not waited for.
    answered: Option<Instant>,
    /// The longest time that the process took for an answer.
    longest: Duration,
}

impl EnvironmentProgram {
    /// Returns the environment called `name`. Checks that the program exists; it starts with the first conversation.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for invalid settings; [`crate::Error::Program`] if the program does not exist.
    pub fn new(name: &str, config: &EnvironmentConfig) -> Result<Self> {
        let section = format!("environments.{name}");
        let workers = config.workers(&section)?;
        let launch = Launch::new(&section, "command", name, &config.command, &config.env, config.timeout)?;
        let launch = launch.with_max_line(MAX_ANSWER);
        let workers = (0..workers).map(|_| Mutex::default()).collect();
        let shared = Arc::new(Shared {
            launch: Arc::new(launch),
            workers,
            next: AtomicU64::new(0),
            has_restarted: AtomicBool::new(false),
        });
        Ok(Self { shared, tools: config.tools.clone() })
    }
}

impl Environment for EnvironmentProgram {
    fn tools(&self) -> Option<&Value> {
        self.tools.as_ref()
    }

    fn workers(&self) -> usize {
        self.shared.workers.len()
    }

    fn reset(&self, row: &Item, worker: usize) -> Result<Start, Failure> {
        let id = self.shared.next.fetch_add(1, Ordering::Relaxed);
        let worker = worker % self.shared.workers.len();
        let question = json!({"id": id, "event": "reset", "row": row_of(row)});
        let mut guard = self.shared.lock(worker);
        let is_used = guard.process.is_some();
        let answer = match guard.ask(&self.shared.launch, question.clone()) {
            // The program may have exited since its last answer, and no conversation depends on the new one.
            Err(Stop::Ended(reason)) => {
                let program = self.shared.launch.name();
                match is_used && !self.shared.has_restarted.swap(true, Ordering::Relaxed) {
                    true => tracing::warn!(
                        program,
                        "it is started again, as it had ended after its last conversation; this is said once: {reason}"
                    ),
                    false => tracing::info!(program, "it is started again: {reason}"),
                }
                guard.ask(&self.shared.launch, question)
            }
            other => other,
        };
        let started = guard.started;
        drop(guard);
        let answer = answer.map_err(failure)?;
        let reply = self.shared.reply(&answer, "user")?;
        if reply.done {
            return Err(Failure::new("it has ended the conversation before the first message of the assistant"));
        }
        let episode = Conversation { shared: Arc::clone(&self.shared), worker, started, id, is_open: true };
        Ok(Start { messages: reply.messages, episode: Box::new(episode) })
    }
}

/// A conversation with a process of a program.
struct Conversation {
    shared: Arc<Shared>,
    worker: usize,
    /// The number of the process.
    started: u64,
    id: u64,
    is_open: bool,
}

impl Conversation {
    fn ask(&mut self, question: Value) -> Result<Value, Failure> {
        let mut worker = self.shared.lock(self.worker);
        if worker.started != self.started || worker.process.is_none() {
            self.is_open = false;
            let cause = &worker.cause;
            return Err(Failure::consequence(format!("its program has ended, and this conversation with it: {cause}")));
        }
        worker.ask(&self.shared.launch, question).map_err(|stop| {
            self.is_open = false;
            failure(stop)
        })
    }

    /// Ends a conversation that the program has not ended.
    fn close(&mut self) {
        if self.is_open {
            // A program that fails here is restarted with the next conversation.
            let _ = self.ask(json!({"id": self.id, "event": CLOSE}));
            self.is_open = false;
        }
    }
}

impl Episode for Conversation {
    fn step(&mut self, message: &Value) -> Result<Reply, Failure> {
        let answer = self.ask(json!({"id": self.id, "event": "step", "message": message}))?;
        let role = if message.get("tool_calls").is_some() { "tool" } else { "user" };
        let reply = self.shared.reply(&answer, role)?;
        self.is_open = !reply.done;
        Ok(reply)
    }

    fn end(&mut self) -> Result<(), Failure> {
        let mut worker = self.shared.lock(self.worker);
        if worker.started == self.started {
            worker.settle();
        }
        let is_unreliable = worker.unreliable == Some(self.started);
        let cause = worker.cause.clone();
        drop(worker);
        self.close();
        match is_unreliable {
            true => Err(Failure::new(format!("its answers may belong to other conversations: {cause}"))),
            false => Ok(()),
        }
    }
}

impl Drop for Conversation {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    /// Locks a worker, which stays valid if a thread panics.
    fn lock(&self, worker: usize) -> MutexGuard<'_, Worker> {
        self.workers[worker].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads an answer. A text in `content` becomes a message of `role`.
    fn reply(&self, answer: &Value, role: &str) -> Result<Reply, Failure> {
        let secrets = self.launch.secrets();
        let garbage = |expected: &str, found: &Value| {
            Failure::new(format!("expected {expected}, got `{}`", shown(&found.to_string(), secrets)))
        };
        let Value::Object(fields) = answer else {
            return Err(garbage("an object with `messages`, `reward` and `done`", answer));
        };
        if let Some(error) = fields.get("error").filter(|error| !error.is_null()) {
            let text = error.as_str().map_or_else(|| error.to_string(), str::to_owned);
            return Err(Failure::new(format!("it says: {}", shown(&text, secrets))));
        }
        let messages = match (fields.get("messages"), fields.get("content")) {
            (Some(Value::Array(messages)), _) => messages.clone(),
            (None | Some(Value::Null), None | Some(Value::Null)) => Vec::new(),
            (None | Some(Value::Null), Some(Value::String(content))) => vec![json!({"role": role, "content": content})],
            (found, content) => return Err(garbage("a list of `messages`", found.or(content).unwrap_or(&Value::Null))),
        };
        check_messages(&messages)?;
        let reward = match fields.get("reward") {
            None | Some(Value::Null) => None,
            Some(Value::Bool(right)) => Some(f32::from(*right)),
            Some(number) => {
                let value = number.as_f64().map(|number| number as f32).filter(|number| number.is_finite());
                Some(value.ok_or_else(|| garbage("a finite `reward`, true, false or null", number))?)
            }
        };
        let done = match fields.get("done") {
            None | Some(Value::Null) => false,
            Some(Value::Bool(done)) => *done,
            Some(other) => return Err(garbage("`done` true or false", other)),
        };
        Ok(Reply { messages, reward, done })
    }
}

impl Worker {
    /// Asks a question; starts the process if there is none.
    fn ask(&mut self, launch: &Arc<Launch>, mut question: Value) -> Result<Value, Stop> {
        let began = Instant::now();
        let process = match &mut self.process {
            Some(process) => process,
            none => {
                back_off(self.failures_in_a_row);
                self.started += 1;
                (self.repeats, self.answered, self.longest) = ([false; 2], None, Duration::ZERO);
                none.insert(Process::start(launch)?)
            }
        };
        self.questions += 1;
        question["number"] = self.questions.into();
        let line = long_integers_as_digits(format!("{question}\n")).into_bytes();
        let answer = process.ask(line).and_then(|()| process.answer(began + launch.timeout(), 0, 1));
        let answer = answer.and_then(|answer| self.check(&question, answer, launch));
        match &answer {
            Ok(_) => {
                self.failures_in_a_row = 0;
                if question["event"] != CLOSE {
                    self.answered = Some(Instant::now());
                    self.longest = self.longest.max(began.elapsed());
                }
            }
            Err(Stop::TooLong(_)) => {}
            Err(stop) => self.stop(stop),
        }
        answer.map_err(|stop| match stop {
            Stop::TooLong(reason) => Stop::TooLong(format!(
                "{reason}: cut long texts in the program; rollout.multi_turn.max_tool_response_length cuts shorter ones"
            )),
            other => other,
        })
    }

    /// Checks that an answer repeats the `id` and the `number` of its question, if the process does so.
    fn check(&mut self, question: &Value, answer: Value, launch: &Launch) -> Result<Value, Stop> {
        for (name, repeats) in ["id", "number"].into_iter().zip(&mut self.repeats) {
            let (expected, found) = (&question[name], &answer[name]);
            let show = |found: &Value| shown(&found.to_string(), launch.secrets());
            if found.is_null() {
                if *repeats && question["event"] != CLOSE {
                    let answer = show(&answer);
                    return Err(Stop::Surplus(format!("expected an answer with `{name}`, as before, got `{answer}`")));
                }
                continue;
            }
            *repeats = true;
            if found.as_u64() != expected.as_u64() {
                let what = if name == "id" { "conversation with id" } else { "question with number" };
                let found = show(found);
                return Err(Stop::Surplus(format!("expected the answer for the {what} {expected}, got `{found}`")));
            }
        }
        Ok(answer)
    }

    /// Waits for lines that no question belongs to, behind the last answer.
    fn settle(&mut self) {
        let (Some(answered), Some(process)) = (self.answered.take(), &mut self.process) else { return };
        let [shortest, longest] = SETTLES;
        let wait = if self.repeats[1] { Duration::ZERO } else { self.longest.clamp(shortest, longest) };
        if let Err(stop) = process.settle(answered + wait) {
            self.stop(&stop);
        }
    }

    /// Ends the process, whose conversations fail.
    fn stop(&mut self, stop: &Stop) {
        let (Stop::Ended(reason) | Stop::Broken(reason) | Stop::Surplus(reason) | Stop::TooLong(reason)) = stop;
        self.cause.clone_from(reason);
        if matches!(stop, Stop::Surplus(_)) {
            self.unreliable = Some(self.started);
        }
        self.process = None;
        self.failures_in_a_row += 1;
    }
}

pub(crate) fn failure(stop: Stop) -> Failure {
    Failure::new(stop.into_message())
}

/// Returns a row as a program reads it.
pub(crate) fn row_of(row: &Item) -> Value {
    let prompt = match &row.prompt {
        Prompt::Text(text) | Prompt::Rendered(text) => Value::from(text.as_str()),
        Prompt::Messages { messages, .. } => Value::from(messages.clone()),
    };
    let fields = [
        ("prompt", prompt),
        ("answer", row.answer.clone().into()),
        ("answers", row.answers().map(Value::from).collect()),
        ("columns", Value::Object((*row.columns).clone())),
        ("source", Value::from(&*row.source)),
    ];
    Value::Object(fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect::<Map<_, _>>())
}
