//! A process of a run that follows the leader.

use crate::checkpoint::{self, SavedState};
use crate::error::{Error, Result};
use crate::fingerprint::Fingerprint;
use crate::processes::{self, Beginning, Command, agree, next_command, request_stop, share};
use crate::shared::{SharedTensors, share_state};
use distributed::Store;
use grpo_files::Layers;
use models::NamedTensor;
use run_config::TrainConfig;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use trainer::{Prepared, Trainer};

/// A process with a `distributed.process_id` above 0. It has the weights and takes the same steps as process 0, which decides what comes
/// next, calls the reward functions and writes the run folder. A follower writes no files.
pub struct Follower {
    trainer: Trainer,
    store: Arc<Store>,
}

impl Follower {
    /// Connects to process 0, which starts a new run with this configuration.
    ///
    /// # Errors
    /// The errors of [`Prepared::new`] and [`Prepared::trainer`]; [`trainer::Error::Processes`], also if process 0 has another
    /// configuration, model or data.
    pub fn start(config: TrainConfig) -> Result<Self> {
        config.validate()?;
        let store = connect(&config, Beginning::New)?;
        reported(&store, || {
            let trainer = Prepared::new(without_connections(config))?.with_store(Some(Arc::clone(&store))).trainer()?;
            agree_on_files(&store, &Fingerprint::of(trainer.config())?, trainer.config())?;
            Ok(Self { trainer, store: Arc::clone(&store) })
        })
    }

    /// Connects to process 0, which resumes a run. The configuration and the checkpoint come from process 0. `set` has the assignments of
    /// the section `distributed`.
    ///
    /// # Errors
    /// The errors of [`Follower::start`]; [`trainer::Error::Policy`] if the checkpoint does not fit.
    pub fn resume(set: &[String]) -> Result<Self> {
        let own: TrainConfig = Layers::new().set(set)?.resolve()?;
        own.distributed.validate()?;
        let store = connect(&own, Beginning::Resumed)?;
        reported(&store, || {
            let of_leader: TrainConfig = share(&store, CONFIGURATION, no_follower)?;
            let config = without_connections(TrainConfig { distributed: own.distributed.clone(), ..of_leader });
            let mut trainer = Prepared::resumed(config, None)?.with_store(Some(Arc::clone(&store))).trainer()?;
            agree_on_files(&store, &Fingerprint::of(trainer.config())?, trainer.config())?;
            if let Some(saved) = share::<Option<SavedState>>(&store, STATE, no_follower)? {
                trainer.restore(&share_state(&store, &saved, None)?)?;
            }
            Ok(Self { trainer, store: Arc::clone(&store) })
        })
    }

    /// Returns the connection to the other processes.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Follows the commands of process 0 to the end of the run. If `stop` is set, asks process 0 to stop after the current step. Returns
    /// `true` if the run is over, `false` if it was stopped.
    ///
    /// # Errors
    /// The errors of the trainer; [`trainer::Error::Processes`]. The other processes then end, too.
    pub fn run(&mut self, stop: &AtomicBool) -> Result<bool> {
        let store = Arc::clone(&self.store);
        reported(&store, || self.follow(stop))
    }

    fn follow(&mut self, stop: &AtomicBool) -> Result<bool> {
        let mut told = false;
        loop {
            if !told && stop.load(Ordering::Relaxed) {
                request_stop(&self.store)?;
                told = true;
            }
            let trainer = &mut self.trainer;
            match next_command(&self.store)? {
                Command::Warmup => {
                    trainer.warmup_step()?;
                }
                Command::Step => match trainer.grpo_step() {
                    // The leader has the same error, and saves a checkpoint first.
                    Err(trainer::Error::TooFewGroups { .. } | trainer::Error::Rewards(_)) => {}
                    report => drop(report?),
                },
                Command::Evaluate => drop(trainer.evaluate()?),
                Command::Save(name) => {
                    let policy = trainer.policy();
                    let steps = trainer.counters().optimizer_steps;
                    let sums = checkpoint::digests(steps, &|group, sink| policy.export(group, sink))?;
                    agree(&self.store, &checkpoint::weights_of(&name), sums.as_bytes(), trainer.config())?;
                }
                Command::LoadBest => {
                    let weights = SharedTensors::new(&self.store, None)?;
                    trainer.load_weights(&weights)?;
                }
                Command::Export => {
                    // An export may be a collective.
                    let mut ignored = |_: NamedTensor| Ok(());
                    let config = trainer.config();
                    match config.lora.is_some() && !config.export.merge_adapters {
                        true => trainer.policy().export_adapter(&mut ignored)?,
                        false => trainer.policy().export_model(&mut ignored)?,
                    }
                }
                Command::End { stopped } => {
                    self.store.close().map_err(trainer::Error::from)?;
                    return Ok(!stopped);
                }
            }
        }
    }
}

/// The name of the broadcast of a resumed run's configuration.
pub(crate) const CONFIGURATION: &str = "the configuration of the resumed run";
/// The name of the broadcast of a resumed run's state.
pub(crate) const STATE: &str = "the state of the resumed run";

fn connect(config: &TrainConfig, beginning: Beginning) -> Result<Arc<Store>> {
    let found = config.distributed.process_id.unwrap_or_default();
    let expected = "1 or more, with distributed.coordinator_address and distributed.num_processes";
    run_config::check(config.distributed.is_follower(), "distributed.process_id", expected, found)?;
    processes::connect(config, beginning)?.ok_or_else(|| Error::Text("a follower needs a leader".into()))
}

/// Checks that the model and the data of all processes are equal.
///
/// # Errors
/// [`trainer::Error::Processes`] with the process that differs.
pub(crate) fn agree_on_files(store: &Store, files: &Fingerprint, config: &TrainConfig) -> Result<()> {
    agree(store, "the files of the model and the data", files.digest()?.as_bytes(), config)
}

/// Removes the connections to external rewards, which only the leader uses: a follower needs neither their secrets nor their programs.
fn without_connections(mut config: TrainConfig) -> TrainConfig {
    for http in config.rewards.http.values_mut() {
        (http.url, http.headers) = ("http://process-0.invalid".to_owned(), BTreeMap::new());
    }
    for program in config.rewards.programs.values_mut() {
        (program.command, program.env) = (vec!["process-0".to_owned()], BTreeMap::new());
    }
    config
}

/// Sends an error of this process to the others.
fn reported<T>(store: &Store, work: impl FnOnce() -> Result<T>) -> Result<T> {
    work().inspect_err(|error| store.fail(&error.to_string()))
}

fn no_follower<T>() -> Result<T> {
    Err(Error::Text("a follower has no checkpoint".into()))
}
