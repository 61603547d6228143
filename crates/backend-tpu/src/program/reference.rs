//! The dense loss: one tile as large as the problem. Holds `[N, V]` logits and their gradient.

use super::head::{Columns, Tile};
use super::kernels::{self, Kernels};
use super::mesh::Position;
use super::transform::Transform;
use super::{Frame, Pass, Program, Role, Spec, accumulate, dtype, pinned};
use grpo_core::error::Result;
use stablehlo::{Dtype, Reducer};

pub(super) fn program(spec: &Spec, pass: Pass) -> Result<Program> {
    dense(spec, pass)
}

/// The dense program, whose gradient by given logits is added to a buffer of its own or takes their place.
pub(super) fn dense(spec: &Spec, pass: Pass) -> Result<Program> {
    let frame = Frame::new(spec, pass);
    let f = &frame.f;
    let (n, g) = (spec.local_tokens(), spec.padded_tokens());
    let position = Position::new(f, spec.mesh);
    let tables = frame.tables();
    let (tokens, sequences) = (tables.local(&position, n), tables.ids.slice(&[1, 0], &[2, g]).reshape(&[g]));
    let active = tokens.active();
    let mut factors = tokens.factors(&spec.loss);
    if spec.mosaic.is_some() {
        factors.logits = factors.logits.like(f64::from(kernels::scale(spec)));
    }
    let scale = &factors.logits;

    let head = frame.head(spec);
    let logits = match &head {
        None => frame.argument(Role::Logits),
        Some((hidden, head)) => pinned(spec, head.logits(spec, hidden)),
    };

    let first = position.first_column(spec.local_vocab());
    let columns: Box<dyn Columns> = match spec.mosaic {
        Some(blocks) => Box::new(Kernels::new(spec, blocks, &logits, &tokens.target, &first)?),
        None => {
            let end = f.scalar(spec.policy.vocab() as i64, Dtype::I32);
            let limits = spec.pads_vocab().then_some((&first, &end));
            Box::new(Tile::new(&logits, Transform::new(&spec.loss), &tokens.target, &first, limits, scale))
        }
    };
    let statistics = columns.statistics(spec.numerics.entropy).over_vocab(&position, scale);
    let row = statistics.row(scale);
    let zero = row.logp.like(0.0);
    let logp = active.select(&(&row.logp * &factors.logp), &zero);
    let entropy = row.entropy.as_ref().map_or(zero.clone(), |e| active.select(e, &zero));
    if pass == Pass::Score {
        return frame.finish("dense", spec, &[(Role::Logp, logp), (Role::Entropy, entropy)]);
    }

    let known = spec.numerics.entropy.then_some(&entropy);
    let loss = tokens.loss(&spec.loss, &logp, known, |v| tokens.sequence_sum(&position, &sequences, v));
    let sums = tokens.sums(&position, &sequences, &loss, known);
    let dentropy = (spec.loss.entropy_coef != 0.0).then_some(&loss.dentropy);
    let slope = statistics.slope(&row, &factors, &loss.dlogp, dentropy);
    let dlogits = columns.gradient(&slope, &active);

    let mut results = vec![(Role::Sums, sums), (Role::Logp, logp), (Role::Entropy, entropy)];
    if pass == Pass::GradientInPlace {
        results.push((Role::Logits, dlogits.convert(logits.dtype())));
    }
    for role in spec.accumulators(pass) {
        let sum = frame.argument(role);
        let gradient = match (role, &head) {
            (Role::GradHidden, Some((_, head))) => {
                position.over_vocab(&head.hidden_gradient(&dlogits.convert(dtype(spec.numerics.dlogits))), Reducer::Add)
            }
            (Role::GradLmHead, Some((hidden, head))) => {
                let dlogits = dlogits.convert(dtype(spec.numerics.dlogits));
                position.over_data(&head.weight_gradient(&dlogits, &tokens.clean(hidden)), Reducer::Add)
            }
            (Role::GradBias, _) => {
                position.over_data(&dlogits.convert(Dtype::F32).reduce(Reducer::Add, &[0]), Reducer::Add)
            }
            _ => dlogits.convert(Dtype::F32),
        };
        results.push((role, accumulate(&sum, &gradient)));
    }
    frame.finish("dense", spec, &results)
}
