//! `grpo parity --model`: the decoder of a Hugging Face folder against what `transformers` computes.

mod compared;
mod device;
mod host;

use self::compared::Compared;
use crate::{Outcome, emit, emit_document, parity};
use anyhow::Context;
use backend_tpu::plugins::Kind;
use clap::builder::PossibleValuesParser;
use grpo_check::model::{ModelFile, ModelPolicy, ModelReport, ModelTolerances, check};
use grpo_files::counted;
use models::{Adapter, ModelFolder};
use policy_device::Runtime;
use std::path::Path;
use trainer::backends;

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
    // One policy at a time: each has the weights in its own way.
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
        let document = serde_json::json!({ "model": model, "passed": passed, "files": reports, "notes": notes });
        emit_document(&format!("{}\n", serde_json::to_string_pretty(&document)?))?;
    } else {
        emit(&text(&folder, &reports, &notes, passed))?;
    }
    Ok(if passed { Outcome::Done } else { Outcome::CheckFailed })
}

fn text(folder: &ModelFolder, reports: &[ModelReport], notes: &[String], passed: bool) -> String {
    let mut out = format!("{} ({})\n\n", folder.path().display(), folder.family());
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

/// Where a policy computes.
enum Place {
    /// This CPU, in burn.
    Host,
    /// A device of PJRT.
    Device(Runtime),
}

const ALL: &str = "all";
const HOST: &str = "host";

fn name_of(kind: Kind) -> String {
    format!("pjrt:{}", kind.name())
}

/// The values of `--device`.
pub(crate) fn devices() -> PossibleValuesParser {
    let of_pjrt = backends::NAMES.into_iter().filter(|name| name.starts_with("pjrt:"));
    PossibleValuesParser::new([ALL, HOST].into_iter().chain(of_pjrt))
}

/// The policies that are checked, and why others are not.
struct Chosen {
    places: Vec<Place>,
    notes: Vec<String>,
}

impl Chosen {
    /// Those that the arguments name. A device that is asked for by its name and cannot be used is an error; one of `all` is left out with
    /// a note.
    fn by(args: &parity::Args) -> anyhow::Result<Self> {
        let (name, plugin) = (args.device.as_deref().unwrap_or(ALL), args.input.plugin.as_deref());
        let named = Kind::ALL.into_iter().find(|kind| name_of(*kind) == name);
        let open = |kind| -> trainer::Result<Place> { Ok(Place::Device(backends::device(kind, plugin, None)?)) };
        if let Some(kind) = named {
            return Ok(Self { places: vec![open(kind)?], notes: vec![] });
        }
        anyhow::ensure!(plugin.is_none(), "--plugin is for the --device of PJRT that it serves, not for {name}");
        let mut chosen = Self { places: vec![Place::Host], notes: vec![] };
        if name == ALL {
            // libtpu wants variables in the environment, which can be set before another plugin has made threads.
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

impl Place {
    fn name(&self) -> String {
        match self {
            Self::Host => HOST.into(),
            Self::Device(runtime) => name_of(runtime.kind()),
        }
    }

    /// The policy of a folder's weights, and of an adapter.
    fn open(&self, folder: &ModelFolder, adapter: Option<&Adapter>) -> anyhow::Result<Box<dyn ModelPolicy>> {
        let name = self.name();
        Ok(match self {
            Self::Host => Box::new(Compared { name, policy: host::open(folder, adapter)? }),
            Self::Device(runtime) => Box::new(Compared { name, policy: device::open(runtime, folder, adapter)? }),
        })
    }
}
