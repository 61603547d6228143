//! Benchmarks of a Hugging Face model folder on this CPU: sampling, and optimizer steps.
//!
//! Systems are the CPU policy (`grpo`) and, if their packages are installed, `transformers` and `vllm`. They get the same token ids and are
//! measured in alternation, each measurement in a process of its own that loads the model. Only vLLM, whose start takes most of a
//! minute, samples all problems of a dtype and a round in one process. The rates of memory and of multiply-adds are measured in
//! every round, and bound times and rates ([`ModelCase::floor`]).

mod config;
mod floor;
mod job;
mod report;
mod worker;

pub use config::{GenerationConfig, ModelBenchConfig, UpdateConfig};
pub use job::{ModelJob, ModelTimes, Task, Time};
pub use report::{ModelCase, ModelMeasured, Work};
pub(crate) use worker::measure;

use crate::case::unexpected;
use crate::error::{Error, Result};
use crate::measure::Spread;
use crate::peers::ModelPeer;
use crate::process::Process;
use crate::protocol::{Reply, Request};
use crate::report::{Document, Machine, Outcome, utc};
use crate::{Options, check_names, claims, peers};
use floor::Rates;
use grpo_core::Dtype;
use grpo_models::{ModelConfig, ModelFolder};
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::path::Path;

/// The name of the CPU policy among the systems.
const GRPO: &str = "grpo";

/// Small enough that the weights stay near the folder's.
const LEARNING_RATE: f64 = 1e-6;

/// Measures every problem of `config`. `progress` is called with a line before each measurement and may stop the benchmark with an error.
///
/// # Errors
/// [`Error::Config`] for an illegal configuration, or one that does not fit the model; [`Error::Model`] for a model that is not
/// supported; [`Error::Argument`] for a variant or an assertion that fits no problem. A system that fails is an [`Outcome::Failed`], a
/// missing one an [`Outcome::NotOffered`].
pub fn run(
    config: &ModelBenchConfig,
    options: &Options,
    mut progress: impl FnMut(&str) -> Result<()>,
) -> Result<Document<ModelCase>> {
    let date = utc(jiff::Timestamp::now());
    config.validate()?;
    // A process has its own working directory.
    let path = config.folder()?;
    let path = std::path::absolute(path).map_err(|e| Error::io("find", path, e))?;
    let model = ModelFolder::open(&path)?;
    config.check_context(model.config())?;
    let names: Vec<&str> = std::iter::once(GRPO).chain(peers::model_names()).collect();
    let cases = config.cases();
    check_names(&cases.iter().map(|(name, ..)| (name.as_str(), names.clone())).collect::<Vec<_>>(), options)?;
    let folder = tempfile::tempdir().map_err(|e| Error::io("create", &std::env::temp_dir(), e))?;
    let systems = systems(options, folder.path())?;
    let mut running: Vec<Running> = cases.iter().map(|(name, dtype, work)| Running::new(name, *dtype, *work)).collect();
    for round in 1..=config.rounds {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let mut cases_of_dtype: Vec<&mut Running> = running.iter_mut().filter(|case| case.dtype == dtype).collect();
            if cases_of_dtype.is_empty() {
                continue;
            }
            let (most_rows, longest) = largest(&cases_of_dtype);
            let rates = Rates::measure(dtype, config.threads);
            let mut shared = HashMap::new();
            for case in &mut cases_of_dtype {
                case.rates.push(rates);
                for system in &systems {
                    progress(&format!("{}: round {round} of {}: {}", case.name, config.rounds, system.name))?;
                    let job = ModelJob {
                        model: path.clone(),
                        dtype,
                        threads: config.threads,
                        task: task(case.work, model.config().vocab_size),
                        most_rows,
                        longest,
                    };
                    case.measure(system, job, &mut shared, folder.path());
                }
            }
        }
    }
    let cases: Vec<ModelCase> = running.into_iter().map(|case| case.finish(model.config())).collect();
    let assertions = claims(cases.iter().map(|case| (case.name.as_str(), &case.variants)), &options.assertions)?;
    Ok(Document { version: env!("CARGO_PKG_VERSION").into(), date, machine: Machine::here(), cases, assertions })
}

/// A program that is measured.
struct System {
    name: &'static str,
    /// The command of a worker, or the reason why there is none.
    command: std::result::Result<Vec<OsString>, String>,
    /// `true` if one process serves all problems of a dtype and a round.
    is_shared: bool,
    updates: bool,
}

/// Returns the wanted systems.
fn systems(options: &Options, folder: &Path) -> Result<Vec<System>> {
    let own = System { name: GRPO, command: Ok(options.worker.clone()), is_shared: false, updates: true };
    let mut systems = vec![own];
    for ModelPeer { name, command, is_shared, updates } in peers::of_models(options, folder)? {
        systems.push(System { name, command, is_shared, updates });
    }
    systems.retain(|system| options.variants.is_empty() || options.variants.iter().any(|name| name == system.name));
    Ok(systems)
}

/// A problem during the measurement.
struct Running {
    name: String,
    dtype: Dtype,
    work: Work,
    /// The machine's rates in every round.
    rates: Vec<Rates>,
    states: BTreeMap<&'static str, State>,
}

/// The progress of a system on a problem: its measurements, or its failure.
enum State {
    Measured(Vec<ModelTimes>),
    Stopped(Outcome<ModelMeasured>),
}

impl Running {
    fn new(name: &str, dtype: Dtype, work: Work) -> Self {
        Self { name: name.to_owned(), dtype, work, rates: vec![], states: BTreeMap::new() }
    }

    /// Measures a system once, unless it has failed before or cannot do the work.
    fn measure(&mut self, system: &System, job: ModelJob, shared: &mut HashMap<&'static str, Process>, folder: &Path) {
        if matches!(self.work, Work::Update { .. }) && !system.updates {
            return;
        }
        let state = self.states.entry(system.name).or_insert_with(|| State::Measured(vec![]));
        let State::Measured(times) = state else { return };
        let command = match &system.command {
            Ok(command) => command,
            Err(reason) => {
                *state = State::Stopped(Outcome::NotOffered { error: reason.clone() });
                return;
            }
        };
        let log = folder.join(format!("{}.log", system.name));
        let environment = environment(job.threads);
        let process = match shared.remove(system.name) {
            Some(process) => Ok(process),
            None => Process::start(command, &environment, log),
        };
        let reply = process.and_then(|mut process| {
            let reply = process.ask(&Request::Model(Box::new(job)))?;
            if system.is_shared {
                shared.insert(system.name, process);
            }
            Ok(reply)
        });
        let (error, not_offered) = match reply {
            Ok(Reply::Model(found)) => {
                times.push(*found);
                return;
            }
            Ok(Reply::Failed { error, not_offered }) => (error, not_offered),
            Ok(other) => (unexpected(&other).to_string(), false),
            Err(error) => (error.to_string(), false),
        };
        *state = State::Stopped(if not_offered { Outcome::NotOffered { error } } else { Outcome::Failed { error } });
    }

    fn finish(self, config: &ModelConfig) -> ModelCase {
        let floors: Vec<_> = self.rates.iter().map(|rates| rates.floor(self.dtype, self.work, config)).collect();
        let outcome = |state| match state {
            State::Stopped(outcome) => outcome,
            State::Measured(times) => {
                let numbers: Vec<_> =
                    times.iter().zip(&floors).map(|(times, floor)| numbers(self.work, times, floor)).collect();
                Outcome::Measured(Box::new(ModelMeasured {
                    version: times.iter().find_map(|times| times.version.clone()),
                    digests: times.iter().filter_map(|times| times.digest.clone()).collect(),
                    grad_norm: times.iter().find_map(|times| times.grad_norm),
                    numbers: spreads(&numbers),
                }))
            }
        };
        let variants = self.states.into_iter().map(|(name, state)| (name.to_owned(), outcome(state))).collect();
        ModelCase { name: self.name, dtype: self.dtype, work: self.work, floor: spreads(&floors), variants }
    }
}

/// Numbers of one round by name.
type Numbers = BTreeMap<&'static str, f64>;

/// Returns the statistics of every number over the rounds.
fn spreads(rounds: &[Numbers]) -> BTreeMap<&'static str, Spread> {
    let mut all: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for (name, number) in rounds.iter().flatten() {
        all.entry(name).or_default().push(*number);
    }
    all.into_iter().filter_map(|(name, numbers)| Some((name, Spread::of(numbers)?))).collect()
}

/// Returns the numbers of a measurement; see [`ModelMeasured::numbers`].
fn numbers(work: Work, times: &ModelTimes, floor: &Numbers) -> Numbers {
    let mut numbers: Numbers = times.peak_bytes.map(|bytes| ("peak_bytes", bytes as f64)).into_iter().collect();
    let whole = times.whole;
    match (work, times.first_token) {
        (Work::Generation { .. }, first) => {
            let (first, decoded) = (first.unwrap_or_default(), times.decoded as f64);
            numbers.extend([
                ("first_token_s", first.seconds),
                ("first_token_processor_s", first.processor),
                ("all_tokens_s", whole.seconds),
            ]);
            // The clock of a tiny model may stand still.
            let rates = [("tokens_per_s", times.decode.seconds), ("tokens_per_processor_s", times.decode.processor)];
            let rates = rates.into_iter().filter(|(_, seconds)| *seconds > 0.0);
            numbers.extend(rates.map(|(name, seconds)| (name, decoded / seconds)));
        }
        (Work::Update { rows, prompt, completion, .. }, _) => {
            numbers.extend([
                ("step_s", whole.seconds),
                ("processor_s", whole.processor),
                ("tokens_per_s", (rows * (prompt + completion)) as f64 / whole.seconds),
                ("mfu", floor["step_s"] / whole.seconds),
            ]);
        }
    }
    numbers
}

fn environment(threads: usize) -> Vec<(&'static str, String)> {
    if threads == 0 {
        return vec![];
    }
    ["RAYON_NUM_THREADS", "OMP_NUM_THREADS"].map(|name| (name, threads.to_string())).into()
}

/// Returns the number of sequences and the length of the longest sequence of all generation.
fn largest(cases: &[&mut Running]) -> (usize, usize) {
    let sizes = cases.iter().filter_map(|case| match case.work {
        Work::Generation { rows, prompt, tokens } => Some((rows, prompt + tokens)),
        Work::Update { .. } => None,
    });
    sizes.fold((1, 1), |(rows, length), (r, l)| (rows.max(r), length.max(l)))
}

/// Returns the work with its token ids.
fn task(work: Work, vocab: usize) -> Task {
    // Few ids, because prompts are cheap; the first three are often special tokens.
    let ids = vocab.saturating_sub(3).clamp(1, 250);
    let id = |row: usize, i: usize| ((37 * i + 101 * row) % ids + 3.min(vocab - 1)) as u32;
    let texts = |rows: usize, of: std::ops::Range<usize>| -> Vec<Vec<u32>> {
        (0..rows).map(|row| of.clone().map(|i| id(row, i)).collect()).collect()
    };
    match work {
        Work::Generation { rows, prompt, tokens } => Task::Generate { prompts: texts(rows, 0..prompt), tokens },
        Work::Update { rows, prompt, completion, micro_batches } => Task::Update {
            prompts: texts(rows, 0..prompt),
            completions: texts(rows, prompt..prompt + completion),
            // Both signs, and a gradient that is not zero.
            advantages: (0..rows).map(|row| if row % 2 == 0 { 1.0 } else { -0.5 }).collect(),
            micro_batches,
            learning_rate: LEARNING_RATE,
        },
    }
}
