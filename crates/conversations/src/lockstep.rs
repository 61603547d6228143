//! Values of the leader in a run of several processes.
//!
//! All processes sample the same turns in the same order. The answers of environments, the requests of agents and rewards are not functions of
//! the seed, so the leader alone has them, and sends them at points that every process reaches in the same order:
//!
//! ```text
//! environments:                                  agents:
//!     first messages of all conversations            until all agents have ended:
//!     until no conversation is open:                     requests of the next batch, or the rewards
//!         sample a turn of each                          sample an answer to each
//!         answers to all turns of the batch              which answers were delivered
//! ```
//!
//! On the leader, environments answer while other turns are sampled, in any order. A message has the answers in the order of the conversations.
//! A message after a batch has the SHA-256 of its completions: a process that has sampled other completions ends with an error.

use crate::error::{Error, Result};
use grpo_distributed::Store;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The SHA-256 of the completions that a value of the leader belongs to; by default, of none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sampled(Vec<u8>);

impl Sampled {
    /// Returns the digest of completions: their token ids, and whether they were truncated.
    pub fn of<'a>(completions: impl Iterator<Item = (&'a [u32], bool)>) -> Self {
        let mut hash = Sha256::new();
        for (ids, truncated) in completions {
            hash.update((ids.len() as u64).to_le_bytes());
            hash.update([u8::from(truncated)]);
            ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
        }
        Self(hash.finalize().to_vec())
    }
}

/// Returns `true` if this process leads its run, or is its only one.
pub fn leads(store: Option<&Store>) -> bool {
    store.is_none_or(Store::is_leader)
}

/// Returns the leader's `value()` in all processes; without a store, the `value()` of this process. `sampled` is the digest of the completions
/// that this process has sampled before.
///
/// # Errors
/// [`Error::Processes`]; [`Error::OtherCompletions`] if this process has sampled other completions than the leader.
pub fn share<T: Serialize + DeserializeOwned>(
    store: Option<&Store>,
    name: &str,
    sampled: &Sampled,
    value: impl FnOnce() -> T,
) -> Result<T> {
    let Some(store) = store else { return Ok(value()) };
    let (leader_sampled, value): (Sampled, T) = store.share(name, || (sampled.clone(), value()))?;
    match leader_sampled == *sampled {
        true => Ok(value),
        false => Err(Error::OtherCompletions { process: store.process_id() }),
    }
}

/// Like [`share`], for a list of `count` values.
///
/// # Errors
/// The errors of [`share`]; [`Error::Processes`] for a list of another length.
pub fn share_list<T: Serialize + DeserializeOwned>(
    store: Option<&Store>,
    name: &str,
    sampled: &Sampled,
    count: usize,
    values: impl FnOnce() -> Vec<T>,
) -> Result<Vec<T>> {
    let values = share(store, name, sampled, values)?;
    if values.len() == count { Ok(values) } else { Err(unexpected(store, name, count)) }
}

/// Returns the error for a value that does not belong to `count` completions.
pub(crate) fn unexpected(store: Option<&Store>, name: &str, count: usize) -> Error {
    let (name, reason) = (name.to_owned(), format!("expected values of {count} completions"));
    Error::Processes(grpo_distributed::Error::Value { name, process: store.map_or(0, Store::process_id), reason })
}
