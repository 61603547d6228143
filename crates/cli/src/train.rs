//! The subcommand `grpo train`.

use crate::commented::commented;
use crate::compiling::Compiling;
use crate::display::Display;
use crate::layers::LayerArgs;
use crate::output::{Outcome, emit_document};
use crate::start_folder;
use grpo_distributed::Store;
use grpo_files::{ENV_PREFIX, Layers, to_yaml};
use grpo_run::{Ending, Follower, Run, is_follower};
use grpo_run_config::PolicyDevice;
use grpo_trainer::TrainConfig;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Arguments of `grpo train`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Later layers win: defaults, file, environment (GRPO__LOSS__BETA=0.1), --set loss.beta=0.1. A resumed run \
    keeps its configuration, except for keys that may be changed with --set or in its config.yaml: run.*, policy.*, distributed.*, logging.*, wandb.*, \
    eval.*, export.*, rollout.mesh, rollout.server, rollout.endpoint, rollout.endpoint_strict, the learning rate, its schedule and the limits of gradients in optimizer and \
    warmup.optimizer, grpo.max_steps, grpo.filter_groups.max_num_gen_batches, rewards.max_consecutive_failures and the connections to \
    external rewards. Exit codes: 0 the run is done, 2 it failed, 3 it was stopped by a signal and can be resumed."
)]
pub(crate) struct Args {
    #[command(flatten)]
    layers: LayerArgs,
    /// Print the resolved configuration as YAML, with a comment for each key, and exit.
    #[arg(long)]
    print_config: bool,
    /// Continue the run in this folder with the same result as an uninterrupted run, except for changes by --set. Relative paths of its
    /// configuration are resolved from the folder in which it was started.
    #[arg(long, value_name = "RUN", conflicts_with_all = ["config", "named", "run_dir"])]
    resume: Option<PathBuf>,
    /// The checkpoint to resume from instead of the newest, e.g. `step-000100`.
    #[arg(long, value_name = "CHECKPOINT", requires = "resume")]
    from: Option<String>,
    /// Folder for this run; must not hold a run yet. [default: `runs/NAME-NUMBER`]
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Print only errors.
    #[arg(long, short)]
    quiet: bool,
}

/// Trains, resumes, or prints the configuration.
pub(crate) fn run(args: Args, compiling: Compiling) -> anyhow::Result<Outcome> {
    if args.print_config {
        let config = match &args.resume {
            Some(run) => {
                Layers::new().file(&run.join("config.yaml"))?.set(&args.layers.set)?.resolve::<TrainConfig>()?
            }
            None => args.layers.resolve()?,
        };
        config.validate()?;
        emit_document(&commented(&to_yaml(&config)?))?;
        return Ok(Outcome::Done);
    }
    grpo_backend_cpu::keep_freed_memory();
    if args.quiet {
        compiling.silence();
    }
    let has_begun = Arc::new(AtomicBool::new(false));
    let stop = crate::signals::stop_on_signal("stopping after this step", &has_begun)?;
    if let Some(mut follower) = follower(&args)? {
        has_begun.store(true, Ordering::Relaxed);
        compiling.silence();
        end_with_peers(follower.store());
        return Ok(if follower.run(&stop)? { Outcome::Done } else { Outcome::Stopped });
    }
    let mut display = Display::new(args.quiet, compiling);
    let mut run = match &args.resume {
        Some(path) => {
            if std::env::vars_os().any(|(name, _)| name.to_string_lossy().starts_with(ENV_PREFIX)) {
                tracing::warn!("a resumed run keeps its configuration: {ENV_PREFIX}* of the environment is not used");
            }
            Run::resume(&start_folder::enter(path)?, args.from.as_deref(), &args.layers.set)?
        }
        None => {
            let layers = args.layers.layers()?;
            let config = TrainConfig::from_layers(layers.clone())?;
            let prepared = Run::prepare(config, args.run_dir.as_deref())?;
            display.introduce(prepared.config(), prepared.overview(), Some(&layers));
            Run::start_with(prepared.trainer()?, args.run_dir.as_deref())?
        }
    };
    if let Some(store) = run.trainer().store() {
        end_with_peers(store);
    }
    let root = run.dir().root().to_owned();
    has_begun.store(true, Ordering::Relaxed);
    let ending = run.run(&mut display, &stop).inspect_err(|_| display.clear())?;
    match ending {
        Ending::Finished(summary) => display.finished(&summary, run.dir()).map(|()| Outcome::Done),
        Ending::Stopped { checkpoint } => display.stopped(&checkpoint, &root).map(|()| Outcome::Stopped),
    }
}

/// Returns this process as a follower, connected to process 0; `None` if it leads the run, or is its only process.
fn follower(args: &Args) -> anyhow::Result<Option<Follower>> {
    Ok(match &args.resume {
        // A follower has no run folder: process 0 sends the configuration. Other assignments may need the rest of it, and are process 0's.
        Some(path) => {
            let is_distributed = |assignment: &&String| assignment.trim_start().starts_with("distributed");
            let own: Vec<String> = args.layers.set.iter().filter(is_distributed).cloned().collect();
            let mut own: TrainConfig = Layers::new().set(&own)?.resolve()?;
            if own.distributed.num_processes.is_none() {
                own.policy.device = resumed_device(path);
            }
            if is_follower(&own)? { Some(Follower::resume(own)?) } else { None }
        }
        None => {
            let config: TrainConfig = args.layers.resolve()?;
            if is_follower(&config)? { Some(Follower::start(config)?) } else { None }
        }
    })
}

/// Returns the device of the run in a folder. A process without the folder may follow on a TPU, whose environment says the processes.
fn resumed_device(path: &Path) -> PolicyDevice {
    let config = path.join("config.yaml");
    if !config.is_file() {
        return PolicyDevice::PjrtTpu;
    }
    // `Run::resume` reports the errors of the file.
    let config = Layers::new().file(&config).and_then(|layers| layers.resolve::<TrainConfig>());
    config.map_or(PolicyDevice::Host, |config| config.policy.device)
}

/// Ends this process after the limit of heartbeats if another process fails and this one does not end by itself, for example because its
/// device waits for the other one's.
fn end_with_peers(store: &Arc<Store>) {
    let store = Arc::clone(store);
    std::thread::spawn(move || {
        if let Some(error) = store.failure() {
            let limit = store.options().heartbeat_timeout;
            std::thread::sleep(limit);
            tracing::error!("{error}; this process is ended, because it has gone on for {} seconds", limit.as_secs());
            // Checkpoints are atomic, so only the current step is lost.
            grpo_rewards::kill_programs();
            std::process::exit(2);
        }
    });
}
