//! Agents: programs that hold a conversation themselves, and ask the policy for messages over an OpenAI-compatible endpoint.

use crate::environment::Failure;
use grpo_data::Item;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// An agent that holds conversations about rows. [`crate::AgentProgram`] is a program in any language; implement the trait for an agent in Rust.
pub trait Agent: Send + Sync {
    /// Returns the number of conversations that the agent holds at the same time.
    fn workers(&self) -> usize {
        1
    }

    /// Holds a conversation about a row on worker number `worker`, and returns its reward; `None` leaves it to the reward functions of the
    /// run.
    ///
    /// # Errors
    /// A failure leaves the conversation out of the step. It is counted.
    fn run(&self, row: &Item, connection: &Connection, worker: usize) -> Result<Option<f32>, Failure>;
}

/// The access of one conversation to the endpoint.
pub struct Connection {
    base_url: String,
    api_key: String,
    clock: Arc<Clock>,
    has_ended: Arc<AtomicBool>,
}

impl Connection {
    #[cfg(feature = "http")]
    pub(crate) fn new(base_url: String, api_key: String, clock: Arc<Clock>, has_ended: Arc<AtomicBool>) -> Self {
        Self { base_url, api_key, clock, has_ended }
    }

    /// Returns the base URL of the endpoint, such as `http://127.0.0.1:8000/v1`.
    pub fn base_url(&self) -> &str {
        &self.base_url
    }

    /// Returns the key of the conversation, which is valid until its agent has ended.
    pub fn api_key(&self) -> &str {
        &self.api_key
    }

    /// Returns the number of requests so far.
    pub fn requests(&self) -> usize {
        self.clock.lock().requests
    }

    /// Returns the time since the last answer of the endpoint, or the start; 0 while a request waits.
    pub fn idle(&self) -> Duration {
        let times = self.clock.lock();
        if times.waiting > 0 { Duration::ZERO } else { times.since.elapsed() }
    }

    /// Returns `true` if the run no longer answers, and the agent should end.
    pub fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Relaxed)
    }
}

/// The requests of a conversation.
#[derive(Default)]
pub(crate) struct Clock(Mutex<Times>);

struct Times {
    requests: usize,
    waiting: usize,
    /// The time of the last answer.
    since: Instant,
}

impl Default for Times {
    fn default() -> Self {
        Self { requests: 0, waiting: 0, since: Instant::now() }
    }
}

/// A request that waits for its answer, until it is dropped.
#[cfg(feature = "http")]
pub(crate) struct Waiting<'a>(&'a Clock);

impl Clock {
    fn lock(&self) -> MutexGuard<'_, Times> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(feature = "http")]
    /// Counts a request; `None` if `most` are waiting.
    pub(crate) fn wait(&self, most: usize) -> Option<Waiting<'_>> {
        let mut times = self.lock();
        if times.waiting >= most {
            return None;
        }
        times.waiting += 1;
        times.requests += 1;
        Some(Waiting(self))
    }
}

#[cfg(feature = "http")]
impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut times = self.0.lock();
        times.waiting -= 1;
        times.since = Instant::now();
    }
}
