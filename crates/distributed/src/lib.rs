#![doc = include_str!("../README.md")]
//! Process 0, the *leader*, listens at an address; the other processes, its *followers*, connect to it. There are no other connections.
//! Tensors never pass through the store: collectives between devices are the work of XLA and its plugins.
//!
//! ```no_run
//! use grpo_distributed::{Options, Store};
//! use std::time::Duration;
//!
//! # fn main() -> grpo_distributed::Result<()> {
//! let options = Options::new("10.0.0.1:8476", 2, 0); // 2 processes, this one is the leader
//! let store = Store::open(&options, &[("seed", "17")])?; // waits for the follower
//! let seed = store.broadcast("seed", || vec![17])?; // on the follower, the closure does not run
//! store.barrier("weights", b"their SHA-256", Duration::from_secs(60))?; // an error if the digests differ
//! store.close()
//! # }
//! ```
//!
//! # Failures
//!
//! A process that ends, that sends nothing for [`Options::heartbeat_timeout`], or that calls [`Store::fail`] fails the store of every
//! process: all waits return at once, all later calls return the same error, and [`Error::Peer`] names the process.
//!
//! # Security
//!
//! Messages are neither encrypted nor authenticated, as in JAX's distributed service: the address belongs into a private network. Frames,
//! keys and the number of connections have limits, and a peer's words are checked before they are used. A connection that does not speak
//! the protocol is closed and logged. Before the run starts, a process with another configuration ends it.
#![forbid(unsafe_code)]

mod connect;
mod error;
mod follower;
mod leader;
mod link;
mod message;
mod options;

pub use error::{Error, Result};
pub use options::{DEFAULT_PORT, MAX_KEY, MAX_STORED, MAX_VALUE, Options};

use follower::Follower;
use leader::Leader;
use options::END;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The connection of a process to the others of its run. All methods may be called by several threads, but [`Store::barrier`] and
/// [`Store::broadcast`] are collective: all processes call them in the same order.
///
/// A store that is dropped without [`Store::close`] closes its connections, which fails the other processes.
#[derive(Debug)]
pub struct Store {
    role: Role,
    options: Options,
}

#[derive(Debug)]
enum Role {
    Leader(Arc<Leader>),
    Follower(Arc<Follower>),
}

impl Store {
    /// Connects to the other processes. The leader waits until all of them are connected; a follower tries to connect until the leader
    /// listens. `facts` are names and values, such as keys of a configuration and the version of the binary, that must be equal in all
    /// processes. They are sent over the network, so they must not contain secrets.
    ///
    /// # Errors
    /// * [`Error::Options`] for an invalid address, number or limit;
    /// * [`Error::Listen`] if the leader cannot listen at the address;
    /// * [`Error::Unreachable`] if a follower cannot reach the leader within [`Options::initialization_timeout`];
    /// * [`Error::Missing`] if processes are not connected within this time;
    /// * [`Error::Peer`] for a process with another protocol, number of processes or fact, or with the id of another process.
    pub fn open(options: &Options, facts: &[(&str, &str)]) -> Result<Self> {
        let facts: BTreeMap<String, String> =
            facts.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        connect::check(options)?;
        let role = match options.process_id {
            0 => Role::Leader(connect::listen(options, &facts)?),
            _ => Role::Follower(connect::connect(options, &facts)?),
        };
        Ok(Self { role, options: options.clone() })
    }

    /// Returns the options of this process.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Returns the number of processes.
    pub fn num_processes(&self) -> usize {
        self.options.num_processes
    }

    /// Returns the number of this process, from 0.
    pub fn process_id(&self) -> usize {
        self.options.process_id
    }

    /// Returns `true` for process 0.
    pub fn is_leader(&self) -> bool {
        self.options.process_id == 0
    }

    /// Sets the value of a key, which all processes can read.
    ///
    /// # Errors
    /// [`Error::Size`] for a key of more than [`MAX_KEY`] or a value of more than [`MAX_VALUE`] bytes; [`Error::Full`] for a store of more than
    /// [`MAX_STORED`] bytes; [`Error::Exists`] if the key has another value; [`Error::Peer`].
    pub fn put(&self, key: &str, value: &[u8]) -> Result<()> {
        check_sizes(key, value)?;
        match &self.role {
            Role::Leader(leader) => leader.put(key, value.to_vec()),
            Role::Follower(follower) => follower.put(key, value),
        }
    }

    /// Returns the value of a key, and waits for it up to `timeout`.
    ///
    /// # Errors
    /// [`Error::TimedOut`]; [`Error::Size`] for the key; [`Error::Peer`].
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        check_sizes(key, &[])?;
        match &self.role {
            Role::Leader(leader) => leader.get(key, timeout),
            Role::Follower(follower) => follower.get(key, timeout),
        }
    }

    /// Returns the value of a key; `None` if it has none.
    ///
    /// # Errors
    /// [`Error::Size`] for the key; [`Error::Peer`].
    pub fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        check_sizes(key, &[])?;
        match &self.role {
            Role::Leader(leader) => leader.try_get(key),
            Role::Follower(follower) => follower.try_get(key),
        }
    }

    /// Waits until all processes have called the barrier `name`. `token` must be equal in all of them, such as the digest of their weights.
    ///
    /// # Errors
    /// [`Error::Peer`] for a process with another token, or at another barrier; [`Error::TimedOut`] if a process is missing after `timeout`.
    /// Except for [`Error::Size`], the store of every process has then failed.
    pub fn barrier(&self, name: &str, token: &[u8], timeout: Duration) -> Result<()> {
        check_sizes(name, token)?;
        match &self.role {
            Role::Leader(leader) => leader.barrier(name, token, timeout),
            Role::Follower(follower) => follower.barrier(name, token, timeout),
        }
    }

    /// Returns the leader's `value()` in all processes. Followers do not call `value`, and wait as long as the leader lives.
    ///
    /// # Errors
    /// [`Error::Size`] for the name; [`Error::Peer`], also if the leader sends a broadcast of another name.
    pub fn broadcast(&self, name: &str, value: impl FnOnce() -> Vec<u8>) -> Result<Vec<u8>> {
        check_sizes(name, &[])?;
        match &self.role {
            Role::Leader(leader) => {
                let value = value();
                leader.broadcast(name, &value)?;
                Ok(value)
            }
            Role::Follower(follower) => follower.receive(name),
        }
    }

    /// Returns the leader's `value()` in all processes, which all decode the same JSON. Followers do not call `value`, and wait as long as the
    /// leader lives.
    ///
    /// # Errors
    /// The errors of [`Store::broadcast`]; [`Error::Value`] if JSON cannot represent the value.
    pub fn share<T: Serialize + DeserializeOwned>(&self, name: &str, value: impl FnOnce() -> T) -> Result<T> {
        let unreadable = |error: serde_json::Error| Error::Value {
            name: name.to_owned(),
            process: self.process_id(),
            reason: error.to_string(),
        };
        let mut failed = None;
        let bytes = self
            .broadcast(name, || serde_json::to_vec(&value()).map_err(|error| failed = Some(error)).unwrap_or_default());
        match failed {
            Some(error) => Err(unreadable(error)),
            None => serde_json::from_slice(&bytes?).map_err(unreadable),
        }
    }

    /// Reports an error of this process, which fails the store of every process.
    pub fn fail(&self, message: &str) {
        match &self.role {
            Role::Leader(leader) => leader.fail(message),
            Role::Follower(follower) => follower.fail(message),
        }
    }

    /// Waits until the store has failed, and returns its error; `None` once it is closed.
    pub fn failure(&self) -> Option<Error> {
        match &self.role {
            Role::Leader(leader) => leader.failure(),
            Role::Follower(follower) => follower.failure(),
        }
    }

    /// Waits until all processes call it. Their connections may then close without an error.
    ///
    /// # Errors
    /// [`Error::TimedOut`] after [`Options::initialization_timeout`]; [`Error::Peer`].
    pub fn close(&self) -> Result<()> {
        self.barrier(END, &[], self.options.initialization_timeout)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        match &self.role {
            Role::Leader(leader) => leader.disconnect(),
            Role::Follower(follower) => follower.disconnect(),
        }
    }
}

fn check_sizes(key: &str, value: &[u8]) -> Result<()> {
    for (what, limit, found) in [("a key", MAX_KEY, key.len()), ("a value", MAX_VALUE, value.len())] {
        if found > limit {
            return Err(Error::Size { what, limit, found });
        }
    }
    Ok(())
}
