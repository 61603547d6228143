//! The dense loss as automatic differentiation writes it: the baseline for comparisons.
//!
//! Every intermediate is written as `jax.grad` of `log_softmax` and `take_along_axis` writes it (a gather over the
//! vocabulary, a scatter for its transpose), and gradients are new results in the inputs' dtype. It is not a usable
//! implementation: a collapsed softmax loses its gradient here, and NaN in masked rows spreads.
//!
//! Legend: N tokens, V vocabulary, H hidden size.

use super::frame::{Frame, Program};
use super::kind::Pass;
use super::mesh::MeshCoord;
use super::role::Role;
use super::softmax::spread;
use super::spec::{Spec, dtype};
use super::transform::Transform;
use crate::error::unsupported;
use grpo_core::HeadLayout;
use grpo_core::error::Result;
use stablehlo::{DotDimensions, Dtype, GatherDimensions, Precision, Reducer, ScatterDimensions, TensorType, Value};

/// Makes the program of loss and gradients as automatic differentiation writes it.
pub(super) fn program(spec: &Spec) -> Result<Program> {
    if spec.mesh.devices() != 1 {
        return Err(unsupported("the materialised baseline on several devices", "compare on one"));
    }
    if spec.loss.entropy_coef != 0.0 {
        return Err(unsupported("the materialised baseline with an entropy bonus", "set entropy_coef to 0"));
    }
    let frame = Frame::new(spec, Pass::Score);
    let coord = MeshCoord::new(&frame.f, spec.mesh);
    let (n, v) = (spec.tokens, spec.policy.vocab());
    let tables = frame.tables();
    let (tokens, sequences) = (tables.local(&coord, n), tables.ids.slice(&[1, 0], &[2, n]).reshape(&[n]));
    let active = tokens.active();
    let (factors, transform) = (tokens.factors(&spec.loss), Transform::new(&spec.loss));

    let head = frame.head(spec);
    let logits = match &head {
        None => frame.argument(Role::Logits),
        Some((hidden, head)) => head.logits(spec, hidden),
    };
    let transformed = transform.apply(&logits.convert(Dtype::F32));
    let scaled = &transformed * spread(&factors.logits, &transformed);
    let max = scaled.reduce(Reducer::Max, &[1]);
    let shifted = &scaled - spread(&max, &scaled);
    let e = shifted.exp();
    let sum = e.reduce(Reducer::Add, &[1]);
    let log_softmax = &shifted - spread(&sum.log(), &shifted);
    // Batching dimensions, as in JAX: with (row, column) pairs instead, TPUs flatten `[N, V]` and copy it.
    let index = tokens.target.reshape(&[n, 1, 1]);
    let at_target = log_softmax.gather(&index, gather(), &[n, 1]).reshape(&[n]);
    let logp = active.select(&(&at_target * &factors.logp), &at_target.like(0.0));

    let (terms, dlogp) = tokens.loss(&spec.loss, &logp, None, |v| tokens.sequence_sum(&coord, &sequences, v));
    let sums = tokens.sums(&coord, &sequences, terms);

    let dlogp = (dlogp * &factors.logp).reshape(&[n, 1]);
    let zeros = frame.f.splat(0.0, TensorType::new(Dtype::F32, [n, v]));
    let by_log_softmax = zeros.scatter(&index, &dlogp, scatter(), Reducer::Add);
    let shares = by_log_softmax.reduce(Reducer::Add, &[1]) / &sum;
    let by_scaled = &by_log_softmax - &e * spread(&shares, &e);
    let input = dtype(spec.policy.dtype());
    let by_transformed = &by_scaled * spread(&factors.logits, &by_scaled);
    let dlogits = transform.pull_back(&transformed, by_transformed).convert(input);

    let mut results = vec![(Role::Sums, sums), (Role::Logp, logp.clone()), (Role::Entropy, logp.like(0.0))];
    for role in spec.accumulators(Pass::Gradient) {
        let gradient = match (role, &head) {
            (Role::GradHidden, Some((_, head))) => {
                product(&dlogits, &head.weight, DotDimensions::contract(1, head.vocab_dimension()))
            }
            (Role::GradLmHead, Some((hidden, head))) => match head.layout {
                HeadLayout::VocabHidden => product(&dlogits, hidden, DotDimensions::contract(0, 0)),
                HeadLayout::HiddenVocab => product(hidden, &dlogits, DotDimensions::contract(0, 0)),
            },
            (Role::GradBias, _) => dlogits.convert(Dtype::F32).reduce(Reducer::Add, &[0]).convert(input),
            _ => dlogits.clone(),
        };
        results.push((role, gradient));
    }
    frame.finish("materialised", spec, &results)
}

/// A product whose result has its operands' dtype.
fn product(a: &Value, b: &Value, dimensions: DotDimensions) -> Value {
    let precision = if a.dtype() == Dtype::F32 { Precision::Highest } else { Precision::Default };
    a.dot_general(b, dimensions, a.dtype(), precision)
}

/// Gathers one column of every row.
fn gather() -> GatherDimensions {
    GatherDimensions {
        collapsed_slice_dims: vec![1],
        operand_batching_dims: vec![0],
        start_indices_batching_dims: vec![0],
        start_index_map: vec![1],
        index_vector_dim: 2,
        slice_sizes: vec![1, 1],
        ..GatherDimensions::default()
    }
}

/// The scatter that is the transpose of [`gather`].
fn scatter() -> ScatterDimensions {
    ScatterDimensions {
        inserted_window_dims: vec![1],
        input_batching_dims: vec![0],
        scatter_indices_batching_dims: vec![0],
        scatter_dims_to_operand_dims: vec![1],
        index_vector_dim: 2,
        ..ScatterDimensions::default()
    }
}
