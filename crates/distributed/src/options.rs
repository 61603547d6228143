//! The options and the limits of a store.

use std::time::Duration;

/// The port of the leader if an address names none, as in JAX.
pub const DEFAULT_PORT: u16 = 8476;

/// The largest length of a key or of the name of a collective, in bytes.
pub const MAX_KEY: usize = 1 << 10;

/// The largest size of a value of [`crate::Store::put`], in bytes. Broadcasts have no limit; they are sent in parts of this size.
pub const MAX_VALUE: usize = 1 << 24;

/// The largest size of all keys and values of a store, in bytes.
pub const MAX_STORED: usize = 1 << 30;

/// The largest number of requests for values that do not exist yet.
pub(crate) const MAX_WAITING: usize = 1 << 16;

/// The name of the barrier at the end of a run.
pub(crate) const END: &str = "the end of the run";

/// The processes of a run, with JAX's names and defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The address at which process 0 listens, `HOST:PORT`.
    pub coordinator_address: String,
    /// The number of processes.
    pub num_processes: usize,
    /// The number of this process, from 0.
    pub process_id: usize,
    /// The limit of the time until all processes are connected.
    pub initialization_timeout: Duration,
    /// The time after which a process that sends nothing counts as lost.
    pub heartbeat_timeout: Duration,
}

impl Options {
    /// Returns options with JAX's default limits: 300 s to connect, 100 s without a heartbeat.
    pub fn new(coordinator_address: &str, num_processes: usize, process_id: usize) -> Self {
        Self {
            coordinator_address: coordinator_address.to_owned(),
            num_processes,
            process_id,
            initialization_timeout: Duration::from_secs(300),
            heartbeat_timeout: Duration::from_secs(100),
        }
    }
}
