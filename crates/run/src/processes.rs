//! A run of several processes: the leader decides, and the others follow its commands.
//!
//! All processes call the trainer's methods in the same order. [`Command`]s of the leader say which comes next, so that signals, the best
//! checkpoint and the end of the run are decided once.

use super::changes::leaves;
use super::digest::sha256;
use super::members::Members;
use crate::error::{Error, Result};
use grpo_distributed::{Options, Store};
use grpo_files::redacted;
use grpo_run_config::TrainConfig;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// The name of the broadcast of a command.
const COMMAND: &str = "the next command";
/// The key that a follower sets when a signal asks it to stop.
const STOP: &str = "stop";

/// The next operation of all processes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Command {
    /// A step of the warm-up.
    Warmup,
    /// A GRPO step.
    Step,
    /// An evaluation.
    Evaluate,
    /// A checkpoint of this name: all processes export their state, and compare the digests.
    Save(String),
    /// The weights of the best checkpoint are loaded.
    LoadBest,
    /// The model is exported.
    Export,
    /// The run is over, or was stopped.
    End {
        /// `true` if it was stopped.
        stopped: bool,
    },
}

/// How the processes begin a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beginning {
    /// All processes have the configuration.
    New,
    /// The leader has the run folder with the configuration.
    Resumed,
}

/// Connects the processes of a run; `None` for a run of one process. Processes of a new run compare their binaries and their
/// configurations; processes of a resumed run compare their binaries, and followers receive the configuration.
///
/// # Errors
/// [`grpo_run_config::Error::Key`] for a configuration that several processes cannot have; the errors of [`Store::open`]; [`Error::File`] if the
/// binary cannot be read.
pub(crate) fn connect(config: &TrainConfig, beginning: Beginning) -> Result<Option<Arc<Store>>> {
    let Some(Members { coordinator_address, num_processes, process_id }) = Members::of(config)? else {
        return Ok(None);
    };
    config.validate_processes(num_processes)?;
    let limit = Duration::from_secs;
    let options = Options {
        initialization_timeout: limit(config.distributed.initialization_timeout),
        heartbeat_timeout: limit(config.distributed.heartbeat_timeout_seconds),
        ..Options::new(&coordinator_address, num_processes, process_id)
    };
    let mut facts = vec![("the binary".to_owned(), binary()?), ("the beginning".to_owned(), format!("{beginning:?}"))];
    if beginning == Beginning::New {
        let (shown, _) = redacted(config).map_err(|e| Error::Text(format!("configuration: {e}")))?;
        // Only the leader reads the section `run`.
        let is_own = |key: &str| key == "distributed.process_id" || key.starts_with("run.");
        let keys = leaves(&shown)?.into_iter().filter(|(key, _)| !is_own(key));
        facts.extend(keys.map(|(key, value)| (key, value.to_string())));
    }
    let facts: Vec<(&str, &str)> = facts.iter().map(|(name, value)| (&**name, &**value)).collect();
    let store = Store::open(&options, &facts).map_err(grpo_trainer::Error::from)?;
    tracing::info!("process {process_id} of {num_processes} is connected");
    Ok(Some(Arc::new(store)))
}

/// Returns the version and the digest of this binary.
fn binary() -> Result<String> {
    let path = std::env::current_exe().map_err(|e| Error::Text(format!("the path of this program: {e}")))?;
    let bytes = std::fs::read(&path).map_err(|e| Error::io("read", &path, e))?;
    Ok(format!("{} sha256:{}", env!("CARGO_PKG_VERSION"), sha256(&bytes)))
}

/// Returns a function that sends an error of this process to the others.
pub(crate) fn report<E: std::fmt::Display>(store: Option<&Store>) -> impl Fn(&E) {
    move |error| store.iter().for_each(|store| store.fail(&error.to_string()))
}

/// Sends the next command to the followers, if there are any.
///
/// # Errors
/// [`grpo_trainer::Error::Processes`].
pub(crate) fn lead(store: Option<&Arc<Store>>, command: &Command) -> Result<()> {
    if let Some(store) = store {
        share(store, COMMAND, || Ok(command.clone()))?;
    }
    Ok(())
}

/// Waits for the leader's next command.
///
/// # Errors
/// [`grpo_trainer::Error::Processes`].
pub(crate) fn next_command(store: &Store) -> Result<Command> {
    share(store, COMMAND, || Err(Error::Text("a follower gives no commands".into())))
}

/// Returns the leader's `value()` in all processes.
///
/// # Errors
/// The error of `value`; [`grpo_trainer::Error::Processes`].
pub(crate) fn share<T: Serialize + for<'de> Deserialize<'de>>(
    store: &Store,
    name: &str,
    value: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let text = |e: serde_json::Error| Error::Text(format!("{name}: {e}"));
    let bytes = match store.is_leader() {
        true => serde_json::to_vec(&value()?).map_err(text)?,
        false => Vec::new(),
    };
    let bytes = store.broadcast(name, || bytes).map_err(grpo_trainer::Error::from)?;
    serde_json::from_slice(&bytes).map_err(text)
}

/// Checks that `token` is equal in all processes.
///
/// # Errors
/// [`grpo_trainer::Error::Processes`] with the process that differs.
pub(crate) fn agree(store: &Store, name: &str, token: &[u8], config: &TrainConfig) -> Result<()> {
    Ok(store.barrier(name, token, config.policy.wait_limit()).map_err(grpo_trainer::Error::from)?)
}

/// Asks the leader to stop after its current step.
///
/// # Errors
/// [`grpo_trainer::Error::Processes`].
pub(crate) fn request_stop(store: &Store) -> Result<()> {
    Ok(store.put(STOP, &[]).map_err(grpo_trainer::Error::from)?)
}

/// Returns `true` if a follower has asked to stop.
///
/// # Errors
/// [`grpo_trainer::Error::Processes`].
pub(crate) fn is_stop_requested(store: Option<&Arc<Store>>) -> Result<bool> {
    let Some(store) = store else { return Ok(false) };
    Ok(store.try_get(STOP).map_err(grpo_trainer::Error::from)?.is_some())
}
