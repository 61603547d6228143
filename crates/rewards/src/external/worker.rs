//! A slot for the process of a reward program: sends batches of completions, and restarts the program.

use super::message::{answer, question};
use super::process::{Launch, Process, Stop};
use crate::reward_fn::{RewardFailure, RewardInput, Score};
use grpo_files::long_integers_as_digits;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The delay before a failed program is restarted; it doubles with every consecutive failure.
const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(10);

/// Waits before a program is restarted that has failed `failures_in_a_row` times.
pub fn back_off(failures_in_a_row: u32) {
    if failures_in_a_row > 0 {
        let doublings = (failures_in_a_row - 1).min(16);
        std::thread::sleep((FIRST_BACKOFF * (1 << doublings)).min(MAX_BACKOFF));
    }
}

/// A slot for a process, which is started and restarted as needed.
pub(super) struct Worker {
    launch: Arc<Launch>,
    process: Option<Process>,
    failures_in_a_row: u32,
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
                        reward = self.launch.name(),
                        "{message}; it was started again, and has answered the rest"
                    );
                }
                break;
            };
            self.process = None;
            self.failures_in_a_row = if scores.len() > asked { 1 } else { self.failures_in_a_row + 1 };
            match stop {
                Stop::Ended(message) if ended.is_none() => ended = Some(message),
                stop => {
                    let message = stop.into_message();
                    scores.resize_with(inputs.len(), || Err(RewardFailure::new(message.clone())));
                }
            }
        }
        scores
    }

    /// Sends the completions without an entry in `scores`, and appends their rewards.
    fn ask(&mut self, inputs: &[RewardInput<'_>], scores: &mut Vec<Score>) -> Result<(), Stop> {
        let launch = Arc::clone(&self.launch);
        let process = self.process()?;
        let mut lines = Vec::new();
        for (id, input) in inputs.iter().enumerate().skip(scores.len()) {
            let mut question = question(id, input);
            // Some programs score all completions of a batch at once, and need to know where it ends.
            question["remaining"] = (inputs.len() - id - 1).into();
            lines.extend_from_slice(long_integers_as_digits(question.to_string()).as_bytes());
            lines.push(b'\n');
        }
        process.ask(lines)?;
        let deadline = Instant::now() + launch.timeout();
        while scores.len() < inputs.len() {
            let (id, count) = (scores.len(), inputs.len());
            let value = process.answer(deadline, id, count)?;
            scores.push(answer(id, &value, launch.secrets()).map_err(Stop::Broken)?);
        }
        Ok(())
    }

    /// Returns the running process, after starting it if there is none.
    fn process(&mut self) -> Result<&mut Process, Stop> {
        match &mut self.process {
            Some(process) => Ok(process),
            none => {
                back_off(self.failures_in_a_row);
                Ok(none.insert(Process::start(&self.launch)?))
            }
        }
    }
}
