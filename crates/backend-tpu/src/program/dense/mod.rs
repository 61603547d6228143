//! The dense loss: one tile as large as the problem. Holds the `[N, V]` logits and their gradient.
//!
//! Of precomputed logits, there are no temporaries of their size: one pass computes the statistics, one replaces logits
//! by their gradient. The target is found by comparing columns instead of a gather or scatter, so that the compiler
//! fuses each pass into one loop over the donated buffer. With [`Spec::mosaic`], the passes are Mosaic TPU kernels
//! ([`kernels`]).
//!
//! On a mesh, the logits are sharded as the arguments are: rows by tokens, columns by vocabulary.
//!
//! Legend: N tokens, V vocabulary.

mod kernels;

use super::frame::{Frame, accumulate, pinned};
use super::pass::Pass;
use super::products::Head;
use super::role::Role;
use super::sampling_mask::kept;
use super::softmax::{Columns, Entries, Tile};
use super::spec::{Spec, dtype};
use super::tokens::TokenLoss;
use super::transform::Transform;
use grpo_core::error::Result;
use grpo_stablehlo::{Dtype, Reducer, Value};
use kernels::Kernels;

/// Computes the results of `pass` from the arguments in `frame`. The gradient with respect to precomputed logits is
/// added to its own buffer, or replaces the logits.
pub(super) fn results(
    spec: &Spec,
    frame: &Frame,
    pass: Pass,
    head: Option<(Value, Head)>,
) -> Result<Vec<(Role, Value)>> {
    let loss = spec.token_loss(|role| frame.argument(role));
    let TokenLoss { tokens, .. } = &loss;
    let active = loss.active();
    let mut factors = loss.factors();
    if spec.mosaic.is_some() {
        factors.logits = factors.logits.like(f64::from(kernels::scale(spec)));
    }
    let scale = &factors.logits;

    let logits = match &head {
        None => frame.argument(Role::Logits),
        Some((hidden, head)) => pinned(spec, spec.stored(Role::Logits, &head.logits(spec, hidden))),
    };

    let columns: Box<dyn Columns> = match spec.mosaic {
        Some(blocks) => Box::new(Kernels::new(spec, blocks, &logits, &tokens.target)?),
        None => {
            let mask = frame.get(Role::SamplingMask).map(|bits| kept(bits, logits.shape()[1]));
            let entries = Entries::all(&logits, spec.end_of_vocab()).only(mask);
            Box::new(Tile::new(&logits, Transform::new(&spec.loss), &tokens.target, entries, scale))
        }
    };
    let statistics = columns.statistics(spec.numerics.entropy);
    let row = statistics.row(scale);
    let (logp, entropy) = row.scores(&active, &factors);
    if pass == Pass::Score {
        return Ok(vec![(Role::Logp, logp), (Role::Entropy, entropy)]);
    }

    let known = spec.numerics.entropy.then_some(&entropy);
    let (sums, dlogp) = loss.value_and_derivative(&logp, known);
    let row_grad = statistics.row_grad(&row, &factors, &dlogp, tokens.dentropy(&spec.loss).as_ref());
    let dlogits = columns.gradient(&row_grad, &active);

    let mut results = vec![(Role::Sums, sums), (Role::Logp, logp), (Role::Entropy, entropy)];
    if pass == Pass::GradientInPlace {
        results.push((Role::Logits, dlogits.convert(logits.dtype())));
    }
    for role in spec.accumulators(pass) {
        let sum = frame.argument(role);
        let gradient = match (role, &head) {
            (Role::GradHidden, Some((_, head))) => head.hidden_gradient(&dlogits.convert(dtype(spec.numerics.dlogits))),
            (Role::GradLmHead, Some((hidden, head))) => {
                let dlogits = dlogits.convert(dtype(spec.numerics.dlogits));
                head.weight_gradient(&dlogits, &tokens.clean(hidden))
            }
            (Role::GradBias, _) => dlogits.convert(Dtype::F32).reduce(Reducer::Add, &[0]),
            _ => dlogits.convert(Dtype::F32),
        };
        results.push((role, accumulate(&sum, &gradient)));
    }
    Ok(results)
}
