//! `grpo plan` of a run: meshes, micro-batches and recomputation by a cost model, and the compiler's numbers for the best.

use crate::aot_run::is_out_of_memory;
use crate::aot_worker::{self, Compiled, compile_all, expect_reports};
use crate::bench_layers::BenchArgs;
use crate::commented::commented;
use crate::compiling::Compiling;
use crate::output::{Outcome, emit, emit_document, emit_json};
use crate::plan_args::Args;
use crate::{layers, plan_run_text};
use anyhow::{Context, bail};
use grpo_aot::{ProgramName, RunPrograms};
use grpo_backend_tpu::aot::{Chip, Target};
use grpo_backend_tpu::plugins;
use grpo_core::readable_bytes;
use grpo_files::{counted, to_yaml, to_yaml_with_secrets};
use grpo_planner::{Candidate, Devices, Illegal, Settings, longest_prompt, plan};
use grpo_trainer::TrainConfig;
use serde::Serialize;
use serde_json::Value;
use std::cmp::Ordering;
use std::collections::BTreeMap;

/// The version of the document of `--json`.
const FORMAT: &str = "grpo-plan/1";
/// The number of meshes that are compiled if a plugin is installed.
const COMPILED: usize = 3;

/// The document of `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct Document {
    /// The format with its version.
    pub(crate) format: &'static str,
    /// The name of the run.
    pub(crate) name: String,
    /// The target as the command line names it.
    pub(crate) target: String,
    /// The properties of one device of the target.
    pub(crate) chip: Chip,
    /// The number of devices.
    pub(crate) devices: usize,
    /// The bytes of a device's memory that may be used.
    pub(crate) memory_bytes: u64,
    /// The number of weights of the model.
    pub(crate) parameters: u64,
    /// The numbers of tokens of the longest prompt and the longest completion.
    pub(crate) tokens: [usize; 2],
    /// The number of sequences of a step.
    pub(crate) sequences: usize,
    /// The number of candidates that fit, and of all.
    pub(crate) fitting: [usize; 2],
    /// The candidates that fit, fastest first, and compiled ones before others; then those that do not fit, smallest first.
    pub(crate) candidates: Vec<Row>,
    /// The meshes that were left out.
    pub(crate) illegal: Vec<Illegal>,
    /// The reason why nothing was compiled, if so.
    pub(crate) not_compiled: Option<String>,
    /// The best settings; `None` if nothing fits.
    pub(crate) best: Option<Best>,
}

/// A candidate, with the compiler's numbers if it was compiled.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    #[serde(flatten)]
    pub(crate) candidate: Candidate,
    /// The compiler's numbers; `None` for a candidate that was not compiled.
    pub(crate) compiled: Option<CompiledPrograms>,
}

/// The compiler's numbers of an update and of decoding.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct CompiledPrograms {
    /// The estimated time of an update on each device, without the links; `None` if the compiler has no estimate.
    pub(crate) update_seconds: Option<f64>,
    /// The predicted time of a step with the estimated time of its updates, and with the links; `None` if the compiler has no estimate.
    pub(crate) step_seconds: Option<f64>,
    /// The same for a decode step that reads all columns of the cache, and adds a token to every sequence.
    pub(crate) decode_seconds: Option<f64>,
    /// The memory of each device during the larger of the two; `None` if the compiler refused because one does not fit.
    pub(crate) memory_bytes: Option<u64>,
    /// `true` if the memory fits.
    pub(crate) fits: bool,
}

/// The best settings.
#[derive(Debug, Serialize)]
pub(crate) struct Best {
    /// The settings.
    #[serde(flatten)]
    pub(crate) settings: Settings,
    /// The keys of a configuration with these settings.
    pub(crate) keys: Value,
    /// The keys as YAML.
    pub(crate) yaml: String,
}

impl Row {
    /// Returns `true` if the memory fits, by the compiler where it was asked.
    pub(crate) fn fits(&self) -> bool {
        self.compiled.as_ref().map_or(self.candidate.fits, |compiled| compiled.fits)
    }

    /// Returns the time of a step, with the compiler's estimate of its updates if there is one.
    fn step_seconds(&self) -> f64 {
        self.compiled.as_ref().and_then(|compiled| compiled.step_seconds).unwrap_or(self.candidate.step_seconds)
    }
}

pub(crate) fn run(args: Args, compiling: &Compiling) -> anyhow::Result<Outcome> {
    let BenchArgs { config: path, set, .. } = &args.bench;
    let given = layers::resolve_run(path.as_deref(), set)?;
    if args.bench.print_config {
        emit_document(&commented(&to_yaml(&given)?))?;
        return Ok(Outcome::Done);
    }
    let config_path = || path.as_ref().map_or_else(String::new, |path| path.display().to_string());
    let target = Target::parse(&args.bench.target)?;
    let (count, not_compiled) = compilations(&args, &target)?;
    let (shape, config) = grpo_aot::resolve(&given, target.kind()).with_context(config_path)?;
    let mut devices = Devices::of(&target);
    devices.memory = args.hbm.unwrap_or(devices.memory);
    let prompt = longest_prompt(&config, &shape);
    let plan = plan(&config, &shape, prompt, &devices)?;
    let chosen: Vec<Candidate> = plan.by_mesh().into_iter().filter(|c| c.fits).take(count).copied().collect();
    let rows: Vec<Row> = plan.candidates.into_iter().map(|candidate| Row { candidate, compiled: None }).collect();
    let smallest = rows.iter().min_by_key(|row| row.candidate.memory_bytes).map(|row| row.candidate);
    let mut document = Document {
        format: FORMAT,
        name: config.run.name.clone(),
        target: target.name().into(),
        chip: target.chip(),
        devices: devices.count,
        memory_bytes: devices.memory,
        parameters: shape.parameter_count(),
        tokens: [prompt, config.rollout.max_completion_length()],
        sequences: config.grpo.sequences(),
        fitting: [0, rows.len()],
        candidates: rows,
        illegal: plan.illegal,
        not_compiled,
        best: None,
    };
    if !args.json {
        // Compilers take minutes.
        emit(&plan_run_text::predictions(&document, args.top))?;
    }
    if !chosen.is_empty() {
        compile(&args, &target, &config, &chosen, &devices, compiling, &mut document.candidates)?;
        rank(&mut document.candidates);
    }
    document.fitting[0] = document.candidates.iter().filter(|row| row.fits()).count();
    let best = document.candidates.first().filter(|row| row.fits()).map(|row| row.candidate.settings);
    document.best = best.map(|settings| best_with_keys(settings, &config)).transpose()?;
    match args.json {
        true => emit_json(&shortened(document, args.top))?,
        false => emit(&plan_run_text::results(&document, args.top))?,
    }
    match (best, smallest) {
        (None, Some(smallest)) => bail!(does_not_fit(&smallest, &devices, target.name())),
        _ => Ok(Outcome::Done),
    }
}

/// Returns the number of meshes to compile, and the reason if it is 0.
fn compilations(args: &Args, target: &Target) -> anyhow::Result<(usize, Option<String>)> {
    let plugin = || plugins::find(target.kind(), args.bench.plugin.as_deref());
    let is_named = args.bench.plugin.is_some() || std::env::var_os(plugins::VARIABLE).is_some();
    match args.compile {
        Some(0) => Ok((0, Some("--compile 0".into()))),
        Some(count) => {
            plugin()?;
            Ok((count, None))
        }
        None => match plugin() {
            Ok(_) => Ok((COMPILED, None)),
            Err(error) if is_named => Err(error.into()),
            Err(error) => Ok((0, Some(error.to_string()))),
        },
    }
}

/// Compiles the update and the longest decode program of each of these candidates, and adds the numbers to their rows.
fn compile(
    args: &Args,
    target: &Target,
    config: &TrainConfig,
    chosen: &[Candidate],
    devices: &Devices,
    compiling: &Compiling,
    rows: &mut [Row],
) -> anyhow::Result<()> {
    let programs = |candidate: &Candidate| RunPrograms::of_target(&candidate.settings.applied_to(config), target);
    let programs = chosen.iter().map(programs).collect::<Result<Vec<_>, _>>()?;
    let names: Vec<Vec<String>> =
        programs.iter().map(|programs| compiled_names(programs).iter().map(ToString::to_string).collect()).collect();
    let total = names.iter().map(Vec::len).sum();
    compiling.expect(total);
    let meshes: Vec<String> = chosen.iter().map(|candidate| candidate.settings.mesh.to_string()).collect();
    compiling.announce(&format!(
        "{} of {} are compiled for {} ({}), which can take minutes; --compile 0 leaves it out, --compile N is for N meshes",
        counted(total, "program"),
        counted(chosen.len(), "mesh"),
        target.name(),
        meshes.join(", ")
    ));
    for (((candidate, programs), names), mesh) in chosen.iter().zip(&programs).zip(&names).zip(&meshes) {
        let settings = &candidate.settings;
        let reports = compile_all(&worker_args(args, config, settings), names, &format!(" of {mesh}"), compiling)?;
        let compiled = compiled_programs(programs, &reports, devices, candidate, config.grpo.updates())?;
        let row = rows.iter_mut().find(|row| row.candidate.settings == *settings);
        row.into_iter().for_each(|row| row.compiled = Some(compiled.clone()));
    }
    Ok(())
}

/// Returns the programs that are compiled for a candidate.
fn compiled_names(programs: &RunPrograms) -> Vec<ProgramName> {
    programs.names_of_update().iter().copied().chain(programs.longest_decode()).collect()
}

/// Returns the arguments of `grpo aot` for the run with these settings.
fn worker_args(args: &Args, config: &TrainConfig, settings: &Settings) -> aot_worker::Args {
    let BenchArgs { config: path, set, target, plugin, .. } = &args.bench;
    let mut set = set.clone();
    // A number of devices in the file would not fit the mesh.
    set.extend(config.policy.devices.map(|_| "policy.devices=null".to_owned()));
    let keys = settings.keys();
    for (section, keys) in keys.as_object().into_iter().flatten() {
        set.extend(keys.as_object().into_iter().flatten().map(|(key, value)| format!("{section}.{key}={value}")));
    }
    let bench =
        BenchArgs { config: path.clone(), set, print_config: false, target: target.clone(), plugin: plugin.clone() };
    let recompile = args.recompile;
    aot_worker::Args { bench, variants: vec![], json: true, recompile, emit: None, assert: vec![], worker: false }
}

/// Returns the numbers of a candidate from the reports of its programs.
fn compiled_programs(
    programs: &RunPrograms,
    reports: &BTreeMap<String, Compiled>,
    devices: &Devices,
    Candidate { step_seconds, update, .. }: &Candidate,
    updates: usize,
) -> anyhow::Result<CompiledPrograms> {
    let report = |name: ProgramName| reports.get(&name.to_string())?.report();
    let is_exhausted = |compiled: &Compiled| match compiled {
        Compiled::Failed { error } => is_out_of_memory(error),
        Compiled::Report(_) => false,
    };
    if !reports.values().any(is_exhausted) {
        expect_reports("program", reports)?;
    }
    let memory_bytes = programs.largest_bytes(&compiled_names(programs), report);
    let decode = programs.longest_decode().and_then(|name| report(name)?.estimate_seconds);
    let update_seconds = programs.update_seconds(report);
    Ok(CompiledPrograms {
        update_seconds,
        step_seconds: update_seconds.map(|seconds| step_seconds + updates as f64 * (seconds - update.chip_seconds)),
        decode_seconds: decode.map(|seconds| seconds / programs.sizes().tokens_per_call.max(1) as f64),
        memory_bytes,
        fits: memory_bytes.is_some_and(|bytes| bytes <= devices.memory),
    })
}

/// Moves compiled candidates that fit to the front, fastest first, and those that do not fit to the end.
fn rank(rows: &mut [Row]) {
    let class = |row: &Row| match (row.fits(), row.compiled.is_some()) {
        (true, true) => 0,
        (true, false) => 1,
        (false, _) => 2,
    };
    rows.sort_by(|a, b| {
        let by_time = || if class(a) == 0 { a.step_seconds().total_cmp(&b.step_seconds()) } else { Ordering::Equal };
        class(a).cmp(&class(b)).then_with(by_time)
    });
}

fn best_with_keys(settings: Settings, config: &TrainConfig) -> anyhow::Result<Best> {
    let mut keys = settings.keys();
    keys["policy"]["device"] = serde_json::to_value(config.policy.device)?;
    Ok(Best { settings, yaml: to_yaml_with_secrets(&keys)?, keys })
}

/// Returns the document with the first `top` candidates.
fn shortened(mut document: Document, top: Option<usize>) -> Document {
    document.candidates.truncate(top.unwrap_or(usize::MAX));
    document
}

fn does_not_fit(smallest: &Candidate, devices: &Devices, target: &str) -> String {
    format!(
        "no mesh of {target} fits: the least memory is {} per device, with {}, {} per micro-batch and {}, and {} may be used; a target with more \
         devices or more memory per device, or {}",
        readable_bytes(smallest.memory_bytes),
        smallest.settings.mesh,
        counted(smallest.micro_batch, "sequence"),
        plan_run_text::recompute(&smallest.settings),
        readable_bytes(devices.memory),
        grpo_run_config::advice::DEVICE_MEMORY
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_planner::Cost;
    use grpo_run_config::{MeshConfig, RecomputeGranularity};

    /// Returns a row with this size of `fsdp` and predicted time of a step; an update takes half of it.
    fn row(fsdp: i64, step_seconds: f64, compiled: Option<(f64, bool)>) -> Row {
        let mesh = MeshConfig { fsdp, ..MeshConfig::default() };
        let settings = Settings {
            mesh,
            rollout_mesh: mesh,
            gradient_accumulation_steps: 1,
            recompute_granularity: RecomputeGranularity::Full,
            recompute_num_layers: 1,
        };
        let update = Cost { chip_seconds: step_seconds / 2.0, ..Cost::default() };
        let candidate = Candidate {
            settings,
            micro_batch: 1,
            update,
            score: Cost::default(),
            rollout: Cost::default(),
            step_seconds,
            memory_bytes: 1,
            fits: true,
        };
        let compiled = compiled.map(|(seconds, fits)| CompiledPrograms {
            update_seconds: Some(seconds),
            step_seconds: Some(step_seconds + seconds - update.chip_seconds),
            decode_seconds: None,
            memory_bytes: fits.then_some(1),
            fits,
        });
        Row { candidate, compiled }
    }

    #[test]
    fn the_first_row_is_the_fastest_compiled_one_that_fits() {
        let ranked = |mut rows: Vec<Row>| {
            rank(&mut rows);
            rows.iter().map(|row| (row.candidate.settings.mesh.fsdp, row.fits())).collect::<Vec<_>>()
        };
        // Predicted steps of 1.0 and 1.2 s; the compiler has 0.9 and 0.4 s for updates of 0.5 and 0.6 s.
        let rows = vec![row(1, 1.0, Some((0.9, true))), row(2, 1.2, Some((0.4, true))), row(4, 1.3, None)];
        assert_eq!(ranked(rows), [(2, true), (1, true), (4, true)]);
        let rows = vec![row(1, 1.0, Some((0.5, false))), row(2, 1.2, Some((0.6, true)))];
        assert_eq!(ranked(rows), [(2, true), (1, false)]);
        // Nothing that was compiled fits.
        let rows = vec![row(1, 1.0, Some((0.5, false))), row(4, 1.3, None), row(8, 1.4, None)];
        assert_eq!(ranked(rows), [(4, true), (8, true), (1, false)]);
        assert_eq!(ranked(vec![row(1, 1.0, Some((0.5, false)))]), [(1, false)]);
        assert_eq!(ranked(vec![row(1, 1.0, None), row(2, 0.9, None)]), [(1, true), (2, true)]);
    }
}
