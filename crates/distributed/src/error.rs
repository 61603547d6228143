//! The errors of a store.

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An invalid option.
    #[error("`{option}`: expected {expected}, got {found}")]
    Options {
        /// The name of the option.
        option: &'static str,
        /// The valid values.
        expected: String,
        /// The value found.
        found: String,
    },
    /// The leader cannot listen.
    #[error(
        "process 0 cannot listen at {address}: {reason}: coordinator_address must be an address of the machine of process 0, with a free port"
    )]
    Listen {
        /// The address.
        address: String,
        /// The reason of the system.
        reason: String,
    },
    /// A follower cannot reach the leader.
    #[error(
        "process {process} has not reached process 0 at {address} within {seconds} seconds: {reason}: check that process 0 runs, that it \
         was started less than {seconds} seconds before, and that this machine can connect to this address"
    )]
    Unreachable {
        /// The number of this process.
        process: usize,
        /// The address of the leader.
        address: String,
        /// The limit, in seconds.
        seconds: u64,
        /// The last error of the system.
        reason: String,
    },
    /// Processes did not connect in time.
    #[error(
        "{} not connected to process 0 at {address} within {seconds} seconds: check that each of the {num_processes} processes was started with \
         its own process_id and with this coordinator_address", missing(.processes)
    )]
    Missing {
        /// The numbers of the missing processes.
        processes: Vec<usize>,
        /// The number of all processes.
        num_processes: usize,
        /// The address of the leader.
        address: String,
        /// The limit, in seconds.
        seconds: u64,
    },
    /// Another process has ended, failed, or does something else than this one.
    #[error("process {process} ({address}) {reason}")]
    Peer {
        /// The number of the process.
        process: usize,
        /// The address of the process, as the leader sees it; for the leader its own.
        address: String,
        /// The failure, which completes a sentence about the process.
        reason: String,
    },
    /// A value, or a process at a barrier, did not arrive in time.
    #[error("{what} has not arrived within {seconds} seconds")]
    TimedOut {
        /// The key, or the process and the barrier.
        what: String,
        /// The limit, in seconds.
        seconds: u64,
    },
    /// The key has another value.
    #[error("the key `{key}` has another value already")]
    Exists {
        /// The key.
        key: String,
    },
    /// The store is full.
    #[error(
        "the key `{key}` has no room in the store of process 0, which holds {} bytes and {} waiting requests",
        crate::options::MAX_STORED,
        crate::options::MAX_WAITING
    )]
    Full {
        /// The key.
        key: String,
    },
    /// A shared value that this process cannot read.
    #[error("{name}: process 0 has sent a value that process {process} cannot read: {reason}")]
    Value {
        /// The name of the value.
        name: String,
        /// The number of this process.
        process: usize,
        /// The reason.
        reason: String,
    },
    /// A key or a value is too large.
    #[error("{what} has at most {limit} bytes, got {found}")]
    Size {
        /// The kind of the object.
        what: &'static str,
        /// The largest size in bytes.
        limit: usize,
        /// The size found, in bytes.
        found: usize,
    },
    /// The store is closed.
    #[error("the run is over: its processes are disconnected")]
    Closed,
}

fn missing(processes: &[usize]) -> String {
    let list: Vec<String> = processes.iter().map(usize::to_string).collect();
    match list.len() {
        1 => format!("process {} is", list[0]),
        _ => format!("processes {} are", list.join(", ")),
    }
}
