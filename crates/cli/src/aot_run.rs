//! `grpo aot` for a run: its training step and its rollout on absent devices.

use crate::aot_worker::{Args, Compiled, compile_all, expect_reports, run_worker};
use crate::bench_layers::BenchArgs;
use crate::commented::commented;
use crate::compiling::Compiling;
use crate::output::{Outcome, emit, emit_document, emit_json};
use crate::{aot_run_text, layers};
use anyhow::{Context, bail};
use grpo_aot::{Memory, ProcessShards, ProgramName, RunPrograms, RunSizes, Times};
use grpo_backend_tpu::aot::{Chip, Report, Target};
use grpo_backend_tpu::compile_options::options_for_decoder;
use grpo_backend_tpu::devices::mesh_order;
use grpo_backend_tpu::plugins::Kind;
use grpo_bench::assertion::{Assertion, Checked};
use grpo_bench::config::BenchConfig;
use grpo_files::{Layers, counted, to_yaml};
use grpo_pjrt::{CompileOptions, DeviceDescription};
use grpo_run_config::WITHOUT_MODEL;
use grpo_trainer::TrainConfig;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// The document of `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct Document {
    /// The name of the run.
    pub(crate) name: String,
    /// The target as the command line names it.
    pub(crate) target: String,
    /// The properties of one device of the target.
    pub(crate) chip: Chip,
    /// The meshes of training and of the rollout, such as `data 1 x fsdp 8 x tensor 1`; `None` on one device.
    pub(crate) meshes: Option<[String; 2]>,
    /// The processes of the target with their shards; empty on one device.
    pub(crate) processes: Vec<ProcessShards>,
    /// The sizes of the programs.
    pub(crate) sizes: RunSizes,
    /// The reports by the name of the program.
    pub(crate) programs: BTreeMap<String, Compiled>,
    /// Device memory during each program; `None` unless all programs were compiled.
    pub(crate) memory: Option<Memory>,
    /// Time estimates of a whole step; `None` if the compiler has none, or not all programs were compiled.
    pub(crate) times: Option<Times>,
    /// The assertions in the given order, with their results.
    pub(crate) assertions: Vec<Checked>,
}

/// Returns `true` for the configuration of a run, `false` for a benchmark's, by keys that only one of them has.
///
/// # Errors
/// Errors of reading the file; an error for a file with keys of neither kind, or of both.
pub(crate) fn is_run(args: &BenchArgs) -> anyhow::Result<bool> {
    let Some(path) = &args.config else { return Ok(false) };
    let layers = Layers::new().file(path)?;
    let keys: BTreeSet<&str> = layers.keys().collect();
    let of = |value: serde_json::Value| -> BTreeSet<String> {
        value.as_object().into_iter().flat_map(|map| map.keys().cloned()).collect()
    };
    let mut run = of(serde_json::to_value(TrainConfig::default())?);
    run.insert(WITHOUT_MODEL.into());
    let bench = of(serde_json::to_value(BenchConfig::default())?);
    let only = |mine: &BTreeSet<String>, other: &BTreeSet<String>| {
        keys.iter().find(|key| mine.contains(**key) && !other.contains(**key)).copied()
    };
    match (only(&run, &bench), only(&bench, &run)) {
        (Some(_), None) => Ok(true),
        (None, Some(_)) => Ok(false),
        (Some(a), Some(b)) => {
            bail!(
                "{}: `{a}` is a key of runs (configs/train/) and `{b}` one of benchmarks (configs/bench/): expected one of the two",
                path.display()
            )
        }
        // Shared keys alone configure a benchmark of the built-in shape.
        (None, None) if keys.iter().any(|key| bench.contains(*key)) => Ok(false),
        (None, None) => {
            let found = keys.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
            let found = if found.is_empty() { "no key".into() } else { found };
            bail!(
                "{}: expected the configuration of a run (as in configs/train/, with keys such as model, grpo, rollout) or of a \
                 benchmark (as in configs/bench/, with shape, variants), found {found}",
                path.display()
            )
        }
    }
}

pub(crate) fn run(args: Args, compiling: &Compiling) -> anyhow::Result<Outcome> {
    let BenchArgs { config: path, set, .. } = &args.bench;
    let config = layers::resolve_run(path.as_deref(), set)?;
    let config_path = || path.as_ref().map_or_else(String::new, |path| path.display().to_string());
    if args.bench.print_config {
        emit_document(&commented(&to_yaml(&config)?))?;
        return Ok(Outcome::Done);
    }
    let target = args.bench.target()?;
    let programs = RunPrograms::of_target(&config, &target).with_context(config_path)?;
    if args.worker {
        let text = match args.variants.is_empty() {
            true => serde_json::to_string(&processes(&args, &programs, target)?)?,
            false => serde_json::to_string(&Compiled::from(worker(&args, &programs, target)))?,
        };
        emit_document(&text)?;
        return Ok(Outcome::Done);
    }
    let assertions = args.assertions()?;
    let names = chosen(&args, &programs, target.kind())?;
    for variant in assertions.iter().flat_map(Assertion::variants) {
        if !(names.iter().any(|name| name == variant) || ["memory", "times"].contains(&variant)) {
            bail!("an assertion names `{variant}`; known names: {}, memory and times", names.join(", "));
        }
    }
    warn_of_prompts(&config, programs.sizes());
    let processes = match programs.meshes() {
        Some(_) => run_worker(&std::env::current_exe().context("cannot find this binary")?, &args, None)?,
        None => vec![],
    };
    compiling.expect(names.len());
    let compiled = compile_all(&args, &names, "", compiling)?;
    let report = |name: ProgramName| compiled.get(&name.to_string())?.report();
    let memory = programs.memory(report);
    let times = programs.times(report, target.chip());
    let mut values = serde_json::to_value(&compiled)?;
    values["memory"] = serde_json::to_value(&memory)?;
    values["times"] = serde_json::to_value(&times)?;
    let assertions = assertions.iter().map(|a| a.check(&values)).collect::<Result<Vec<_>, _>>()?;
    let holds = assertions.iter().all(|a| a.holds);
    let document = Document {
        name: config.run.name.clone(),
        target: target.name().into(),
        chip: target.chip(),
        meshes: programs
            .meshes()
            .map(|meshes| [&meshes.training, &meshes.rollout].map(|rules| rules.mesh().to_string())),
        processes,
        sizes: programs.sizes(),
        programs: compiled,
        memory,
        times,
        assertions,
    };
    match args.json {
        true => emit_json(&document)?,
        false => emit(&aot_run_text::text(&document))?,
    }
    expect_reports("program", &document.programs)?;
    if let Some(memory) = &document.memory {
        memory.expect_room(target.chip())?;
    }
    Ok(if holds { Outcome::Done } else { Outcome::CheckFailed })
}

/// Warns if prompts have no length limit and therefore count as the rest of the model's context.
fn warn_of_prompts(config: &TrainConfig, RunSizes { prompt, .. }: RunSizes) {
    let counted = format!(
        "prompts count as {}, all of the model's context but rollout.max_completion_length",
        counted(prompt, "token")
    );
    match (config.data.files.is_empty(), config.data.max_prompt_length) {
        (false, None) => tracing::warn!(
            "data.max_prompt_length is not set, so that {counted}: set it to the tokens of the longest prompt of data.files, as in \
             `--set data.max_prompt_length=256`"
        ),
        // The key only applies to files, and the shape of a new model is chosen for its tasks.
        (true, _) if config.model.shape().is_none() => {
            tracing::warn!(
                "{counted}: those of built-in tasks are shorter; name data.files and data.max_prompt_length to say how long they are"
            )
        }
        _ => {}
    }
}

/// Returns the programs to compile: the named ones, or all; partial programs only if time shares will be computed.
fn chosen(args: &Args, programs: &RunPrograms, kind: Kind) -> anyhow::Result<Vec<String>> {
    let all: Vec<String> = programs.names().iter().map(ToString::to_string).collect();
    if let Some(unknown) = args.variants.iter().find(|name| !all.contains(name)) {
        bail!("the run has no program `{unknown}`: there are {}", all.join(", "));
    }
    let runs = |name: &ProgramName| kind == Kind::Tpu || !programs.is_part(*name);
    Ok(match args.variants.is_empty() {
        true => programs.names().iter().filter(|name| runs(name)).map(ToString::to_string).collect(),
        false => args.variants.clone(),
    })
}

/// Returns the shards of the target's processes.
fn processes(args: &Args, programs: &RunPrograms, target: Target) -> anyhow::Result<Vec<ProcessShards>> {
    let devices = args.bench.compiler(target.clone(), args.recompile)?.devices()?;
    Ok(programs.processes(target.kind(), &devices)?)
}

/// Compiles the named program.
fn worker(args: &Args, programs: &RunPrograms, target: Target) -> anyhow::Result<Report> {
    let [name] = args.variants.as_slice() else { bail!("--worker takes one of --variants") };
    let Some(name) = programs.names().into_iter().find(|known| known.to_string() == *name) else {
        bail!("the run has no program `{name}`")
    };
    let module = programs.module(name)?;
    args.emit(&name.to_string(), || Ok(module.to_string()))?;
    let (kind, floor) = (target.kind(), programs.floor(name, &module, target.chip()));
    let compiler = args.bench.compiler(target, args.recompile)?;
    let options = options_on(&compiler.devices()?, kind, programs.sizes().devices);
    let report = compiler.report_module(&module, &options, floor);
    report.map_err(|error| match is_out_of_memory(&error.to_string()) {
        true => {
            let advice = grpo_run_config::advice::DEVICE_MEMORY;
            anyhow::Error::new(error).context(format!("the program does not fit into the device: {advice}"))
        }
        false => error.into(),
    })
}

/// Returns `true` for the compilers' errors about a program that does not fit into a device's memory.
pub(crate) fn is_out_of_memory(error: &str) -> bool {
    ["RESOURCE_EXHAUSTED", "ResourceExhausted"].iter().any(|name| error.contains(name))
}

/// Returns the options of a run's programs on the first `count` of these devices, in the order of [`mesh_order`], as in a run.
fn options_on(devices: &[DeviceDescription], kind: Kind, count: usize) -> CompileOptions {
    let options = options_for_decoder(kind, count);
    if kind != Kind::Tpu || count < 2 {
        return options;
    }
    let ids = mesh_order(kind, devices, count).into_iter().map(|at| devices[at].id.into()).collect();
    CompileOptions { device_assignment: Some(vec![ids]), ..options }
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_pjrt::NamedValue;

    #[test]
    fn options_assign_partitions_to_chips_in_the_order_of_the_mesh() {
        // libtpu places the chips of v6e:2x4 two along x and four along y.
        let chip = |id: i32| DeviceDescription {
            id,
            process_index: id / 4,
            kind: "TPU v6 lite".into(),
            debug_string: String::new(),
            attributes: [("coords", NamedValue::Ints(vec![i64::from(id) % 2, i64::from(id) / 2, 0]))]
                .map(|(name, value)| (name.to_owned(), value))
                .into(),
        };
        let mut devices: Vec<DeviceDescription> = (0..8).map(chip).collect();
        devices.rotate_left(3);
        let assigned = |kind, count| options_on(&devices, kind, count).device_assignment;
        assert_eq!(assigned(Kind::Tpu, 8), Some(vec![vec![0, 2, 4, 6, 7, 5, 3, 1]]));
        assert_eq!(assigned(Kind::Tpu, 4), Some(vec![vec![0, 1, 3, 2]]));
        assert_eq!((assigned(Kind::Tpu, 1), assigned(Kind::Cuda, 8)), (None, None));
        assert_eq!(options_on(&devices, Kind::Tpu, 8).num_partitions, 8);
    }
}
