//! Agents that are programs.

use crate::agent::{Agent, Connection};
use crate::config::EnvironmentConfig;
use crate::environment::Failure;
use crate::error::{Result, check};
use crate::program::{failure, row_of};
use grpo_data::Item;
use grpo_files::long_integers_as_digits;
use grpo_rewards::programs::{Launch, Process, Stop, answer, back_off};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The maximum number of consecutive failures that make the pause before a start longer.
const MOST_PAUSES: u32 = 3;
/// The time after which a waiting thread looks whether the run has ended.
const LOOK: Duration = Duration::from_millis(100);

/// An agent that is a program, in any language that speaks to an endpoint of OpenAI or Anthropic.
///
/// For each conversation the program reads one line of JSON from standard input:
///
/// ```text
/// {"row": {"prompt": ..., "answer": ..., ...}, "base_url": "http://127.0.0.1:40123/v1", "api_key": "grpo-...", "model": "policy"}
/// ```
///
/// It asks the endpoint for messages as often as it needs, and ends the conversation with a line: a number, true, false, or `{"reward": ...}`, the
/// reward; null, without one; or `{"error": "why"}`. It then reads the next line. A program may also hold one conversation and exit with status 0;
/// it is started again for the next one. `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `OPENAI_MODEL`, and `ANTHROPIC_BASE_URL` (without `/v1`),
/// `ANTHROPIC_API_KEY` and `ANTHROPIC_MODEL`, are those of its first conversation.
///
/// If the program fails, or neither asks nor ends within the time limit, the conversation fails, and the program is restarted for the next one.
pub struct AgentProgram {
    launch: Arc<Launch>,
    workers: Vec<Mutex<Worker>>,
}

/// A slot for a process, which is started and restarted as needed.
#[derive(Default)]
struct Worker {
    process: Option<Process>,
    failures_in_a_row: u32,
}

impl AgentProgram {
    /// Returns the agent called `name`. Checks that the program exists; it starts with the first conversation.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for invalid settings; [`crate::Error::Program`] if the program does not exist.
    pub fn new(name: &str, config: &EnvironmentConfig) -> Result<Self> {
        let section = format!("environments.{name}");
        let workers = config.workers(&section)?;
        let expected = "left out: an agent sends its own tools";
        check(config.tools.is_none(), &format!("{section}.tools"), expected, "tools")?;
        let launch = Launch::new(&section, "agent", name, &config.agent, &config.env, config.timeout)?;
        Ok(Self { launch: Arc::new(launch), workers: (0..workers).map(|_| Mutex::default()).collect() })
    }
}

impl Agent for AgentProgram {
    fn workers(&self) -> usize {
        self.workers.len()
    }

    fn run(&self, row: &Item, connection: &Connection, worker: usize) -> std::result::Result<Option<f32>, Failure> {
        let slot = &self.workers[worker % self.workers.len()];
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        let is_used = slot.process.is_some();
        let reward = match slot.hold(&self.launch, row, connection) {
            // It has exited after its last conversation, as programs with one conversation do.
            Ok(Ended::Exited) if is_used && connection.requests() == 0 => slot.hold(&self.launch, row, connection),
            Err(Stop::Ended(reason)) if is_used && connection.requests() == 0 => {
                tracing::warn!(
                    program = self.launch.name(),
                    "it is started again, as it had ended after its last conversation: {reason}"
                );
                slot.hold(&self.launch, row, connection)
            }
            other => other,
        };
        let reward = match reward.map_err(failure)? {
            Ended::Exited => None,
            Ended::Answered(value) => {
                // What it writes after a wrong answer is unreliable.
                let rejected = |reason| {
                    slot.process = None;
                    Failure::new(reason)
                };
                let reward = answer(0, &value, self.launch.secrets()).map_err(rejected)?;
                reward.map_err(|reason| Failure::new(reason.to_string()))?
            }
        };
        match connection.requests() {
            0 => Err(Failure::new("it has ended the conversation without a request to the endpoint")),
            _ => Ok(reward),
        }
    }
}

/// The end of a conversation.
enum Ended {
    /// A line of the program.
    Answered(Value),
    /// The program has exited with status 0.
    Exited,
}

impl Worker {
    /// Holds a conversation; starts the process if there is none.
    fn hold(&mut self, launch: &Arc<Launch>, row: &Item, connection: &Connection) -> std::result::Result<Ended, Stop> {
        let (url, key) = (connection.base_url(), connection.api_key());
        let process = match &mut self.process {
            Some(process) => process,
            none => {
                back_off(self.failures_in_a_row.min(MOST_PAUSES));
                let model = crate::endpoint::MODEL;
                let direct = without_proxy(url);
                let env = [
                    ("OPENAI_BASE_URL", url),
                    ("OPENAI_API_KEY", key),
                    ("OPENAI_MODEL", model),
                    ("ANTHROPIC_BASE_URL", url.trim_end_matches("/v1")),
                    ("ANTHROPIC_API_KEY", key),
                    ("ANTHROPIC_MODEL", model),
                    ("NO_PROXY", &direct),
                    ("no_proxy", &direct),
                ];
                none.insert(Process::start_with(launch, &env)?)
            }
        };
        let line = json!({"row": row_of(row), "base_url": url, "api_key": key, "model": crate::endpoint::MODEL});
        let ended = process
            .ask(long_integers_as_digits(format!("{line}\n")).into_bytes())
            .and_then(|()| wait(process, launch, connection));
        match &ended {
            Ok(Ended::Answered(_)) => self.failures_in_a_row = 0,
            Ok(Ended::Exited) => (self.process, self.failures_in_a_row) = (None, 0),
            Err(_) => {
                self.process = None;
                self.failures_in_a_row += 1;
            }
        }
        ended
    }
}

fn wait(process: &mut Process, launch: &Launch, connection: &Connection) -> std::result::Result<Ended, Stop> {
    loop {
        match process.poll(Instant::now() + LOOK) {
            Ok(Some(value)) => return Ok(Ended::Answered(value)),
            Ok(None) if connection.has_ended() => {
                return Err(Stop::Broken("the run has ended the conversation".into()));
            }
            Ok(None) if connection.idle() > launch.timeout() => {
                let limit = launch.timeout().as_secs_f64();
                let message = format!("it has neither sent a request nor ended in {limit} seconds, its timeout");
                return Err(Stop::Broken(process.with_last_words(message)));
            }
            Ok(None) => {}
            Err(Stop::Ended(_)) if process.has_succeeded() => return Ok(Ended::Exited),
            Err(stop) => return Err(stop),
        }
    }
}

/// Returns the list of hosts that clients reach without a proxy, with the host of the endpoint.
fn without_proxy(url: &str) -> String {
    let host = url.split("://").nth(1).and_then(|rest| rest.rsplit_once(':')).map_or("127.0.0.1", |(host, _)| host);
    let others =
        ["NO_PROXY", "no_proxy"].into_iter().find_map(|name| std::env::var(name).ok().filter(|list| !list.is_empty()));
    others.map_or_else(|| host.to_owned(), |others| format!("{others},{host}"))
}
