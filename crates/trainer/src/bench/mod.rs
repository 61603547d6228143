//! Benchmarks: variants of a [`BenchConfig`] on the same inputs in the same run, taking turns, with a floor under them.
//!
//! [`inputs`] makes the problem, [`measure`] lets contenders take turns, [`floor`] knows what none of them can do without,
//! [`report`] is what comes out. A backend joins by a [`measure::Contender`] per variant, as `pjrt` does.

pub mod floor;
pub mod inputs;
pub mod measure;
mod pjrt;
pub mod report;

use crate::bench_config::BenchConfig;
use crate::error::{Error, Result};
use ::pjrt::DeviceMemoryStats;
use backend_tpu::aot::{Variant, What};
use backend_tpu::plugins::Kind;
use backend_tpu::program::Mesh;
use grpo_core::{Implementation, PolicySpec, Tiling};
use inputs::Inputs;
use measure::{Contender, Rounds, Timing, take_turns, timed};
use pjrt::{OnDevice, OnDevices};
use report::{DeviceBytes, Document, Machine, Measured, Outcome, utc};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// What is measured and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// Devices.
    pub kind: Kind,
    /// The plugin, instead of the one that [`backend_tpu::plugins::find`] finds.
    pub plugin: Option<PathBuf>,
    /// Variants by name; none: all of the configuration.
    pub variants: Vec<String>,
    /// How often.
    pub rounds: Rounds,
    /// Of the inputs.
    pub seed: u64,
}

/// A variant or a floor on its way.
struct Entry<'a> {
    name: String,
    variant: Variant,
    /// Name of the floor under it; a floor has none.
    floor: Option<String>,
    is_floor: bool,
    state: Result<Running<'a>>,
}

struct Running<'a> {
    contender: OnDevice<'a>,
    compile_seconds: f64,
    first_call_seconds: f64,
    device_bytes: Option<DeviceBytes>,
    seconds: Vec<f64>,
}

/// Measures. `progress` hears what is about to be done.
///
/// # Errors
/// [`Error::Config`] for a variant that the configuration lacks; those of the backend when the devices cannot be opened or
/// the inputs cannot be scored. A variant that fails is an [`Outcome::Failed`].
pub fn run(config: &BenchConfig, options: &Options, mut progress: impl FnMut(&str)) -> Result<Document> {
    let date = utc(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()));
    let variants = chosen(config, &options.variants)?;
    let devices = OnDevices::open(options.kind, options.plugin.as_deref(), config.mesh)?;
    progress("making inputs");
    let mut inputs = Inputs::new(config, options.seed)?;
    progress("scoring inputs");
    let logp = devices.score(&scoring(&variants[0].1), &inputs)?;
    inputs.set_old_policy(&logp, config.loss.beta != 0.0)?;

    let mut entries = compile(config, variants, &devices, &inputs, &mut progress);
    // From the least memory to the most, so that each may raise the device's high-water mark.
    entries.sort_by_key(|entry| entry.state.as_ref().map_or(0, |running| running.contender.compiled.temp));
    for entry in &mut entries {
        if let Ok(running) = &mut entry.state {
            progress(&format!("first call of {}", entry.name));
            if let Err(error) = first_call(running, &devices) {
                entry.state = Err(error);
            }
        }
    }
    progress("measuring");
    measure(&mut entries, options.rounds);
    Ok(Document {
        version: env!("CARGO_PKG_VERSION").into(),
        date,
        machine: Machine::here(),
        backend: format!("pjrt:{}", options.kind.name()),
        device: devices.report()?,
        config: config.clone(),
        rounds: options.rounds,
        seed: options.seed,
        floors: outcomes(&entries, true),
        variants: outcomes(&entries, false),
    })
}

fn chosen(config: &BenchConfig, names: &[String]) -> Result<Vec<(String, Variant)>> {
    config.validate()?;
    let all: Vec<String> = config.names().into_iter().map(Into::into).collect();
    let names = if names.is_empty() { &all } else { names };
    let mut variants = BTreeMap::new();
    for name in names {
        variants.insert(name.clone(), config.variant(name)?);
    }
    Ok(variants.into_iter().collect())
}

/// How the inputs are scored, whatever the variants are: in f32, in small tiles.
fn scoring(variant: &Variant) -> Variant {
    let mut scoring = Variant { numerics: Default::default(), mosaic: None, what: What::Score, ..variant.clone() };
    scoring.request.tiling = Tiling::default();
    scoring.request.gradients.bias = false;
    scoring.request.implementation = match &mut scoring.request.policy {
        PolicySpec::Logits { .. } => Implementation::Logits,
        PolicySpec::Hidden { bias, .. } => {
            *bias = false;
            Implementation::Fused
        }
    };
    scoring
}

fn compile<'a>(
    config: &BenchConfig,
    variants: Vec<(String, Variant)>,
    devices: &'a OnDevices,
    inputs: &'a Inputs,
    progress: &mut impl FnMut(&str),
) -> Vec<Entry<'a>> {
    let mut floors = BTreeMap::new();
    let mut all = vec![];
    for (name, variant) in variants {
        // Products on several devices are another floor.
        let under = (config.mesh == Mesh::default()).then(|| floor::under(config, &variant)).flatten();
        let floor = under.map(|(name, floor)| {
            floors.insert(name.clone(), floor);
            name
        });
        all.push((name, variant, floor, false));
    }
    let floors = floors.into_iter().map(|(name, variant)| (name, variant, None, true));
    floors
        .chain(all)
        .map(|(name, variant, floor, is_floor)| {
            progress(&format!("compiling {name}"));
            let began = Instant::now();
            let state = devices.contender(&variant, inputs).map(|contender| Running {
                contender,
                compile_seconds: began.elapsed().as_secs_f64(),
                first_call_seconds: 0.0,
                device_bytes: None,
                seconds: vec![],
            });
            Entry { name, variant, floor, is_floor, state }
        })
        .collect()
}

fn first_call(running: &mut Running<'_>, devices: &OnDevices) -> Result<()> {
    running.contender.prepare()?;
    let before = devices.memory();
    running.first_call_seconds = timed(&mut running.contender)?;
    // In use at most: allocated or, on devices that set programs' memory aside, reserved.
    let peak = |stats: &DeviceMemoryStats| {
        let peak = stats.peak_bytes_in_use?.max(stats.peak_bytes_reserved.unwrap_or(0));
        u64::try_from(peak).ok()
    };
    running.device_bytes = before.zip(devices.memory()).and_then(|(before, after)| {
        let in_use = u64::try_from(before.bytes_in_use).ok()?;
        Some(DeviceBytes::new(in_use, peak(&before)?, peak(&after)?))
    });
    Ok(())
}

fn measure(entries: &mut [Entry<'_>], rounds: Rounds) {
    let mut states: Vec<_> = entries.iter_mut().map(|entry| &mut entry.state).filter(|state| state.is_ok()).collect();
    let contenders = states.iter_mut().filter_map(|state| state.as_mut().ok());
    let mut contenders: Vec<_> = contenders.map(|running| &mut running.contender as &mut dyn Contender).collect();
    let seconds = take_turns(&mut contenders, rounds);
    for (state, seconds) in states.into_iter().zip(seconds) {
        match (seconds, state) {
            (Ok(seconds), Ok(running)) => running.seconds = seconds,
            (Err(error), state) => *state = Err(error),
            (Ok(_), Err(_)) => {}
        }
    }
}

fn outcomes(entries: &[Entry<'_>], floors: bool) -> BTreeMap<String, Outcome> {
    let median = |name: &String| {
        let floor = entries.iter().find(|entry| entry.is_floor && entry.name == *name)?;
        Timing::of(floor.state.as_ref().ok()?.seconds.clone()).map(|timing| timing.p50)
    };
    let wanted = entries.iter().filter(|entry| entry.is_floor == floors);
    wanted.map(|entry| (entry.name.clone(), outcome(entry, entry.floor.as_ref().and_then(median)))).collect()
}

fn outcome(entry: &Entry<'_>, floor: Option<f64>) -> Outcome {
    let running = match &entry.state {
        Ok(running) => running,
        Err(Error::Loss(error @ grpo_core::Error::Unsupported { .. })) => {
            return Outcome::NotOffered { error: error.to_string() };
        }
        Err(error) => return Outcome::Failed { error: error.to_string() },
    };
    let seconds = Timing::of(running.seconds.clone());
    let rate = |count: f64| seconds.as_ref().map(|seconds| count / seconds.p50);
    let useful_flops = floor::useful_flops(&entry.variant);
    Outcome::Measured(Box::new(Measured {
        blocking: running.contender.blocking(),
        loss: running.contender.loss,
        compile_seconds: running.compile_seconds,
        first_call_seconds: running.first_call_seconds,
        tokens_per_second: rate(entry.variant.request.max_tokens as f64),
        useful_flops,
        useful_flops_per_second: rate(useful_flops),
        floor: entry.floor.clone(),
        times_floor: seconds.as_ref().zip(floor).map(|(seconds, floor)| seconds.p50 / floor),
        compiled_bytes: Some(running.contender.compiled),
        device_bytes: running.device_bytes,
        seconds,
    }))
}
