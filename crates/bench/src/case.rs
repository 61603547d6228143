//! The measurement of one problem: its inputs, its processes, and their steps in alternation.

use super::inputs::{self, Files};
use super::outcome::{devices, outcomes};
use super::process::Process;
use super::protocol::{Job, Planned, Reply, Request, Role, Stepped};
use super::report::Case;
use super::{Options, floor, peers};
use crate::config::{BackendName, BenchConfig, ProgramKind, VariantConfig};
use crate::error::{Error, Result};
use grpo_backend_tpu::aot::Variant;
use grpo_backend_tpu::program::MeshShape;
use grpo_core::{Dtype, Implementation, LossConfig};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;
use std::time::Instant;

/// A variant, a peer or a floor during the measurement.
pub(crate) struct Entry {
    pub(crate) job: Job,
    /// The computation; for a floor, the variant that it bounds.
    pub(crate) variant: Variant,
    pub(crate) kind: Kind,
    /// Names of the floors of this entry; the fastest one counts.
    pub(crate) floors: Vec<String>,
    command: Vec<OsString>,
    huge_pages: bool,
    pub(crate) state: State,
}

impl Entry {
    fn new(job: Job, variant: Variant, kind: Kind, command: Vec<OsString>) -> Self {
        Self { job, variant, kind, floors: vec![], command, huge_pages: false, state: State::Waiting }
    }
}

/// The kind of a measured program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Variant,
    /// A program of another system that implements the protocol.
    Peer,
    Floor,
}

/// The progress of an entry.
pub(crate) enum State {
    Waiting,
    Running(Box<Running>),
    Failed { error: String, not_offered: bool },
}

pub(crate) struct Running {
    process: usize,
    pub(crate) planned: Planned,
    /// The first call, if it has run.
    pub(crate) first: Option<Stepped>,
    /// The timed steps, in order.
    pub(crate) steps: Vec<Stepped>,
    /// Start of each timed step, in seconds since the first timed step of the problem.
    pub(crate) began: Vec<f64>,
}

/// Measures all entries of one problem.
pub(crate) fn measure(
    name: &str,
    config: &BenchConfig,
    options: &Options,
    progress: &mut impl FnMut(&str) -> Result<()>,
) -> Result<Case> {
    let temporary = || tempfile::tempdir().map_err(|e| Error::io("create", &std::env::temp_dir(), e));
    let (folder, inputs) = (temporary()?, temporary()?);
    let mut entries = entries(config, options, folder.path())?;
    give_inputs(name, config, options, &mut entries, inputs.path(), progress)?;
    let mut processes = vec![];
    for i in 0..entries.len() {
        progress(&format!("{name}: planning {}", entries[i].job.name))?;
        let place = folder.path().join(format!("{i}.log"));
        let state = start(&mut processes, &entries[..i], &entries[i], place);
        entries[i].state = state.unwrap_or_else(|error| State::Failed { error: error.to_string(), not_offered: false });
    }
    // Every worker has read these gigabytes.
    drop(inputs);
    // In order of memory use, so that each entry can raise the high-water mark of a shared device.
    entries.sort_by_key(|entry| match &entry.state {
        State::Running(running) => running.planned.bytes.workspace.unwrap_or(0),
        _ => 0,
    });
    for entry in &mut entries {
        progress(&format!("{name}: first call of {}", entry.job.name))?;
        step_entry(entry, &mut processes, true, |running, step| running.first = Some(step));
    }
    let rounds = config.rounds;
    let began = Instant::now();
    for round in 0..rounds.warmup + rounds.steps {
        let which = round.checked_sub(rounds.warmup);
        for entry in &mut entries {
            let at = match which {
                None => format!("warm-up {} of {}", round + 1, rounds.warmup),
                Some(step) => format!("round {} of {}", step + 1, rounds.steps),
            };
            progress(&format!("{name}: {at}: {}", entry.job.name))?;
            let began = began.elapsed().as_secs_f64();
            step_entry(entry, &mut processes, false, |running, step| {
                if which.is_some() {
                    running.began.push(began);
                    running.steps.push(step);
                }
            });
        }
    }
    drop(processes);
    Ok(Case {
        name: name.into(),
        config: config.clone(),
        rounds,
        devices: devices(&entries),
        floors: outcomes(&entries, config.dtype, |kind| kind == Kind::Floor),
        variants: outcomes(&entries, config.dtype, |kind| kind != Kind::Floor),
    })
}

/// Creates the entries that are measured in alternation: floors, variants, peers.
fn entries(config: &BenchConfig, options: &Options, folder: &Path) -> Result<Vec<Entry>> {
    let is_chosen = |name: &str| options.variants.is_empty() || options.variants.iter().any(|variant| variant == name);
    let mut floors: BTreeMap<String, Entry> = BTreeMap::new();
    let mut entries = vec![];
    let masked = config.inputs.kept_ids > 0;
    for (name, settings) in config.variants.iter().flatten().filter(|(name, _)| is_chosen(name)) {
        if masked && (settings.command.is_some() || config.backend(name)? != BackendName::Cpu) {
            let found = format!("variant `{name}` of another program or device");
            return Err(Error::argument("inputs.kept_ids", "variants of the backend cpu", found));
        }
        let (kind, command) = match &settings.command {
            Some(command) => (Kind::Peer, command.iter().map(Into::into).collect()),
            None => (Kind::Variant, options.worker.clone()),
        };
        let job = Job {
            name: name.clone(),
            role: Role::Loss,
            config: if kind == Kind::Peer { explicit(config) } else { config.clone() },
            variant: Some(name.clone()),
            backend: config.backend(name)?.to_string(),
            plugin: options.plugin.clone(),
            threads: settings.threads,
            tensors: Files::new(),
        };
        let huge_pages = settings.huge_pages;
        entries.push(Entry { huge_pages, ..Entry::new(job, config.variant(name)?, kind, command) });
    }
    if let Some(venv) = &options.peers_venv {
        if masked {
            return Err(Error::argument("inputs.kept_ids", "no peers, which have no sampling masks", "--peers-venv"));
        }
        entries.extend(peer_entries(config, options, &peers::all(config, venv, folder)?, is_chosen)?);
    }
    for entry in &mut entries {
        for floor in floors_under(config, entry, &options.worker) {
            entry.floors.push(floor.job.name.clone());
            floors.entry(floor.job.name.clone()).or_insert(floor);
        }
    }
    Ok(floors.into_values().chain(entries).collect())
}

/// Creates the peers, which compute the loss of the problem on this CPU in their own way.
fn peer_entries(
    config: &BenchConfig,
    options: &Options,
    peers: &[peers::Peer],
    is_chosen: impl Fn(&str) -> bool,
) -> Result<Vec<Entry>> {
    let variant = with_one_variant(config, "peer", ProgramKind::Gradient).variant("peer")?;
    let threads = config.variants.iter().flatten().map(|(_, variant)| variant.threads).max().unwrap_or(0);
    let known = |name: &str| config.names().contains(&name);
    let peers = peers.iter().filter(|peer| is_chosen(&peer.name) && !known(&peer.name));
    let entry = |peer: &peers::Peer| {
        let job = Job {
            name: peer.name.clone(),
            role: Role::Loss,
            config: explicit(config),
            variant: None,
            backend: BackendName::Cpu.to_string(),
            plugin: options.plugin.clone(),
            threads,
            tensors: Files::new(),
        };
        Entry { huge_pages: peer.huge_pages, ..Entry::new(job, variant.clone(), Kind::Peer, peer.command.clone()) }
    };
    Ok(peers.map(entry).collect())
}

/// Returns the problem with a single variant, which computes `pass` with the implementation of the least memory.
fn with_one_variant(config: &BenchConfig, name: &str, pass: ProgramKind) -> BenchConfig {
    let implementation = if config.shape.hidden.is_some() { Implementation::Fused } else { Implementation::Logits };
    let variant = VariantConfig { implementation, pass, ..VariantConfig::default() };
    BenchConfig { variants: Some([(name.to_owned(), variant)].into()), ..config.clone() }
}

/// Sets the clip of the loss where it has its default, because a peer does not know the defaults of the losses.
fn explicit(config: &BenchConfig) -> BenchConfig {
    let (low, high) = (config.loss.lower_epsilon(), config.loss.upper_epsilon());
    let loss = LossConfig { epsilon_low: Some(low), epsilon_high: Some(high), ..config.loss.clone() };
    BenchConfig { loss, ..config.clone() }
}

/// Creates the floors that `entry` is compared with.
fn floors_under(config: &BenchConfig, entry: &Entry, worker: &[OsString]) -> Vec<Entry> {
    let jobs = if entry.job.backend == BackendName::Cpu.to_string() {
        floor::of_machine(&entry.variant, entry.job.threads)
    } else if config.mesh != MeshShape::default() {
        // There is no floor for products on several devices.
        vec![]
    } else {
        let dtype = entry.variant.request.policy.dtype();
        let suffix = if dtype == config.dtype { String::new() } else { format!("_{}", dtype.name()) };
        let place = if entry.job.backend == config.backend { String::new() } else { format!("_{}", entry.job.backend) };
        let floor = floor::bare_products(&entry.variant, entry.job.settings().pass);
        floor
            .map(|(name, _)| (format!("{name}{suffix}{}", place.replace(':', "_")), Role::BareProducts))
            .into_iter()
            .collect()
    };
    let entry_of = |(name, role)| {
        let job = Job { name, role, ..entry.job.clone() };
        Entry::new(job, entry.variant.clone(), Kind::Floor, worker.to_vec())
    };
    jobs.into_iter().map(entry_of).collect()
}

/// Creates the inputs and sets their files in every job.
fn give_inputs(
    name: &str,
    config: &BenchConfig,
    options: &Options,
    entries: &mut [Entry],
    folder: &Path,
    progress: &mut impl FnMut(&str) -> Result<()>,
) -> Result<()> {
    progress(&format!("{name}: making inputs"))?;
    let dtype = |entry: &Entry| entry.variant.request.policy.dtype();
    let mut policies: BTreeMap<&str, Files> = BTreeMap::new();
    for dtype in [Dtype::F32, Dtype::Bf16] {
        if entries.iter().any(|entry| entry.variant.request.policy.dtype() == dtype) {
            let config = BenchConfig { dtype, ..config.clone() };
            policies.insert(dtype.name(), inputs::write_policy(&config, folder)?);
        }
    }
    let mut batch = inputs::write_batch(config, folder)?;
    // Any variant can score.
    let scorer = entries.iter().find(|entry| entry.kind == Kind::Variant);
    let scorer = scorer.map_or((BackendName::Cpu.to_string(), config.dtype, 0), |entry| {
        (entry.job.backend.clone(), dtype(entry), entry.job.threads)
    });
    if inputs::has_other_policies(config) {
        progress(&format!("{name}: scoring inputs"))?;
        let tensors = batch.clone().into_iter().chain(policies.get(scorer.1.name()).cloned().unwrap_or_default());
        let logp = score(config, options, scorer, tensors.collect(), folder)?;
        batch.extend(inputs::write_other_policies(config, &logp, folder)?);
    }
    for entry in entries {
        let policy = policies.get(dtype(entry).name()).cloned().unwrap_or_default();
        entry.job.tensors = policy.into_iter().chain(batch.clone()).collect();
    }
    Ok(())
}

/// Computes log-probabilities of the inputs for all variants: in f32, with small tiles.
fn score(
    config: &BenchConfig,
    options: &Options,
    (backend, dtype, threads): (String, Dtype, usize),
    tensors: Files,
    folder: &Path,
) -> Result<Vec<f32>> {
    let name = "scoring";
    let config = BenchConfig { dtype, ..with_one_variant(config, name, ProgramKind::Score) };
    let mut process = Process::start(&options.worker, &[], folder.join("scoring.log"))?;
    let job = Job {
        name: name.into(),
        role: Role::Loss,
        config,
        variant: Some(name.into()),
        backend,
        plugin: options.plugin.clone(),
        threads,
        tensors,
    };
    process.ask(&Request::Plan(Box::new(job))).and_then(into_result)?;
    match process.ask(&Request::Score { name: name.into() }).and_then(into_result)? {
        Reply::Scored { logp } => Ok(logp),
        other => Err(unexpected(&other)),
    }
}

/// Converts a failure to an error.
fn into_result(reply: Reply) -> Result<Reply> {
    match reply {
        Reply::Failed { error, .. } => Err(Error::Text(format!("the inputs cannot be scored: {error}"))),
        other => Ok(other),
    }
}

pub(crate) fn unexpected(reply: &Reply) -> Error {
    Error::Text(format!("unexpected reply of the worker: {reply:?}"))
}

/// Plans an entry in its own process, or, on exclusive devices, in the process that already has them.
fn start(processes: &mut Vec<Process>, others: &[Entry], entry: &Entry, log: std::path::PathBuf) -> Result<State> {
    let is_exclusive = |entry: &Entry| {
        let backend = BackendName::parse("backend", &entry.job.backend);
        entry.kind != Kind::Peer
            && matches!(entry.job.role, Role::Loss | Role::BareProducts)
            && backend.is_ok_and(BackendName::is_exclusive)
    };
    let shared = others.iter().find_map(|other| match &other.state {
        State::Running(running) if is_exclusive(entry) && other.job.backend == entry.job.backend => {
            is_exclusive(other).then_some(running.process)
        }
        _ => None,
    });
    let process = match shared {
        Some(process) => process,
        None => {
            processes.push(Process::start(&entry.command, &environment(entry), log)?);
            processes.len() - 1
        }
    };
    match processes[process].ask(&Request::Plan(Box::new(entry.job.clone())))? {
        Reply::Planned(planned) => {
            let running = Running { process, planned: *planned, first: None, steps: vec![], began: vec![] };
            Ok(State::Running(Box::new(running)))
        }
        Reply::Failed { error, not_offered } => Ok(State::Failed { error, not_offered }),
        other => Err(unexpected(&other)),
    }
}

fn environment(entry: &Entry) -> Vec<(&'static str, String)> {
    let mut environment = vec![];
    if entry.huge_pages {
        environment.push(("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1".to_owned()));
    }
    if entry.kind == Kind::Peer {
        // Threads that wait for the next step must not spin during the measurement of another process.
        environment.push(("OMP_WAIT_POLICY", "PASSIVE".to_owned()));
        if entry.job.threads > 0 {
            environment.push(("OMP_NUM_THREADS", entry.job.threads.to_string()));
        }
    }
    environment
}

/// Runs one step of an entry. An entry that fails does not run again.
fn step_entry(entry: &mut Entry, processes: &mut [Process], check: bool, note: impl FnOnce(&mut Running, Stepped)) {
    let State::Running(running) = &mut entry.state else { return };
    let reply = processes[running.process].ask(&Request::Step { name: entry.job.name.clone(), check });
    let error = match reply {
        Ok(Reply::Stepped(stepped)) => return note(running, *stepped),
        Ok(Reply::Failed { error, not_offered }) => (error, not_offered),
        Ok(other) => (unexpected(&other).to_string(), false),
        Err(error) => (error.to_string(), false),
    };
    entry.state = State::Failed { error: error.0, not_offered: error.1 };
}
