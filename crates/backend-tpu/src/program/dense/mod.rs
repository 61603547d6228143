//! The dense loss, `reference` in configurations: one tile as large as the problem. Holds the `[N, V]` logits and their
//! gradient.
//!
//! Legend: N tokens and V vocabulary entries of one device, G tokens of all devices with padding.

use super::frame::{Frame, accumulate, pinned};
use super::kind::Pass;
use super::mesh::MeshCoord;
use super::role::Role;
use super::softmax::{Columns, Tile};
use super::spec::{Spec, dtype};
use super::transform::Transform;
use grpo_core::error::Result;
use stablehlo::{Dtype, Reducer, Value};

/// Computes the results of `pass` from the arguments in `frame`, with statistics and gradient of the logits in plain
/// operations.
pub(super) fn results(spec: &Spec, frame: &Frame, pass: Pass) -> Result<Vec<(Role, Value)>> {
    build(spec, frame, pass, None, |logits| {
        let DenseLogits { values, targets, first_column, scale } = logits;
        let end = values.builder().scalar(spec.policy.vocab() as i64, Dtype::I32);
        let limits = spec.pads_vocab().then_some((first_column, &end));
        Ok(Box::new(Tile::new(values, Transform::new(&spec.loss), targets, first_column, limits, scale)))
    })
}

/// The logits of a dense program, with the inputs of their statistics and gradient.
pub(super) struct DenseLogits<'a> {
    /// The logits `[N, V]`, in the dtype in which they are stored.
    pub(super) values: &'a Value,
    /// Targets in the whole vocabulary, i32 `[N]`; -1 at masked tokens.
    pub(super) targets: &'a Value,
    /// The index of this device's first column, an i32 scalar.
    pub(super) first_column: &'a Value,
    /// The factor of the transformed logits, `[N]`.
    pub(super) scale: &'a Value,
}

/// Computes the results of `pass` from the arguments in `frame`. The gradient with respect to precomputed logits is
/// added to its own buffer, or replaces the logits. `columns` computes statistics and gradient of the logits.
/// `fixed_scale` replaces the factor of the tokens' temperatures.
pub(super) fn build(
    spec: &Spec,
    frame: &Frame,
    pass: Pass,
    fixed_scale: Option<f32>,
    columns: impl FnOnce(DenseLogits<'_>) -> Result<Box<dyn Columns>>,
) -> Result<Vec<(Role, Value)>> {
    let f = &frame.f;
    let (n, g) = (spec.local_tokens(), spec.padded_tokens());
    let coord = MeshCoord::new(f, spec.mesh);
    let tables = frame.tables();
    let (tokens, sequences) = (tables.local(&coord, n), tables.ids.slice(&[1, 0], &[2, g]).reshape(&[g]));
    let active = tokens.active();
    let mut factors = tokens.factors(&spec.loss);
    if let Some(scale) = fixed_scale {
        factors.logits = factors.logits.like(f64::from(scale));
    }
    let scale = &factors.logits;

    let head = frame.head(spec);
    let logits = match &head {
        None => frame.argument(Role::Logits),
        Some((hidden, head)) => pinned(spec, head.logits(spec, hidden)),
    };

    let first_column = &coord.first_column(spec.local_vocab());
    let columns = columns(DenseLogits { values: &logits, targets: &tokens.target, first_column, scale })?;
    let statistics = columns.statistics(spec.numerics.entropy).over_vocab(&coord, scale);
    let row = statistics.row(scale);
    let zero = row.logp.like(0.0);
    let logp = active.select(&(&row.logp * &factors.logp), &zero);
    let entropy = row.entropy.as_ref().map_or(zero.clone(), |e| active.select(e, &zero));
    if pass == Pass::Score {
        return Ok(vec![(Role::Logp, logp), (Role::Entropy, entropy)]);
    }

    let known = spec.numerics.entropy.then_some(&entropy);
    let (terms, dlogp) = tokens.loss(&spec.loss, &logp, known, |v| tokens.sequence_sum(&coord, &sequences, v));
    let sums = tokens.sums(&coord, &sequences, terms);
    let dentropy = (spec.loss.entropy_coef != 0.0).then(|| tokens.dentropy());
    let row_grad = statistics.row_grad(&row, &factors, &dlogp, dentropy.as_ref());
    let dlogits = columns.gradient(&row_grad, &active);

    let mut results = vec![(Role::Sums, sums), (Role::Logp, logp), (Role::Entropy, entropy)];
    if pass == Pass::GradientInPlace {
        results.push((Role::Logits, dlogits.convert(logits.dtype())));
    }
    for role in spec.accumulators(pass) {
        let sum = frame.argument(role);
        let gradient = match (role, &head) {
            (Role::GradHidden, Some((_, head))) => {
                coord.over_vocab(&head.hidden_gradient(&dlogits.convert(dtype(spec.numerics.dlogits))), Reducer::Add)
            }
            (Role::GradLmHead, Some((hidden, head))) => {
                let dlogits = dlogits.convert(dtype(spec.numerics.dlogits));
                coord.over_data(&head.weight_gradient(&dlogits, &tokens.clean(hidden)), Reducer::Add)
            }
            (Role::GradBias, _) => {
                coord.over_data(&dlogits.convert(Dtype::F32).reduce(Reducer::Add, &[0]), Reducer::Add)
            }
            _ => dlogits.convert(Dtype::F32),
        };
        results.push((role, accumulate(&sum, &gradient)));
    }
    Ok(results)
}
