//! `grpo parity --model`: compares the decoder of a Hugging Face folder with transformers' results.

mod compared;

use self::compared::Compared;
use crate::loss_input::BACKENDS;
use crate::output::{Outcome, emit, emit_json};
use crate::parity;
use anyhow::Context;
use clap::builder::PossibleValuesParser;
use grpo_backend_cpu::CpuBackend;
use grpo_backend_tpu::plugins::Kind;
use grpo_check::model::{ModelFile, ModelPolicy, ModelReport, ModelTolerances, check};
use grpo_core::{Implementation, LossConfig};
use grpo_files::counted;
use grpo_models::{Adapter, ModelFolder};
use grpo_policy_cpu::{CpuPolicy, PolicyLoss};
use grpo_policy_pjrt::{PjrtPolicy, PjrtPolicyOptions, Runtime};
use std::path::Path;
use std::sync::Arc;

pub(crate) fn run(folder: &Path, args: &parity::Args) -> anyhow::Result<Outcome> {
    let folder = ModelFolder::open(folder)?;
    let adapter = args.adapter.as_ref().map(|path| Adapter::open(path, folder.config())).transpose()?;
    let lora = adapter.as_ref().map(Adapter::config);
    let files = args.files.iter().map(|path| ModelFile::open(path, folder.config(), lora));
    let files = files.collect::<Result<Vec<_>, _>>()?;
    let standard = ModelTolerances::default();
    let tolerances = ModelTolerances {
        logits: args.tolerance.unwrap_or(standard.logits),
        gradient: args.gradient_tolerance.unwrap_or(standard.gradient),
    };
    let Chosen { places, notes } = Chosen::by(args)?;
    let mut reports: Vec<ModelReport> = Vec::new();
    // Policies are opened one after the other, because each has its own copy of the weights.
    for place in &places {
        let mut policy = place.open(&folder, adapter.as_ref())?;
        for (i, file) in files.iter().enumerate() {
            let context = || format!("{} on {}", args.files[i].display(), place.name());
            let report = check(file, policy.as_mut(), &tolerances).with_context(context)?;
            match reports.get_mut(i) {
                Some(earlier) => earlier.rows.extend(report.rows),
                None => reports.push(report),
            }
        }
    }
    let passed = reports.iter().all(ModelReport::passed);
    if args.json {
        let model = folder.path().display().to_string();
        emit_json(&serde_json::json!({ "model": model, "passed": passed, "files": reports, "notes": notes }))?;
    } else {
        emit(&text(&folder, &reports, &notes, passed))?;
    }
    Ok(if passed { Outcome::Done } else { Outcome::CheckFailed })
}

fn text(folder: &ModelFolder, reports: &[ModelReport], notes: &[String], passed: bool) -> String {
    let wrapper = folder.wrapper().map_or_else(String::new, |wrapper| format!(", the text decoder of {wrapper}"));
    let mut out = format!("{} ({}{wrapper})\n\n", folder.path().display(), folder.family());
    for report in reports {
        out.push_str(&format!("{}\n{}\n\n", report.file, parity::table_of("policy", &report.rows)));
    }
    for note in notes {
        out.push_str(&format!("note: {note}\n"));
    }
    let rows: usize = reports.iter().map(|report| report.rows.len()).sum();
    let failed: usize = reports.iter().flat_map(|report| &report.rows).filter(|row| !row.passed).count();
    let verdict = if passed { "PASS" } else { "FAIL" };
    let (files, rows) = (counted(reports.len(), "file"), counted(rows, "comparison"));
    out.push_str(&format!("{verdict}: {files}, {rows}, {failed} out of tolerance\n"));
    out
}

/// The device of a policy.
enum Target {
    /// The burn policy on this CPU.
    Host,
    /// A PJRT device.
    Device(Box<Runtime>),
}

const ALL: &str = "all";
const HOST: &str = "host";

fn name_of(kind: Kind) -> String {
    format!("pjrt:{}", kind.name())
}

/// Returns the parser of `--device`.
pub(crate) fn devices() -> PossibleValuesParser {
    let pjrt_backends = BACKENDS.into_iter().filter(|name| name.starts_with("pjrt:"));
    PossibleValuesParser::new([ALL, HOST].into_iter().chain(pjrt_backends))
}

/// The policies to check, and the reasons why others are skipped.
struct Chosen {
    places: Vec<Target>,
    notes: Vec<String>,
}

impl Chosen {
    /// Opens the devices of the arguments. An unusable device is an error if it was named explicitly; with `all` it becomes a note.
    fn by(args: &parity::Args) -> anyhow::Result<Self> {
        let (name, plugin) = (args.device.as_deref().unwrap_or(ALL), args.input.plugin.as_deref());
        let named = Kind::ALL.into_iter().find(|kind| name_of(*kind) == name);
        let rules = args.mesh.map(|mesh| grpo_planner::default_axis_rules("--mesh", &mesh)).transpose()?;
        let rules = rules.unwrap_or_default();
        let open = |kind| -> Result<Target, grpo_policy::Error> {
            let runtime = Runtime::open_mesh(kind, plugin, rules.clone())?;
            Ok(Target::Device(Box::new(grpo_setup::device::with_cache(runtime, None))))
        };
        if let Some(kind) = named {
            return Ok(Self { places: vec![open(kind)?], notes: vec![] });
        }
        anyhow::ensure!(args.mesh.is_none(), "--mesh is for a --device of PJRT, not for {name}");
        anyhow::ensure!(plugin.is_none(), "--plugin is for the --device of PJRT that it serves, not for {name}");
        let mut chosen = Self { places: vec![Target::Host], notes: vec![] };
        if name == ALL {
            // libtpu needs environment variables, which can only be set safely before another plugin starts threads.
            let mut kinds = Kind::ALL;
            kinds.sort_by_key(|kind| *kind != Kind::Tpu);
            for kind in kinds {
                match open(kind) {
                    Ok(place) => chosen.places.push(place),
                    Err(error) => chosen.notes.push(format!("not checked on {}: {error}", name_of(kind))),
                }
            }
        }
        Ok(chosen)
    }
}

impl Target {
    fn name(&self) -> String {
        match self {
            Self::Host => HOST.into(),
            Self::Device(runtime) => match runtime.axis_rules() {
                rules if rules.is_sharded() => format!("{} on {}", name_of(runtime.kind()), rules.mesh()),
                _ => name_of(runtime.kind()),
            },
        }
    }

    /// Returns the policy with a folder's weights, and with an adapter.
    fn open(&self, folder: &ModelFolder, adapter: Option<&Adapter>) -> anyhow::Result<Box<dyn ModelPolicy>> {
        let (name, weights) = (self.name(), folder.weights()?);
        if let Some(adapter) = adapter {
            adapter.check_base(&weights)?;
        }
        // The supervised loss that is compared here does not depend on the GRPO loss.
        let loss = LossConfig::default();
        Ok(match self {
            Self::Host => {
                let backend = Arc::new(CpuBackend::new());
                let implementation = Implementation::Fused;
                let loss = PolicyLoss { config: loss.into(), backend, implementation, max_tokens: 0 };
                let policy = CpuPolicy::from_weights(folder.config(), &weights, loss)?;
                let policy = if let Some(adapter) = adapter { policy.with_adapter(adapter)? } else { policy };
                Box::new(Compared { name, policy })
            }
            Self::Device(runtime) => {
                // Nothing is updated, so no state is saved for a rollback.
                let options = PjrtPolicyOptions { can_roll_back: false, ..PjrtPolicyOptions::default() };
                let policy = PjrtPolicy::from_weights(runtime, folder.config(), &weights, loss, options)?;
                let policy = if let Some(adapter) = adapter { policy.with_adapter(adapter)? } else { policy };
                Box::new(Compared { name, policy })
            }
        })
    }
}
