//! Resumes and exports runs from their checkpoints.

use super::Run;
use crate::changes::{self, Change, config_hash};
use crate::checkpoint::{CheckpointId, Checkpoints, SavedState, StoredTensors};
use crate::dir::{RunDir, set_aside};
use crate::error::{Error, Result};
use crate::export::export;
use crate::fingerprint;
use crate::follower;
use crate::jsonl::{MetricsRow, RowKind};
use crate::logs;
use crate::processes::{self, Beginning, report, share};
use crate::row_index;
use crate::shared::share_state;
use crate::summary::Summary;
use grpo_data::RowIndex;
use grpo_files::{JsonLines, counted, read_regular, read_rows, redacted};
use grpo_policy::{PolicyState, TensorSource};
use grpo_run_config::{TrainConfig, check};
use grpo_setup::{Prepared, export_policy, open_model};
use grpo_trainer::{TrainState, Trainer};
use std::path::{Path, PathBuf};

/// The largest summary.json that is read, in bytes.
const SUMMARY_LIMIT: u64 = 1 << 24;

impl Run {
    /// Resumes the run in `path` from its newest checkpoint, or from the one named `from`. Later rows are removed and
    /// later checkpoints renamed. Without any checkpoint the run starts over.
    ///
    /// `set` has assignments (`a.b=value`) of keys that may change, [`changes::SAFE`]. They, and edits of such keys in config.yaml, apply
    /// from here on and are recorded in the folder.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if the checkpoint is damaged; [`Error::RunDir`] if the model or (without `run.allow_changed_data`) the data has
    /// changed, if a key that may not change has changed (checked before anything that it names is loaded), or if the logs do not match
    /// the checkpoint. Nothing is changed on errors.
    pub fn resume(path: &Path, from: Option<&str>, set: &[String]) -> Result<Self> {
        Self::resume_indexed(path, from, set, |config, index| {
            let store = processes::connect(&config, Beginning::Resumed)?;
            if let Some(store) = &store {
                let (shown, _) = redacted(&config).map_err(|e| Error::Text(format!("configuration: {e}")))?;
                share(store, follower::CONFIGURATION, || Ok(shown))?;
            }
            let trainer = Prepared::resumed(config, index, store.clone()).and_then(Prepared::trainer);
            Ok(trainer.inspect_err(report(store.as_deref()))?)
        })
    }

    /// Like [`Run::resume`], with your own trainer, made from the run's configuration.
    ///
    /// # Errors
    /// The errors of [`Run::resume`].
    pub fn resume_with(
        path: &Path,
        from: Option<&str>,
        set: &[String],
        make: impl FnOnce(TrainConfig) -> grpo_trainer::Result<Trainer>,
    ) -> Result<Self> {
        Self::resume_indexed(path, from, set, |config, _| Ok(make(config)?))
    }

    /// Like [`Run::resume_with`], for a trainer that uses the index of rows in the folder.
    fn resume_indexed(
        path: &Path,
        from: Option<&str>,
        set: &[String],
        make: impl FnOnce(TrainConfig, Option<RowIndex>) -> Result<Trainer>,
    ) -> Result<Self> {
        let dir = RunDir::open(path)?;
        let checkpoints = Checkpoints::new(dir.checkpoints_path());
        let config = dir.config(set)?;
        let mut changes = changes::safe_changes(&dir, &config)?;
        let Some(position) = choose(&checkpoints, from, path)? else {
            let (fingerprint, data_changes) = fingerprint::check(&dir, &config)?;
            let index = row_index::read(&dir, &config, &fingerprint);
            let trainer = make(config.clone(), index)?;
            if let Some(store) = trainer.store() {
                follower::agree_on_files(store, &fingerprint, trainer.config())?;
                share(store, follower::STATE, || Ok(None::<SavedState>))?;
            }
            let run = Self::begin_again(dir, trainer, &config, [changes, data_changes].concat())?;
            fingerprint.write(&run.dir)?;
            return Ok(run);
        };
        let with_last_good = |error| match error {
            Error::Checkpoint { path, reason, .. } => {
                let advice = match checkpoints.last_good(position) {
                    Some(name) => {
                        format!("; the last good checkpoint is {name}: add `--from {name}` to continue from it")
                    }
                    None => {
                        "; no other checkpoint of this run is whole: start a new run from its config.yaml".to_owned()
                    }
                };
                Error::Checkpoint { path, reason, advice }
            }
            other => other,
        };
        // Everything is checked before code or weights are loaded and before anything is changed.
        let (saved, state) = read(&checkpoints, position, &config).map_err(with_last_good)?;
        let done = saved.counters.grpo_steps;
        let expected = format!("at least {done}, the steps that {position} has done");
        check(config.grpo.max_steps >= done, "grpo.max_steps", &expected, config.grpo.max_steps)?;
        logs::check(&dir, &saved, position)?;
        let (fingerprint, data_changes) = fingerprint::check(&dir, &config)?;
        changes.extend(data_changes);
        let index = row_index::read(&dir, &config, &fingerprint);
        let was_indexed = index.is_some();
        let mut trainer = make(config.clone(), index)?;
        let place = checkpoints.path(position);
        let restored = match trainer.store().cloned() {
            None => restore(&place, &saved, &state, &mut trainer),
            Some(store) => {
                follower::agree_on_files(&store, &fingerprint, trainer.config())?;
                share(&store, follower::STATE, || Ok(Some(saved.clone())))?;
                restore(&place, &saved, &share_state(&store, &saved, Some(&state))?, &mut trainer)
            }
        };
        restored.map_err(with_last_good)?;
        fingerprint.write(&dir)?;
        if !was_indexed {
            row_index::write(&dir, trainer.config(), &fingerprint, trainer.dataset())?;
        }
        changes::record(&dir, &config, &changes, Some(position))?;
        let metrics = JsonLines::truncate(&dir.metrics_path(), saved.metrics_bytes)?;
        let completions = JsonLines::truncate(&dir.completions_path(), saved.completions_bytes)?;
        checkpoints.clean()?;
        let aside = checkpoints.set_aside_after(Some(position))?;
        let best = saved.best.filter(|best| {
            // A later evaluation was better, and its checkpoint replaced this one.
            let is_kept = checkpoints.path(CheckpointId::Grpo(best.step)).exists();
            if !is_kept {
                tracing::warn!("the best checkpoint before {position}, of step {}, is no longer there: the next evaluation is the best", best.step);
            }
            is_kept
        });
        let mut run = Self {
            position,
            best,
            saved: Some(position),
            resumed: Some(position),
            changes,
            set_aside: aside,
            seconds_before: saved.seconds,
            ..Self::at_start(dir, trainer, metrics, completions)
        };
        // A resumed run that is not over needs a new summary.
        if !run.is_over() {
            let summary = set_aside(&run.dir.summary_path())?;
            run.set_aside.extend(summary);
        }
        Ok(run)
    }

    /// Exports the weights of a checkpoint as a folder for `transformers` or PEFT. The checkpoint is `from`, else the best one of a run that
    /// finished with `run.load_best_model_at_end`, else the newest. `set` has assignments of the section `export` for this folder only; the
    /// run is not changed. `target` must not exist yet; `None` is the run's `model/`, which is replaced. Returns the folder.
    ///
    /// # Errors
    /// [`Error::RunDir`] if the folder has no run, is in use, or has no such checkpoint; [`Error::Checkpoint`] for a damaged one;
    /// [`Error::Model`] if the base model is missing or the folder cannot be written.
    pub fn export(path: &Path, from: Option<&str>, set: &[String], target: Option<&Path>) -> Result<PathBuf> {
        let dir = RunDir::open(path)?;
        let checkpoints = Checkpoints::new(dir.checkpoints_path());
        let config = dir.config(set)?;
        changes::safe_changes(&dir, &config)?;
        let best = best_of(&dir, &config)?.map(|position| position.to_string());
        let Some(position) = choose(&checkpoints, from.or(best.as_deref()), path)? else {
            return Err(Error::run_dir(path, "it has no checkpoint yet: there are no weights to export"));
        };
        let (saved, state) = read(&checkpoints, position, &config)?;
        fingerprint::check_model(&dir, &config)?;
        let model = open_model(&config)?;
        let mut policy = export_policy(&config, model.as_ref())?;
        policy.import(&PolicyState {
            policy: &state.policy,
            ref_policy: None,
            optimizer: &[],
            optimizer_steps: 0,
            optimizer_settings: &config.optimizer.settings,
        })?;
        let mut rows: Vec<MetricsRow> = read_rows(&dir.metrics_path())?;
        // Rows after the checkpoint are not about its weights.
        rows.retain(|row| match position {
            CheckpointId::Grpo(step) => row.phase == RowKind::Warmup || row.step <= step,
            CheckpointId::Warmup(step) => row.phase == RowKind::Warmup && row.step <= step,
        });
        let summary = Summary::new(&config, &rows, saved.counters, saved.seconds);
        let (replace, target) = (target.is_none(), target.map_or_else(|| dir.model_path(), Path::to_owned));
        export(&*policy, &config, &target, replace, &summary)?;
        Ok(target)
    }

    /// Starts a run over that was interrupted before its first checkpoint.
    fn begin_again(dir: RunDir, trainer: Trainer, config: &TrainConfig, changes: Vec<Change>) -> Result<Self> {
        // Starting over would empty the logs of a finished run.
        if dir.summary_path().exists() {
            let reason = "it is done, and its checkpoints are gone: there is nothing to continue from";
            return Err(Error::run_dir(dir.root(), reason));
        }
        changes::record(&dir, config, &changes, None)?;
        // Without a checkpoint, these rows will be recomputed, so their files are renamed.
        let mut aside = Vec::new();
        for log in [dir.metrics_path(), dir.completions_path()] {
            if std::fs::metadata(&log).is_ok_and(|m| m.len() > 0) {
                aside.extend(set_aside(&log)?);
            }
        }
        Ok(Self { set_aside: aside, changes, ..Self::begin(dir, trainer)? })
    }
}

/// Returns the checkpoint to resume from; `None` if there is none.
fn choose(checkpoints: &Checkpoints, from: Option<&str>, run: &Path) -> Result<Option<CheckpointId>> {
    let positions = checkpoints.list()?;
    let Some(name) = from else { return Ok(positions.last().copied()) };
    if let Some(position) = positions.iter().find(|p| p.to_string() == name) {
        return Ok(Some(*position));
    }
    let names: Vec<_> = positions.iter().map(CheckpointId::to_string).collect();
    let existing = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    Err(Error::run_dir(run, format!("there is no checkpoint `{name}`; it has {existing}")))
}

/// Returns the best checkpoint of a finished run that loaded its best weights.
fn best_of(dir: &RunDir, config: &TrainConfig) -> Result<Option<CheckpointId>> {
    let path = dir.summary_path();
    if !config.run.load_best_model_at_end || !path.exists() {
        return Ok(None);
    }
    let bytes = read_regular(&path, SUMMARY_LIMIT).map_err(|e| Error::io("read", &path, e))?;
    let summary: Summary = serde_json::from_slice(&bytes)
        .map_err(|error| Error::run_dir(&path, format!("expected the summary of a run: {error}")))?;
    Ok(summary.best.map(|best| CheckpointId::Grpo(best.step)))
}

/// Reads and verifies the checkpoint at `position` and checks that it belongs to this configuration.
fn read(
    checkpoints: &Checkpoints,
    position: CheckpointId,
    config: &TrainConfig,
) -> Result<(SavedState, TrainState<StoredTensors>)> {
    let (saved, state) = checkpoints.read(position)?;
    if saved.config_sha256 != config_hash(config)? {
        let reason = "it was taken with another configuration than that of config.yaml and config.recorded.yaml: restore \
                      both, or start a new run";
        return Err(Error::run_dir(&checkpoints.path(position), reason));
    }
    Ok((saved, state))
}

/// Restores the trainer from the result of [`read`].
fn restore<T: TensorSource>(
    path: &Path,
    saved: &SavedState,
    state: &TrainState<T>,
    trainer: &mut Trainer,
) -> Result<()> {
    if saved.threads != rayon::current_num_threads() {
        tracing::warn!(
            "the run used {} and goes on with {}: results may differ in the last bits",
            counted(saved.threads, "thread"),
            rayon::current_num_threads()
        );
    }
    let is_device_failure = |error: &grpo_trainer::Error| {
        use grpo_policy::Error::{Device, Other};
        matches!(error, grpo_trainer::Error::Policy(Other(_) | Device { .. }) | grpo_trainer::Error::Exhausted { .. })
    };
    trainer.restore(state).map_err(|error| match error {
        // A failing device is not a damaged checkpoint.
        error if is_device_failure(&error) => error.into(),
        error => Error::Checkpoint { path: path.to_owned(), reason: error.to_string(), advice: String::new() },
    })
}
