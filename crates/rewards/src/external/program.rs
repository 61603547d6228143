//! A program that scores completions over JSON lines.

use super::message::{batch_size, timeout};
use super::process::Launch;
use super::worker::Worker;
use super::{lock, score_batches};
use crate::error::{Result, check};
use crate::reward_fn::{RewardFn, RewardInput, Score, one};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// The largest number of processes of a program.
pub const MAX_WORKERS: usize = 256;

/// The settings of a reward program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProgramConfig {
    /// The program and its arguments. A program without a slash is searched in `PATH`. `${NAME}` here and in `env` is an environment
    /// variable, so that secrets need not be in files; `$${NAME}` is the text `${NAME}`.
    pub command: Vec<String>,
    /// The weight of the reward.
    #[serde(default = "one")]
    pub weight: f32,
    /// The maximum number of completions that a worker receives at once.
    #[serde(default = "batch_size")]
    pub batch_size: usize,
    /// The time in seconds that a worker has for a batch, including the start of the program.
    #[serde(default = "timeout")]
    pub timeout: f64,
    /// The number of parallel processes.
    #[serde(default = "workers")]
    pub workers: usize,
    /// Additional environment variables of the program.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
}

fn workers() -> usize {
    1
}

impl ProgramConfig {
    /// Returns the settings of a program, with the defaults.
    pub fn new(command: Vec<String>) -> Self {
        Self {
            command,
            weight: one(),
            batch_size: batch_size(),
            timeout: timeout(),
            workers: workers(),
            env: BTreeMap::new(),
        }
    }
}

/// A reward function that is a program, which runs as long as the reward exists.
///
/// The program reads one JSON object per line from standard input (`id`, `prompt`, `completion`, `answer`, `answers`, `columns`, `source`,
/// `truncated`, `completion_ids`, `completion_tokens`, `remaining`) and writes one line per object to standard output, in order: a number,
/// `true` (1), `false` (0), `null`, `{"reward": one of these}` or `{"error": "why"}`. It must flush its lines, and exit when its input
/// ends. Its standard error is logged. If the program exits, it is restarted, and asked once more for the missing answers. If it writes
/// anything else, or exceeds the time limit, it is killed and restarted for the next batch.
///
/// ```no_run
/// use grpo_rewards::{Program, ProgramConfig, Rewards};
///
/// let judge = Program::new("judge", ProgramConfig::new(vec!["python3".into(), "judge.py".into()]))?;
/// let rewards = Rewards::from_terms(vec![(Box::new(judge), 1.0)])?;
/// # Ok::<(), grpo_rewards::Error>(())
/// ```
pub struct Program {
    name: String,
    batch_size: usize,
    workers: Vec<Mutex<Worker>>,
}

impl Program {
    /// Returns the reward called `name`. Checks that the program exists; it starts with the first completion.
    ///
    /// # Errors
    /// The errors of [`Launch::new`], and [`crate::Error::Config`] for other invalid settings.
    pub fn new(name: impl Into<String>, config: ProgramConfig) -> Result<Self> {
        let name = name.into();
        let key = |field: &str| format!("rewards.programs.{name}.{field}");
        check(config.batch_size > 0, &key("batch_size"), "at least 1", config.batch_size)?;
        let workers = config.workers;
        check((1..=MAX_WORKERS).contains(&workers), &key("workers"), &format!("1 to {MAX_WORKERS}"), workers)?;
        let section = format!("rewards.programs.{name}");
        let launch = Arc::new(Launch::new(&section, "command", &name, &config.command, &config.env, config.timeout)?);
        let worker = |_| Mutex::new(Worker::new(Arc::clone(&launch)));
        let workers = (0..workers).map(worker).collect();
        Ok(Self { name, batch_size: config.batch_size, workers })
    }
}

impl RewardFn for Program {
    fn name(&self) -> &str {
        &self.name
    }

    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        self.score_batch(std::slice::from_ref(input)).pop()?.ok()?
    }

    fn score_batch(&self, inputs: &[RewardInput<'_>]) -> Vec<Score> {
        // Batches are of similar size, so that no worker waits for a longer batch of another one.
        let share = inputs.len().div_ceil(self.workers.len()).clamp(1, self.batch_size);
        score_batches(&self.workers, inputs.chunks(share), |worker, batch| lock(worker).score(batch))
    }
}
