//! A run in its folder: steps, evaluations, checkpoints and logs.

mod evaluation;
pub mod failure;
mod restore;

use crate::best::Best;
use crate::changes::{Change, config_hash};
use crate::checkpoint::{self, CheckpointId, Checkpoints, FORMAT, SavedState};
use crate::dir::{RunDir, write_json};
use crate::error::{Error, Result};
use crate::export::{export, unquantized};
use crate::fingerprint::Fingerprint;
use crate::jsonl::{MetricsRow, RowKind};
use crate::members::Members;
use crate::observer::{Event, Observer};
use crate::processes::{self, Beginning, Command, agree, is_stop_requested, lead, report};
use crate::rows::{eval_values, pick_completions};
use crate::summary::Summary;
use crate::{curves, follower, row_index, sinks};
use grpo_core::readable_bytes;
use grpo_files::{JsonLines, read_rows, write_atomically};
use grpo_run_config::TrainConfig;
use grpo_setup::Prepared;
use grpo_sinks::Sinks;
use grpo_trainer::eval::PassRule;
use grpo_trainer::{Phase, Trainer};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// The outcome of [`Run::run`].
#[derive(Clone, Debug)]
pub enum Ending {
    /// All steps are done, or evaluations stopped improving (`run.early_stopping_patience`).
    Finished(Box<Summary>),
    /// The run was stopped and has saved a checkpoint.
    Stopped {
        /// The folder of the checkpoint.
        checkpoint: PathBuf,
    },
}

/// A run in its folder.
///
/// ```no_run
/// use std::sync::atomic::AtomicBool;
/// use grpo_run::{Ending, Run};
/// use grpo_trainer::TrainConfig;
///
/// # fn main() -> grpo_run::Result<()> {
/// let mut run = Run::start(TrainConfig::built_in(), None)?; // runs/arithmetic-001
/// if let Ending::Finished(summary) = run.run(&mut (), &AtomicBool::new(false))? {
///     println!("pass@1 changed by {:?}", summary.gain());
/// }
/// # Ok(())
/// # }
/// ```
pub struct Run {
    dir: RunDir,
    trainer: Trainer,
    checkpoints: Checkpoints,
    metrics: JsonLines,
    completions: JsonLines,
    position: CheckpointId,
    /// The best evaluation so far.
    best: Option<Best>,
    /// The checkpoint of the current state, if it was saved.
    saved: Option<CheckpointId>,
    resumed: Option<CheckpointId>,
    changes: Vec<Change>,
    set_aside: Vec<PathBuf>,
    seconds_before: f64,
    began: Instant,
}

impl Run {
    /// Creates a new run with the parts that the configuration names. `path` is its folder, by default the next free
    /// `runs/<run.name>-<number>`.
    ///
    /// # Errors
    /// The errors of [`Run::prepare`], [`Prepared::trainer`] and [`RunDir::check`].
    pub fn start(config: TrainConfig, path: Option<&Path>) -> Result<Self> {
        // An invalid configuration fails before a folder is created.
        Self::start_with(Self::prepare(config, path)?.trainer()?, path)
    }

    /// Does the first half of [`Run::start`]: checks everything that needs no weights, including the run folder, and creates nothing. The
    /// second half is [`Prepared::trainer`] and [`Run::start_with`]. Waits for the other processes, if the run has any.
    ///
    /// # Errors
    /// The errors of [`Prepared::new`] and [`RunDir::check`]; [`grpo_run_config::Error::Key`] in a process that must be a [`crate::Follower`];
    /// [`grpo_trainer::Error::Processes`].
    pub fn prepare(config: TrainConfig, path: Option<&Path>) -> Result<Prepared> {
        config.validate()?;
        let process = Members::of(&config)?.map_or(0, |members| members.process_id);
        grpo_run_config::check(
            process == 0,
            "distributed.process_id",
            "0 in the process with the run folder",
            process,
        )?;
        RunDir::check(path)?;
        sinks::check(&config.wandb)?;
        let store = processes::connect(&config, Beginning::New)?;
        Ok(Prepared::in_process(config, store.clone()).inspect_err(report(store.as_deref()))?)
    }

    /// Creates a new run with your own trainer, made by [`Trainer::with_parts`].
    ///
    /// # Errors
    /// The errors of [`RunDir::check`]; [`Error::File`] if `wandb.dir` is not writable.
    pub fn start_with(trainer: Trainer, path: Option<&Path>) -> Result<Self> {
        sinks::check(&trainer.config().wandb)?;
        let fingerprint = Fingerprint::of(trainer.config())?;
        if let Some(store) = trainer.store() {
            follower::agree_on_files(store, &fingerprint, trainer.config())?;
        }
        let dir = RunDir::create(path, trainer.config(), |dir| {
            fingerprint.write(dir)?;
            row_index::write(dir, trainer.config(), &fingerprint, trainer.dataset())
        })?;
        Self::begin(dir, trainer)
    }

    fn begin(dir: RunDir, trainer: Trainer) -> Result<Self> {
        let [metrics, completions] = [dir.metrics_path(), dir.completions_path()].map(|path| JsonLines::create(&path));
        let run = Self::at_start(dir, trainer, metrics?, completions?);
        run.checkpoints.clean()?;
        Ok(run)
    }

    /// Returns a run before its first step.
    fn at_start(dir: RunDir, trainer: Trainer, metrics: JsonLines, completions: JsonLines) -> Self {
        Self {
            checkpoints: Checkpoints::new(dir.checkpoints_path()),
            metrics,
            completions,
            dir,
            trainer,
            position: CheckpointId::Warmup(0),
            best: None,
            saved: None,
            resumed: None,
            changes: Vec::new(),
            set_aside: Vec::new(),
            seconds_before: 0.0,
            began: Instant::now(),
        }
    }

    /// Returns the folder of the run.
    pub fn dir(&self) -> &RunDir {
        &self.dir
    }

    /// Returns the trainer.
    pub fn trainer(&self) -> &Trainer {
        &self.trainer
    }

    /// Runs to the end, or until `stop` is set; the current step is then finished and a checkpoint saved. Metrics also go to the
    /// configured sinks.
    ///
    /// # Errors
    /// The errors of the trainer and of files. Saved checkpoints stay valid. A sink that cannot be opened is an error; a sink that
    /// fails later is not.
    pub fn run(&mut self, observer: &mut dyn Observer, stop: &AtomicBool) -> Result<Ending> {
        // A finished run has nothing to log.
        let done = self.is_over() && self.saved.is_some();
        let mut sinks = if done { Sinks::default() } else { sinks::open(self.dir.root(), self.trainer.config())? };
        self.forget_failure()?;
        self.began = Instant::now();
        self.announce(observer);
        sinks.notes().for_each(|note| observer.event(Event::Note(note)));
        let mut both = |event: Event<'_>| {
            sinks.event(event);
            observer.event(event);
        };
        let ending = self.train(&mut both, stop).map_err(|error| self.explain(error));
        let ending = ending.inspect_err(|error| self.remember_failure(error));
        self.end_processes(&ending);
        sinks.finish(ending.is_ok(), |note| observer.event(Event::Note(note)));
        ending
    }

    /// Ends the other processes of the run.
    fn end_processes(&self, ending: &Result<Ending>) {
        let Some(store) = self.trainer.store() else { return };
        let ended = match ending {
            Ok(ending) => {
                let stopped = matches!(ending, Ending::Stopped { .. });
                let close = || Ok(store.close().map_err(grpo_trainer::Error::from)?);
                lead(Some(store), &Command::End { stopped }).and_then(|()| close())
            }
            Err(error) => {
                report(Some(store))(error);
                Ok(())
            }
        };
        if let Err(error) = ended {
            tracing::warn!("the run has ended, but not all of its processes have ended well: {error}");
        }
    }

    /// Returns `true` if all steps are done, or evaluations stopped improving.
    fn is_over(&self) -> bool {
        match self.trainer.phase() {
            Phase::Warmup => false,
            Phase::Grpo => self.stops_early(),
            Phase::Done => true,
        }
    }

    fn train(&mut self, observer: &mut dyn Observer, stop: &AtomicBool) -> Result<Ending> {
        let mut phase = None;
        loop {
            if stop.load(Ordering::Relaxed) || is_stop_requested(self.trainer.store())? {
                let checkpoint = self.save(observer)?;
                self.draw_curves()?;
                return Ok(Ending::Stopped { checkpoint });
            }
            match (self.trainer.phase(), self.position) {
                (Phase::Warmup, _) => {
                    self.announce_phase(RowKind::Warmup, &mut phase, observer);
                    self.warmup_step(observer)?;
                }
                (_, CheckpointId::Warmup(_)) => {
                    self.evaluate(0, observer)?;
                    self.position = CheckpointId::Grpo(0);
                    self.save(observer)?;
                }
                (Phase::Grpo, _) if self.stops_early() => break,
                (Phase::Grpo, _) => {
                    self.announce_phase(RowKind::Grpo, &mut phase, observer);
                    if let Err(error) = self.grpo_step(observer) {
                        return Err(self.give_up(error, observer)?);
                    }
                }
                (Phase::Done, _) => break,
            }
        }
        self.save(observer)?;
        self.draw_curves()?;
        self.load_best()?;
        let (config, rows) = (self.trainer.config(), read_rows(&self.dir.metrics_path())?);
        let summary = Summary::new(config, &rows, self.trainer.counters(), self.seconds());
        let summary = match self.best.as_ref().filter(|_| config.run.load_best_model_at_end) {
            Some(best) => summary.leaving(best, &rows),
            None => summary,
        };
        let summary =
            Summary { best: self.best.clone(), stopped_early: self.trainer.phase() == Phase::Grpo, ..summary };
        if config.model.shape().is_none() {
            let path = self.dir.model_path();
            lead(self.trainer.store(), &Command::Export)?;
            let merged = unquantized(self.trainer.policy(), config)?;
            export(merged.as_deref().unwrap_or(self.trainer.policy()), config, &path, true, &summary)?;
            observer.event(Event::Exported(&path));
        }
        write_json(&self.dir.summary_path(), &summary)?;
        if let Some((_, most)) = grpo_models::resident_memory() {
            tracing::info!("the most memory that this process took: {}", readable_bytes(most));
        }
        Ok(Ending::Finished(Box::new(summary)))
    }

    /// Saves a checkpoint if a step found too few usable groups or the rewards failed, so that the run can be resumed with a higher limit or
    /// a fixed reward.
    fn give_up(&mut self, error: Error, observer: &mut dyn Observer) -> Result<Error> {
        match error {
            Error::Trainer(cause @ grpo_trainer::Error::TooFewGroups { batches, .. }) => {
                self.save(observer)?;
                self.draw_curves()?;
                let (run, more) = (self.dir.root().to_owned(), batches.saturating_mul(2));
                Ok(Error::TooFewGroups { cause: Box::new(cause), run, more })
            }
            Error::Trainer(
                cause @ (grpo_trainer::Error::Rewards(
                    grpo_rewards::Error::TooManyFailures { .. } | grpo_rewards::Error::FailedFirstStep { .. },
                )
                | grpo_trainer::Error::Environments(grpo_trainer::agents::Error::TooManyFailures { .. })),
            ) => {
                let checkpoint = self.save(observer)?;
                self.draw_curves()?;
                Ok(Error::RewardsFailed { cause: Box::new(cause), run: self.dir.root().to_owned(), checkpoint })
            }
            error => Ok(error),
        }
    }

    fn warmup_step(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let began = Instant::now();
        lead(self.trainer.store(), &Command::Warmup)?;
        let report = self.trainer.warmup_step()?;
        let step = self.trainer.counters().warmup_steps;
        let mut values = vec![
            ("loss", report.loss),
            ("grad_norm", report.grad_norm),
            ("learning_rate", report.learning_rate),
            ("tokens", report.tokens as f64),
            ("step_time", began.elapsed().as_secs_f64()),
        ];
        if self.trainer.config().warmup.optimizer.settings.skip_grad_norm.is_some() {
            values.push(("skipped_updates", f64::from(u8::from(report.skipped))));
        }
        self.log(MetricsRow::new(RowKind::Warmup, step, values), observer)?;
        self.position = CheckpointId::Warmup(step);
        // The end of the warm-up is saved after the evaluation that follows.
        let ends = self.trainer.phase() != Phase::Warmup;
        if !ends && is_due(step, self.trainer.config().run.save_steps) { self.save(observer).map(drop) } else { Ok(()) }
    }

    fn grpo_step(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let began = Instant::now();
        lead(self.trainer.store(), &Command::Step)?;
        let report = self.trainer.grpo_step()?;
        let counters = self.trainer.counters();
        let step = counters.grpo_steps;
        let mut row = MetricsRow::new(RowKind::Grpo, step, report.metrics.values());
        // TRL's num_tokens counts from the start of the run.
        for (name, value) in [
            ("num_tokens", counters.num_tokens as f64),
            ("tokens", report.tokens as f64),
            ("step_time", began.elapsed().as_secs_f64()),
        ] {
            row.values.insert(name.to_owned(), Some(value));
        }
        row.values.extend(report.times.metrics().map(|(name, seconds)| (name, Some(seconds))));
        row.values.extend(report.speed.metrics().map(|(name, value)| (name.to_owned(), Some(value))));
        self.log(row, observer)?;

        let config = self.trainer.config();
        let (options, last) = (config.run.clone(), step == config.grpo.max_steps);
        let eval_due = last || is_due(step, config.eval.eval_steps);
        if last || is_due(step, options.log_completions_steps) {
            let (rewards, per_group) = (self.trainer.rewards(), config.grpo.num_generations);
            let rows = pick_completions(&report, rewards, per_group, options.num_completions_to_print);
            rows.iter().try_for_each(|row| self.completions.append(row))?;
            observer.event(Event::Completions(&rows));
        }
        let is_best = eval_due && self.evaluate(step, observer)?;
        self.position = CheckpointId::Grpo(step);
        if last || is_best || is_due(step, options.save_steps) { self.save(observer).map(drop) } else { Ok(()) }
    }

    /// Evaluates the policy if there is held-out data. Returns `true` if it is the best so far.
    fn evaluate(&mut self, step: u64, observer: &mut dyn Observer) -> Result<bool> {
        if self.trainer.held_out().is_empty() {
            return Ok(false);
        }
        observer.event(Event::Phase { kind: RowKind::Eval, done: 0, steps: 1 });
        let began = Instant::now();
        lead(self.trainer.store(), &Command::Evaluate)?;
        let report = self.trainer.evaluate()?;
        let mut row = MetricsRow::new(RowKind::Eval, step, eval_values(&report));
        row.values.insert("step_time".into(), Some(began.elapsed().as_secs_f64()));
        let config = self.trainer.config();
        let kind = if config.eval.pass_at.contains(&1) { "sampled" } else { "greedy" };
        row.pass_rule = Some(format!("{kind} completions with {}", PassRule::of(config, self.trainer.rewards())?));
        let is_best = self.observe(&row)?;
        self.log(row, observer)?;
        Ok(is_best)
    }

    fn log(&mut self, row: MetricsRow, observer: &mut dyn Observer) -> Result<()> {
        self.expect_in_place()?;
        self.metrics.append(&row)?;
        observer.event(Event::Row(&row));
        Ok(())
    }

    /// Saves the current state, unless it is already saved.
    fn save(&mut self, observer: &mut dyn Observer) -> Result<PathBuf> {
        self.expect_in_place()?;
        if self.saved == Some(self.position) {
            return Ok(self.checkpoints.path(self.position));
        }
        let name = self.position.to_string();
        lead(self.trainer.store(), &Command::Save(name.clone()))?;
        // The logs are synced first, because the checkpoint stores their lengths.
        let (metrics_bytes, completions_bytes) = (self.metrics.sync()?, self.completions.sync()?);
        let config = self.trainer.config();
        let saved = SavedState {
            format: FORMAT.to_owned(),
            position: self.position.to_string(),
            counters: self.trainer.counters(),
            coefficients: self.trainer.coefficients(),
            seed: config.seed,
            config_sha256: config_hash(config)?,
            threads: rayon::current_num_threads(),
            seconds: self.seconds(),
            metrics_bytes,
            completions_bytes,
            best: self.best.clone(),
        };
        let limit = config.run.save_total_limit;
        let policy = self.trainer.policy();
        let agree = |sums: &str| match self.trainer.store() {
            Some(store) => agree(store, &checkpoint::weights_of(&name), sums.as_bytes(), config),
            None => Ok(()),
        };
        let path = self.checkpoints.write(self.position, &saved, &|group, sink| policy.export(group, sink), agree)?;
        self.saved = Some(self.position);
        self.checkpoints.prune(limit, self.best_checkpoint())?;
        observer.event(Event::Saved(&path));
        Ok(path)
    }

    fn draw_curves(&self) -> Result<()> {
        let rows: Vec<MetricsRow> = read_rows(&self.dir.metrics_path())?;
        let svg = curves::svg(&self.trainer.config().run.name, &rows);
        Ok(write_atomically(&self.dir.curves_path(), svg.as_bytes())?)
    }

    fn seconds(&self) -> f64 {
        self.seconds_before + self.began.elapsed().as_secs_f64()
    }

    fn announce(&self, observer: &mut dyn Observer) {
        observer.event(Event::Started {
            dir: self.dir.root(),
            config: self.trainer.config(),
            parameters: self.trainer.policy().num_parameters(),
            overview: self.trainer.overview(),
            resumed: self.resumed,
            changes: &self.changes,
            set_aside: &self.set_aside,
        });
    }

    fn announce_phase(&self, kind: RowKind, present: &mut Option<RowKind>, observer: &mut dyn Observer) {
        if *present != Some(kind) {
            let (counters, config) = (self.trainer.counters(), self.trainer.config());
            let (done, steps) = match kind {
                RowKind::Warmup => (counters.warmup_steps, config.warmup.steps),
                _ => (counters.grpo_steps, config.grpo.max_steps),
            };
            observer.event(Event::Phase { kind, done, steps });
            *present = Some(kind);
        }
    }
}

fn is_due(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}

#[cfg(test)]
mod tests;
