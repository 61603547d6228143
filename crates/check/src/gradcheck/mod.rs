//! Gradient checks on the problems of a benchmark: the f64 oracle's gradients against finite differences of its loss, and every
//! variant's gradients against the oracle.
//!
//! Inputs are from [`grpo_bench::inputs`]. Sizes are reduced, because the oracle is dense, in f64, and evaluated twice per
//! entry; layout, bias, dtype, loss and the number of tensors are unchanged.

mod devices;
mod differences;
mod file;
mod problem;
#[cfg(test)]
mod tests;

use crate::error::{Error, Result};
use crate::parity::Row;
use devices::Devices;
pub use file::file;
use grpo_backend_tpu::aot::Variant;
use grpo_bench::config::{BenchConfig, ProgramKind, ShapeConfig};
use grpo_core::{Dtype, PolicySpec};
use problem::Problem;
use serde::Serialize;
use smart_default::SmartDefault;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Largest number of sequences: signs of advantages alternate, so one sign occurs twice.
const MOST_SEQUENCES: usize = 3;

/// Largest sizes of a checked problem.
#[derive(Clone, Copy, Debug, SmartDefault, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Tokens T of each sequence.
    #[default(8)]
    pub tokens: usize,
    /// The hidden size H.
    #[default(16)]
    pub hidden: usize,
    /// Vocabulary entries V.
    #[default(96)]
    pub vocab: usize,
}

/// Selection of variants and sizes.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The largest sizes of a problem.
    pub limits: Limits,
    /// Variants by name; empty means all. A named variant must be checkable.
    pub variants: Vec<String>,
    /// The PJRT plugin; default the one that [`grpo_backend_tpu::plugins::find`] finds.
    pub plugin: Option<PathBuf>,
}

/// The results of one problem of a configuration.
#[derive(Clone, Debug, Serialize)]
pub struct CaseReport {
    /// Name of the problem.
    pub name: String,
    /// The checked sizes.
    pub shape: ShapeConfig,
    /// The sizes of the configuration, if they were reduced.
    pub reduced_from: Option<ShapeConfig>,
    /// Results per dtype of the inputs, with and without a bias, that the variants have.
    pub inputs: Vec<InputsReport>,
    /// Variants that were not checked, with reasons.
    pub not_checked: BTreeMap<String, String>,
    /// Failures other than rows out of tolerance.
    pub failures: Vec<String>,
    /// `true` if every check passed and at least one was made.
    pub passed: bool,
}

/// Checks on the same inputs.
#[derive(Clone, Debug, Serialize)]
pub struct InputsReport {
    /// The dtype of hidden states and head, or of logits.
    pub dtype: Dtype,
    /// `true` if the head has a bias.
    pub bias: bool,
    /// The seed: the first one from the configuration's on whose ratios are clipped on both sides, or the configuration's if the next few have
    /// none.
    pub seed: u64,
    /// The comparisons.
    pub rows: Vec<Row>,
    /// Entries whose step crosses a kink of the loss. Their derivative is taken on the branch of the gradient.
    pub kinks: usize,
    /// Notes about omissions and properties of the inputs.
    pub notes: Vec<String>,
}

/// Checks every problem of `config`. `progress` is called with a line before each stage.
///
/// # Errors
/// [`Error::Bench`] for an illegal configuration; [`Error::Argument`] for an unknown variant or a limit of 0;
/// the errors of the backends, except for features that they do not offer: these are in [`CaseReport::not_checked`].
pub fn run(config: &BenchConfig, options: &Options, mut progress: impl FnMut(&str)) -> Result<Vec<CaseReport>> {
    config.validate()?;
    let Limits { tokens, hidden, vocab } = options.limits;
    for (operation, limit) in [("--max-tokens", tokens), ("--max-hidden", hidden), ("--max-vocab", vocab)] {
        if limit == 0 {
            return Err(Error::argument(operation, "at least 1", 0));
        }
    }
    if let Some(unknown) = options.variants.iter().find(|name| !config.names().contains(&name.as_str())) {
        let expected = format!("one of {}", config.names().join(", "));
        return Err(Error::argument("variants", expected, format!("`{unknown}`")));
    }
    let mut devices = Devices::new(options.plugin.clone());
    config.cases().into_iter().map(|(name, case)| check(name, case, options, &mut devices, &mut progress)).collect()
}

/// Variants with the same inputs, by name.
struct Group {
    dtype: Dtype,
    bias: bool,
    variants: Vec<(String, Variant)>,
}

fn check(
    name: String,
    mut config: BenchConfig,
    options: &Options,
    devices: &mut Devices,
    progress: &mut impl FnMut(&str),
) -> Result<CaseReport> {
    let full_shape = config.shape;
    config.shape = reduced(full_shape, options.limits);
    let mut report = CaseReport {
        name,
        shape: config.shape,
        reduced_from: (config.shape != full_shape).then_some(full_shape),
        inputs: vec![],
        not_checked: BTreeMap::new(),
        failures: vec![],
        passed: false,
    };
    let is_chosen = |name: &String| options.variants.is_empty() || options.variants.contains(name);
    let variants = config.variants.clone().unwrap_or_default();
    let mut groups: Vec<Group> = vec![];
    for (name, settings) in variants.iter().filter(|(name, _)| is_chosen(name)) {
        let variant = config.variant(name)?;
        let why = match settings.pass {
            _ if settings.command.is_some() => "an external program: it returns no gradients",
            ProgramKind::Materialised => "pass: materialised is a baseline whose gradients are not compared",
            ProgramKind::Bare => "pass: bare has no loss",
            ProgramKind::Score | ProgramKind::Gradient | ProgramKind::GradientInPlace => {
                let policy = variant.request.policy;
                let (dtype, bias) = (policy.dtype(), matches!(policy, PolicySpec::Hidden { bias: true, .. }));
                match groups.iter_mut().find(|group| (group.dtype, group.bias) == (dtype, bias)) {
                    Some(group) => group.variants.push((name.clone(), variant)),
                    None => groups.push(Group { dtype, bias, variants: vec![(name.clone(), variant)] }),
                }
                continue;
            }
        };
        report.not_checked.insert(name.clone(), why.into());
    }
    for Group { dtype, bias, variants: group } in groups {
        progress(&format!("{}: the oracle in f64, {} inputs", report.name, dtype.name()));
        let problem = Problem::draw(&BenchConfig { dtype, ..config.clone() }, bias)?;
        report.failures.extend(problem.zero_gradients());
        progress(&format!("{}: differences of the oracle's loss, two evaluations an entry", report.name));
        let verdict = problem.differences(&problem.oracle.values)?;
        let mut inputs = InputsReport {
            dtype,
            bias,
            seed: problem.seed(),
            rows: verdict.rows,
            kinks: verdict.kinks,
            notes: problem.notes()?,
        };
        inputs.notes.extend(verdict.notes);
        for (name, variant) in group {
            progress(&format!("{}: {name}", report.name));
            let opened = devices.open(&config, &name, &variants[&name], &variant);
            match opened.and_then(|backend| problem.implementation(&name, &variant, backend.as_ref())) {
                Ok(rows) => inputs.rows.extend(rows),
                Err(Error::Loss(error @ grpo_core::Error::Unsupported { .. })) => {
                    report.not_checked.insert(name, error.to_string());
                }
                Err(error) => {
                    return Err(Error::Variant { name, problem: report.name, source: Box::new(error) });
                }
            }
        }
        report.inputs.push(inputs);
    }
    conclude(&mut report, &options.variants);
    Ok(report)
}

/// Adds failures other than rows, and the verdict.
fn conclude(report: &mut CaseReport, named: &[String]) {
    let rows = || report.inputs.iter().flat_map(|inputs| &inputs.rows);
    if rows().all(|row| row.against != "oracle") {
        let instead = "name a backend that offers one (`--set backend=...`), or add one (`--set variants.plain={}`)";
        report.failures.push(format!("no variant was checked: {instead}"));
    }
    for name in named.iter().filter(|name| report.not_checked.contains_key(*name)) {
        report.failures.push(format!("`{name}` was requested and could not be checked"));
    }
    report.passed = report.failures.is_empty() && rows().all(|row| row.passed);
}

fn reduced(shape: ShapeConfig, limits: Limits) -> ShapeConfig {
    ShapeConfig {
        batch: shape.batch.min(MOST_SEQUENCES),
        tokens: shape.tokens.min(limits.tokens),
        hidden: shape.hidden.map(|hidden| hidden.min(limits.hidden)),
        vocab: shape.vocab.min(limits.vocab),
    }
}
