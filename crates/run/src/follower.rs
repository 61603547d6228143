//! A process of a run that follows the leader.

use crate::checkpoint::{self, SavedState};
use crate::error::{Error, Result};
use crate::fingerprint::Fingerprint;
use crate::members::is_follower;
use crate::processes::{self, Beginning, Command, agree, next_command, report, request_stop, share};
use crate::shared::{SharedTensors, share_state};
use grpo_distributed::Store;
use grpo_models::NamedTensor;
use grpo_policy::StateGroup;
use grpo_run_config::TrainConfig;
use grpo_setup::Prepared;
use grpo_trainer::Trainer;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A process of a run that is not process 0 ([`is_follower`](crate::is_follower)). It has the weights and takes the same steps as process 0, which decides what comes
/// next, runs environments, calls the reward functions and writes the run folder. A follower writes no files.
pub struct Follower {
    trainer: Trainer,
    store: Arc<Store>,
}

impl Follower {
    /// Connects to process 0, which starts a new run with this configuration.
    ///
    /// # Errors
    /// The errors of [`Prepared::new`] and [`Prepared::trainer`]; [`grpo_trainer::Error::Processes`], also if process 0 has another
    /// configuration, model or data.
    pub fn start(config: TrainConfig) -> Result<Self> {
        config.validate()?;
        let store = connect(&config, Beginning::New)?;
        reported(&store, || {
            Self::start_with(Prepared::in_process(without_connections(config), Some(Arc::clone(&store)))?.trainer()?)
        })
    }

    /// Follows process 0, which starts a new run, with your own trainer, made by [`Trainer::with_parts`] with [`grpo_trainer::Parts::store`].
    ///
    /// # Errors
    /// [`Error::Text`] without a store; [`grpo_trainer::Error::Processes`] if process 0 has other files.
    pub fn start_with(trainer: Trainer) -> Result<Self> {
        let Some(store) = trainer.store().cloned() else {
            return Err(Error::Text("a follower: expected a trainer with a store (Parts::store), got none".into()));
        };
        agree_on_files(&store, &Fingerprint::of(trainer.config())?, trainer.config())?;
        Ok(Self { trainer, store })
    }

    /// Connects to process 0, which resumes a run. The configuration and the checkpoint come from process 0. `own` has the section
    /// `distributed`, and the device on which libtpu's environment may say the processes.
    ///
    /// # Errors
    /// The errors of [`Follower::start`]; [`grpo_trainer::Error::Policy`] if the checkpoint does not fit.
    pub fn resume(own: TrainConfig) -> Result<Self> {
        own.distributed.validate()?;
        let store = connect(&own, Beginning::Resumed)?;
        reported(&store, || {
            let leader_config: TrainConfig = share(&store, CONFIGURATION, no_follower)?;
            let config = without_connections(TrainConfig { distributed: own.distributed.clone(), ..leader_config });
            Self::resume_with(Prepared::resumed(config, None, Some(Arc::clone(&store)))?.trainer()?)
        })
    }

    /// Follows process 0, which resumes a run, with your own trainer, see [`Follower::start_with`]. The checkpoint comes from process 0.
    ///
    /// # Errors
    /// The errors of [`Follower::start_with`]; [`grpo_trainer::Error::Policy`] if the checkpoint does not fit.
    pub fn resume_with(trainer: Trainer) -> Result<Self> {
        let mut follower = Self::start_with(trainer)?;
        if let Some(saved) = share::<Option<SavedState>>(&follower.store, STATE, no_follower)? {
            follower.trainer.restore(&share_state(&follower.store, &saved, None)?)?;
        }
        Ok(follower)
    }

    /// Returns the connection to the other processes.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Follows the commands of process 0 to the end of the run. If `stop` is set, asks process 0 to stop after the current step. Returns
    /// `true` if the run is over, `false` if it was stopped.
    ///
    /// # Errors
    /// The errors of the trainer; [`grpo_trainer::Error::Processes`]. The other processes then end, too.
    pub fn run(&mut self, stop: &AtomicBool) -> Result<bool> {
        let store = Arc::clone(&self.store);
        reported(&store, || self.follow(stop))
    }

    fn follow(&mut self, stop: &AtomicBool) -> Result<bool> {
        let mut has_requested = false;
        loop {
            if !has_requested && stop.load(Ordering::Relaxed) {
                request_stop(&self.store)?;
                has_requested = true;
            }
            let trainer = &mut self.trainer;
            match next_command(&self.store)? {
                Command::Warmup => {
                    trainer.warmup_step()?;
                }
                Command::Step => match trainer.grpo_step() {
                    // The leader has the same error, and saves a checkpoint first.
                    Err(
                        grpo_trainer::Error::TooFewGroups { .. }
                        | grpo_trainer::Error::Rewards(_)
                        | grpo_trainer::Error::Environments(grpo_trainer::agents::Error::TooManyFailures { .. }),
                    ) => {}
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
                    let policy = trainer.policy();
                    match config.lora.is_some() && !config.export.merge_adapters {
                        true => policy.export_adapter(&mut ignored)?,
                        // The leader merges the adapters into other weights.
                        false if config.policy.quantization.is_some() => {
                            policy.export(StateGroup::Weights(grpo_policy::Weights::Policy), &mut ignored)?;
                        }
                        false => policy.export_model(&mut ignored)?,
                    }
                }
                Command::End { stopped } => {
                    self.store.close().map_err(grpo_trainer::Error::from)?;
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
    let expected = "1 or more, with distributed.coordinator_address and distributed.num_processes";
    let found = config.distributed.process_id.unwrap_or_default();
    grpo_run_config::check(is_follower(config)?, "distributed.process_id", expected, found)?;
    processes::connect(config, beginning)?.ok_or_else(|| Error::Text("a follower needs a leader".into()))
}

/// Checks that the model and the data of all processes are equal.
///
/// # Errors
/// [`grpo_trainer::Error::Processes`] with the process that differs.
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

fn reported<T>(store: &Store, work: impl FnOnce() -> Result<T>) -> Result<T> {
    work().inspect_err(report(Some(store)))
}

fn no_follower<T>() -> Result<T> {
    Err(Error::Text("a follower has no checkpoint".into()))
}
