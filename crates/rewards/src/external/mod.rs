//! Reward functions outside of this process: programs and HTTP endpoints, which exchange the same JSON.

mod group;
#[cfg(feature = "http")]
mod http;
mod http_config;
mod message;
pub(crate) mod process;
mod program;
mod worker;

pub use group::kill_programs;
#[cfg(feature = "http")]
pub use http::Http;
pub use http_config::HttpConfig;
pub use message::{answer, expand, parsed, seconds, shown};
pub use program::{MAX_WORKERS, Program, ProgramConfig};
pub use worker::back_off;

use crate::reward_fn::{RewardInput, Score};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Scores batches on one thread per worker, and returns the scores in order. A thread that has scored a batch takes the next one.
fn score_batches<'a, W: Send>(
    workers: impl IntoIterator<Item = W>,
    batches: std::slice::Chunks<'_, RewardInput<'a>>,
    score: impl Fn(&W, &[RewardInput<'a>]) -> Vec<Score> + Sync,
) -> Vec<Score> {
    let count = batches.len();
    let (queue, done, score) = (Mutex::new(batches.enumerate()), Mutex::new(BTreeMap::new()), &score);
    std::thread::scope(|scope| {
        for worker in workers.into_iter().take(count) {
            let (queue, done) = (&queue, &done);
            scope.spawn(move || {
                loop {
                    let Some((index, batch)) = lock(queue).next() else { break };
                    let scores = score(&worker, batch);
                    lock(done).insert(index, scores);
                }
            });
        }
    });
    lock(&done).values_mut().flat_map(std::mem::take).collect()
}

/// Locks a value, which stays valid if a thread panics.
pub fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}
