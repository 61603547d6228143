//! Checking gradients on the problems of a benchmark: the f64 oracle's against differences of its loss, and those of every
//! variant against the oracle.
//!
//! Inputs are those of [`grpo_bench::inputs`]. Sizes are reduced, as everything is dense, in f64, and evaluated twice per
//! entry; layout, bias, dtype, loss and the number of tensors stay.

mod devices;
mod differences;
mod file;
mod problem;
#[cfg(test)]
mod tests;

use crate::error::{Error, Result};
use crate::parity::Row;
use backend_tpu::aot::Variant;
use backend_tpu::program::ProgramKind;
use devices::Devices;
pub use file::file;
use grpo_bench::config::{BenchConfig, ShapeConfig};
use grpo_core::{Dtype, PolicySpec};
use problem::Problem;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Most sequences: signs of advantages alternate, and one of them comes twice.
const MOST_SEQUENCES: usize = 3;

/// Largest sizes that a problem keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Tokens T of each sequence.
    pub tokens: usize,
    /// The hidden size H.
    pub hidden: usize,
    /// Vocabulary entries V.
    pub vocab: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { tokens: 8, hidden: 16, vocab: 96 }
    }
}

/// The variants that are checked, and the sizes that they are checked at.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The largest sizes that a problem keeps.
    pub limits: Limits,
    /// Variants by name; none: all of them. One that is named has to be checked.
    pub variants: Vec<String>,
    /// The PJRT plugin, instead of the one that [`backend_tpu::plugins::find`] finds.
    pub plugin: Option<PathBuf>,
}

/// One problem of a configuration.
#[derive(Clone, Debug, Serialize)]
pub struct CaseReport {
    /// The name of the problem.
    pub name: String,
    /// Sizes that were checked.
    pub shape: ShapeConfig,
    /// Sizes that the configuration has, where they are larger.
    pub reduced_from: Option<ShapeConfig>,
    /// One for every dtype of inputs, with and without a bias, that its variants have.
    pub inputs: Vec<InputsReport>,
    /// Variants that were not, and why.
    pub not_checked: BTreeMap<String, String>,
    /// What failed beside rows that are out of tolerance.
    pub failures: Vec<String>,
    /// Whether everything holds, and anything was checked.
    pub passed: bool,
}

/// What was checked on the same inputs.
#[derive(Clone, Debug, Serialize)]
pub struct InputsReport {
    /// The dtype of hidden states and head, or of logits.
    pub dtype: Dtype,
    /// Whether the head has a bias.
    pub bias: bool,
    /// The first from the configuration's on of which ratios are clipped on both sides, where there is one nearby.
    pub seed: u64,
    /// The comparisons that were made.
    pub rows: Vec<Row>,
    /// Entries whose step crosses a kink of the loss, where the derivative is that of the branch the gradient belongs to.
    pub kinks: usize,
    /// What was left out, and what the inputs are like.
    pub notes: Vec<String>,
}

/// Checks every problem of `config`. `progress` is called with a line about what comes next.
///
/// # Errors
/// [`Error::Bench`] for a configuration that is not legal; [`Error::Argument`] for a variant that it lacks or a limit of 0;
/// those of the backends, but for what they do not offer: those are in [`CaseReport::not_checked`].
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

/// Variants on the same inputs, by name.
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
    let asked = config.shape;
    config.shape = reduced(asked, options.limits);
    let mut report = CaseReport {
        name,
        shape: config.shape,
        reduced_from: (config.shape != asked).then_some(asked),
        inputs: vec![],
        not_checked: BTreeMap::new(),
        failures: vec![],
        passed: false,
    };
    let is_wanted = |name: &String| options.variants.is_empty() || options.variants.contains(name);
    let variants = config.variants.clone().unwrap_or_default();
    let mut groups: Vec<Group> = vec![];
    for (name, settings) in variants.iter().filter(|(name, _)| is_wanted(name)) {
        let variant = config.variant(name)?;
        let why = match variant.program {
            _ if settings.command.is_some() => "somebody else's program: it hands no gradients back",
            ProgramKind::Materialised => "pass: materialised is a baseline: its gradients are nobody's",
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
        let mut of_inputs = InputsReport {
            dtype,
            bias,
            seed: problem.seed(),
            rows: verdict.rows,
            kinks: verdict.kinks,
            notes: problem.notes()?,
        };
        of_inputs.notes.extend(verdict.notes);
        for (name, variant) in group {
            progress(&format!("{}: {name}", report.name));
            let opened = devices.open(&config, &name, &variants[&name], &variant);
            match opened.and_then(|backend| problem.implementation(&name, &variant, backend.as_ref())) {
                Ok(rows) => of_inputs.rows.extend(rows),
                Err(Error::Loss(error @ grpo_core::Error::Unsupported { .. })) => {
                    report.not_checked.insert(name, error.to_string());
                }
                Err(error) => {
                    return Err(Error::Variant { name, problem: report.name, source: Box::new(error) });
                }
            }
        }
        report.inputs.push(of_inputs);
    }
    conclude(&mut report, &options.variants);
    Ok(report)
}

/// Adds what failed beside rows, and whether all is well.
fn conclude(report: &mut CaseReport, named: &[String]) {
    let rows = || report.inputs.iter().flat_map(|inputs| &inputs.rows);
    if rows().all(|row| row.against != "oracle") {
        let instead = "name a backend that offers one (`--set backend=...`), or add one (`--set variants.plain={}`)";
        report.failures.push(format!("no variant was checked: {instead}"));
    }
    for name in named.iter().filter(|name| report.not_checked.contains_key(*name)) {
        report.failures.push(format!("`{name}` was asked for, and not checked"));
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
