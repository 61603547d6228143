//! Checks of an implementation of the loss on batch files: against the file's expected results, and against the f64 oracle.

use crate::error::{Error, Result};
use grpo_backend_cpu::oracle;
use grpo_core::format::BatchLoss;
use grpo_core::parity::{Comparison, Tolerances, Values};
use grpo_core::{
    Backend, BatchFile, Dtype, GradientSpec, Grads, Implementation, LossConfig, LossOutput, LossPlan, Metrics,
    PlanRequest, PolicyInput, PolicyOutput, Tensor, TensorMut, Tiling, TokenBatch,
};
use serde::Serialize;
use smart_default::SmartDefault;

/// The results of one evaluation.
#[derive(Clone, Debug)]
pub struct Evaluated {
    /// Loss, values per token and gradients, in f64.
    pub values: Values,
    /// Metrics under TRL's names.
    pub metrics: Metrics,
    /// Sum of |weight x token loss|; only the oracle computes it.
    pub magnitude: Option<f64>,
}

/// Evaluates `loss` on the batch of `file` with an implementation; `policy` is the file's own, or a rounded copy of
/// it.
///
/// # Errors
/// The errors of [`Backend::plan`], of the plan's call, and of [`grpo_core::LossOutput::check_finite`], for a policy that is not
/// finite at an active token.
pub fn evaluate(
    backend: &dyn Backend,
    implementation: Implementation,
    loss: &LossConfig,
    file: &BatchFile,
    policy: &PolicyOutput<Tensor>,
) -> Result<Evaluated> {
    let request = PlanRequest {
        loss: loss.clone().into(),
        implementation,
        tiling: Tiling::default(),
        max_tokens: file.batch.tokens(),
        policy: policy.spec(file.hidden, file.vocab),
        gradients: GradientSpec { hidden: true, lm_head: true, bias: policy.has_bias() },
    };
    call(backend.plan(&request)?.as_mut(), &request, policy.as_input(), &file.batch)
}

/// Calls `plan`, which was made for `request`, and returns the loss and the requested gradients.
///
/// # Errors
/// The errors of [`LossPlan::value_and_grad`].
pub(crate) fn call(
    plan: &mut dyn LossPlan,
    request: &PlanRequest,
    policy: PolicyInput<'_>,
    batch: &TokenBatch,
) -> Result<Evaluated> {
    let mut grads = Grads::zeros(request.policy, request.gradients, batch.tokens())?;
    let mut evaluated = evaluated(plan.value_and_grad(policy, batch, grads.as_mut())?, batch)?;
    let values = &mut evaluated.values;
    values.grad_hidden = grads.hidden.as_deref().map(widen);
    values.grad_lm_head = grads.lm_head.as_deref().map(widen);
    values.grad_bias = grads.bias.as_deref().map(widen);
    values.grad_logits = grads.logits.as_deref().map(widen);
    Ok(evaluated)
}

/// Calls `plan` like [`call`], for logits that are overwritten with their gradient.
///
/// # Errors
/// The errors of [`LossPlan::value_and_grad_in_place`].
pub(crate) fn call_in_place(plan: &mut dyn LossPlan, logits: TensorMut<'_>, batch: &TokenBatch) -> Result<Evaluated> {
    evaluated(plan.value_and_grad_in_place(logits, batch)?, batch)
}

/// Converts the output of a call, without gradients.
fn evaluated(output: LossOutput, batch: &TokenBatch) -> Result<Evaluated> {
    output.check_finite(batch)?;
    let values = Values {
        loss: Some(output.loss),
        logp: Some(widen(&output.scores.logp)),
        entropy: Some(widen(&output.scores.entropy)),
        ..Values::default()
    };
    Ok(Evaluated { values, metrics: output.metrics, magnitude: None })
}

/// Evaluates `loss` densely in f64.
///
/// # Errors
/// The errors of [`oracle::evaluate`].
pub fn oracle(loss: &LossConfig, file: &BatchFile, policy: &PolicyOutput<Tensor>) -> Result<Evaluated> {
    let wide = policy.as_ref().map(widened);
    let policy = oracle::Policy {
        output: wide.as_ref().map(Vec::as_slice),
        vocab: file.vocab,
        layout: grpo_core::HeadLayout::VocabHidden,
    };
    oracle_at(loss, &policy, &file.batch)
}

/// Evaluates the loss like [`oracle`], for a policy in f64.
///
/// # Errors
/// The errors of [`oracle::evaluate`].
pub(crate) fn oracle_at(loss: &LossConfig, policy: &oracle::Policy<'_, f64>, batch: &TokenBatch) -> Result<Evaluated> {
    let is_hidden = matches!(policy.output, PolicyOutput::Hidden { .. });
    let result = oracle::evaluate(loss, policy, batch)?;
    let some = |is_present: bool, values: Vec<f64>| is_present.then_some(values);
    let values = Values {
        loss: Some(result.loss),
        logp: Some(result.logp),
        entropy: Some(result.entropy),
        grad_bias: some(!result.grad_bias.is_empty(), result.grad_bias),
        grad_hidden: some(is_hidden, result.grad_hidden),
        grad_lm_head: some(is_hidden, result.grad_lm_head),
        // Present also for hidden states: no implementation returns this gradient, but a file may expect it.
        grad_logits: Some(result.grad_logits),
    };
    Ok(Evaluated { values, metrics: result.metrics, magnitude: Some(result.magnitude) })
}

pub(crate) fn widened(tensor: &Tensor) -> Vec<f64> {
    match tensor {
        Tensor::F32(v) => widen(v),
        Tensor::Bf16(v) => v.iter().map(|x| x.to_f64()).collect(),
    }
}

pub(crate) fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().map(|v| f64::from(*v)).collect()
}

/// Returns `true` if two roundings of one policy have equal values. NaN, which masked positions may hold, equals NaN.
fn same_values(a: &PolicyOutput<Tensor>, b: &PolicyOutput<Tensor>) -> bool {
    let tensors =
        |policy: &PolicyOutput<Tensor>| policy.tensors().map(|(_, tensor)| widened(tensor)).collect::<Vec<_>>();
    let same = |(a, b): (&f64, &f64)| a == b || (a.is_nan() && b.is_nan());
    tensors(a).iter().flatten().zip(tensors(b).iter().flatten()).all(same)
}

/// Options of a check.
#[derive(Clone, Debug, SmartDefault)]
pub struct Check {
    /// The implementations to evaluate.
    #[default(Implementation::ALL.to_vec())]
    pub implementations: Vec<Implementation>,
    /// Skip implementations that do not support the file's policy (logits have no head to fuse) instead of failing.
    #[default(true)]
    pub skip_unsupported: bool,
    /// Round hidden states and head (or logits) to this dtype first; `None` keeps the file's dtype.
    pub dtype: Option<Dtype>,
    /// Replaces the file's loss; `expected.*` belongs to the file's loss and is not compared then.
    pub loss: Option<BatchLoss>,
    /// Replaces the tolerances of the dtype.
    pub tolerances: Option<Tolerances>,
}

/// The comparisons of one file.
#[derive(Clone, Debug, Serialize)]
pub struct FileReport {
    /// Name of the file, as given by the caller.
    pub file: String,
    /// Dtype of the evaluated policy.
    pub dtype: Dtype,
    /// The comparisons.
    pub rows: Vec<Row>,
    /// Comparisons that were omitted, with reasons.
    pub notes: Vec<String>,
}

impl FileReport {
    /// Returns `true` if all comparisons are within tolerance and there is at least one.
    pub fn passed(&self) -> bool {
        !self.rows.is_empty() && self.rows.iter().all(|row| row.comparison.passed())
    }
}

/// The comparison of one tensor of one implementation with one reference.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// `reference`, `logits`, `fused`, the name of a configuration's variant, or `oracle` for the oracle itself.
    pub implementation: String,
    /// `expected` (from the file), `oracle` (f64, dense) or `differences` (of the oracle's loss).
    pub against: &'static str,
    /// The numbers of the comparison.
    #[serde(flatten)]
    pub comparison: Comparison,
    /// `true` if the numbers are within tolerance.
    pub passed: bool,
}

impl Row {
    pub(crate) fn new(implementation: &str, against: &'static str, comparison: Comparison) -> Self {
        Self { implementation: implementation.to_owned(), against, passed: comparison.passed(), comparison }
    }
}

/// Checks one file.
///
/// Every implementation is compared with the f64 oracle on the same rounded inputs, and with the file's `expected.*`
/// if loss and inputs are the file's; the oracle is compared with `expected.*` too.
///
/// # Errors
/// [`grpo_core::Error::Unsupported`] for an implementation that does not support the file's policy (unless skipped), and
/// the errors of [`evaluate`].
pub fn check(backend: &dyn Backend, name: &str, file: &BatchFile, check: &Check) -> Result<FileReport> {
    let dtype = check.dtype.unwrap_or(file.policy_spec().dtype());
    let policy = file.policy.to_dtype(dtype);
    let replaced = check.loss.as_ref().filter(|loss| **loss != file.batch_loss());
    let same_loss = replaced.is_none();
    let with_loss;
    let file = match replaced {
        Some(loss) => {
            with_loss = file.clone().with_loss(loss.clone())?;
            &with_loss
        }
        None => file,
    };
    let loss = &file.loss;
    let tolerances = check.tolerances.unwrap_or(Tolerances::of(dtype).with_dlogits(backend.dlogits(dtype)));
    let mut report = FileReport { file: name.to_owned(), dtype, rows: Vec::new(), notes: Vec::new() };

    let exact = dtype == file.policy_spec().dtype() || same_values(&policy, &file.policy);
    if file.expected == Values::default() {
        report.notes.push("the file has no expected.*: compared with the oracle only".into());
    } else if !same_loss {
        report.notes.push("expected.* is of the file's own loss: compared with the oracle only".into());
    } else if !exact {
        let note = format!("rounding to {} changes the inputs, so expected.* no longer applies", dtype.name());
        report.notes.push(note);
    }
    let expected = (same_loss && exact).then_some(&file.expected);
    let Evaluated { values: oracle, magnitude, .. } = oracle(loss, file, &policy)?;
    let magnitude = magnitude.unwrap_or_default();
    let active = file.batch.active_rows();
    let add = |report: &mut FileReport, implementation, against, truth: &Values, found: &Values| {
        let comparisons = truth.compare(found, active, magnitude, &tolerances);
        report.rows.extend(comparisons.into_iter().map(|comparison| Row::new(implementation, against, comparison)));
    };
    if let Some(expected) = expected {
        add(&mut report, "oracle", "expected", expected, &oracle);
    }
    for implementation in &check.implementations {
        let found = match evaluate(backend, *implementation, loss, file, &policy) {
            Ok(evaluated) => evaluated.values,
            Err(Error::Loss(error @ grpo_core::Error::Unsupported { .. })) if check.skip_unsupported => {
                report.notes.push(format!("{} was not evaluated: {error}", implementation.name()));
                continue;
            }
            Err(error) => return Err(error),
        };
        if let Some(expected) = expected {
            add(&mut report, implementation.name(), "expected", expected, &found);
        }
        add(&mut report, implementation.name(), "oracle", &oracle, &found);
    }
    Ok(report)
}
