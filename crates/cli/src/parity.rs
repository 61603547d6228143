//! `grpo parity`: compares an implementation of the loss with batch files and the f64 oracle, or a decoder with transformers' results.

use crate::output::{Outcome, emit, emit_json};
use crate::{loss_input::LossInput, table::Sheet};
use anyhow::Context;
use grpo_check::parity::{self, Check, FileReport, Row};
use grpo_core::Implementation;
use grpo_core::parity::Tolerances;
use grpo_files::counted;
use grpo_run_config::MeshConfig;
use std::path::PathBuf;

/// Arguments of `grpo parity`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Batch files (grpo-batch/1: safetensors with hidden and lm_head, or logits). With --model, files of grpo-model/1: `ids` and
    /// `mask` [B, T], and any of `expected.loss`, `expected.logits` [B, T, V] and `expected.grad.NAME`.
    #[arg(required = true, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    /// Check the decoder of this Hugging Face folder on every policy, instead of the loss: logits (whole and with a cache), loss and
    /// gradients against transformers' results in the files.
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["backend", "dtype", "config", "implementation"])]
    pub(crate) model: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) input: LossInput,
    /// With --model: the policy to check. `host` needs no plugin; `all` is `host` and every device whose plugin opens one, and names the
    /// others with the reason [default: all].
    #[arg(long, value_name = "DEVICE", requires = "model", value_parser = crate::parity_model::devices())]
    pub(crate) device: Option<String>,
    /// With --model and a --device of PJRT: the number of devices along the axes data, fsdp and tensor of a mesh.
    #[arg(long, value_name = "fsdp=4,tensor=2", requires = "device")]
    pub(crate) mesh: Option<MeshConfig>,
    /// Implementation to check.
    #[arg(long, value_parser = crate::loss_input::implementations(&["all"]), default_value = "all")]
    implementation: String,
    /// With --model: add the adapter (LoRA, in PEFT's layout) of this folder to the model; gradients are then the adapter's.
    #[arg(long, value_name = "FOLDER", requires = "model")]
    pub(crate) adapter: Option<PathBuf>,
    /// Tolerance of loss, logp and entropy, relative to their scale (at least 1), instead of the dtype's. With --model: of loss and logits,
    /// absolute and relative to the largest logit [default there: 1e-4].
    #[arg(long, value_name = "X", value_parser = bound)]
    pub(crate) tolerance: Option<f64>,
    /// Tolerance of gradients, relative to their largest entry, instead of the dtype's [default with --model: 1e-4].
    #[arg(long, value_name = "X", value_parser = bound)]
    pub(crate) gradient_tolerance: Option<f64>,
    /// Print one JSON document instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Parses a tolerance, a finite number of at least 0.
fn bound(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(bound) if bound.is_finite() && bound >= 0.0 => Ok(bound),
        _ => Err("expected a finite number, not negative".into()),
    }
}

pub(crate) fn run(args: Args) -> anyhow::Result<Outcome> {
    if let Some(folder) = &args.model {
        return crate::parity_model::run(folder, &args);
    }
    let backend = args.input.open()?;
    let implementations = match Implementation::from_name(&args.implementation) {
        Some(one) => vec![one],
        None => Implementation::ALL.to_vec(),
    };
    let loss = args.input.loss()?;
    let mut reports = Vec::with_capacity(args.files.len());
    for path in &args.files {
        let file = crate::loss_input::read(path)?;
        let dtype = args.input.dtype;
        let of = dtype.unwrap_or(file.policy_spec().dtype());
        let mut tolerances = Tolerances::of(of).with_dlogits(backend.dlogits(of));
        if let Some(bound) = args.tolerance {
            (tolerances.loss, tolerances.logp, tolerances.entropy) = (bound, bound, bound);
        }
        tolerances.gradient = args.gradient_tolerance.unwrap_or(tolerances.gradient);
        let check = Check {
            skip_unsupported: implementations.len() > 1,
            implementations: implementations.clone(),
            dtype,
            loss: loss.clone(),
            tolerances: Some(tolerances),
        };
        let name = path.display().to_string();
        let report = parity::check(backend.as_ref(), &name, &file, &check).with_context(|| name.clone())?;
        reports.push(report);
    }
    let passed = reports.iter().all(FileReport::passed);
    if args.json {
        emit_json(&serde_json::json!({ "backend": backend.name(), "passed": passed, "files": reports }))?;
    } else {
        emit(&text(&reports, passed))?;
    }
    Ok(if passed { Outcome::Done } else { Outcome::CheckFailed })
}

fn text(reports: &[FileReport], passed: bool) -> String {
    let mut out = String::new();
    for report in reports {
        let table = table(&report.rows);
        out.push_str(&format!("{} ({})\n{table}\n", report.file, report.dtype.name()));
        for note in &report.notes {
            out.push_str(&format!("note: {note}\n"));
        }
        out.push('\n');
    }
    let rows: usize = reports.iter().map(|r| r.rows.len()).sum();
    let failed: usize = reports.iter().flat_map(|r| &r.rows).filter(|row| !row.passed).count();
    let empty = reports.iter().filter(|r| r.rows.is_empty()).count();
    let empty = match empty {
        0 => String::new(),
        _ => format!(", {} in which nothing could be compared", counted(empty, "file")),
    };
    out.push_str(&format!(
        "{}: {}, {}, {failed} out of tolerance{empty}\n",
        if passed { "PASS" } else { "FAIL" },
        counted(reports.len(), "file"),
        counted(rows, "comparison"),
    ));
    out
}

/// Formats comparisons, one per line.
pub(super) fn table(rows: &[Row]) -> String {
    table_of("implementation", rows)
}

/// Like [`table`], with `computed_by` as the heading of the first column.
pub(super) fn table_of(computed_by: &str, rows: &[Row]) -> String {
    let header = [computed_by, "against", "tensor", "max abs", "max rel", "tolerance", ""];
    let mut table = Sheet::new(header, 3..6);
    for row in rows {
        let c = &row.comparison;
        let verdict = if row.passed {
            "ok".to_owned()
        } else {
            format!("FAIL at {}: expected {:.9e}, got {:.9e}", c.at, c.expected, c.found)
        };
        table.row([
            row.implementation.clone(),
            row.against.to_owned(),
            c.name.clone(),
            format!("{:.2e}", c.max_abs),
            format!("{:.2e}", c.max_rel),
            format!("{:.0e}", c.tolerance),
            verdict,
        ]);
    }
    table.text()
}
