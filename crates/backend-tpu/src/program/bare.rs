//! The required products only: a lower bound of measured times.
//!
//! For hidden states, the products in chunks of tokens: logits, which are used in place of their gradient, and one
//! product per gradient, added to the caller's donated accumulator. For precomputed logits, one pass that writes as much
//! as it reads. Arguments and results have the types of the loss, so that both run in the same way; other results are
//! zeros.
//!
//! Legend: N tokens, V vocabulary, H hidden size, C tokens of a chunk.

use super::blocking::Blocking;
use super::frame::{Frame, Program, accumulate};
use super::kind::Pass;
use super::products::Head;
use super::role::Role;
use super::spec::{Spec, dtype};
use crate::error::unsupported;
use grpo_core::PolicySpec;
use grpo_core::error::Result;
use stablehlo::{Dtype, Value};

/// Makes the program with the arguments and results of `pass`.
pub(super) fn program(spec: &Spec, pass: Pass) -> Result<Program> {
    if spec.mesh.devices() != 1 {
        return Err(unsupported("the bare products on several devices", "compare on one"));
    }
    let frame = Frame::new(spec, pass);
    let zeros = |role| (role, frame.f.splat(0.0, spec.type_of(role)));
    let mut results: Vec<_> = [Role::Sums, Role::Logp, Role::Entropy].into_iter().map(zeros).collect();
    match spec.policy {
        PolicySpec::Logits { .. } => {
            let logits = frame.argument(Role::Logits);
            let halved = &logits * logits.like(-0.5);
            match pass {
                Pass::GradientInPlace => results.push((Role::Logits, halved)),
                _ => results.extend(
                    spec.accumulators(pass)
                        .into_iter()
                        .map(|role| (role, accumulate(&frame.argument(role), &halved.convert(Dtype::F32)))),
                ),
            }
        }
        PolicySpec::Hidden { layout, .. } => {
            let head = Head { weight: frame.argument(Role::LmHead), bias: None, layout, split: None };
            results.extend(products(spec, &frame, pass, &head));
        }
    }
    frame.finish("bare", spec, &results)
}

/// Computes gradients of `pass` in a loop over chunks.
fn products(spec: &Spec, frame: &Frame, pass: Pass, head: &Head) -> Vec<(Role, Value)> {
    let hidden = frame.argument(Role::Hidden);
    let &[n, h] = hidden.shape() else { unreachable!("hidden states are a matrix") };
    let chunk = match spec.blocking {
        Blocking::TokenChunks(chunk) => chunk.clamp(1, n),
        Blocking::VocabPanels(_) => n,
    };
    let roles = spec.accumulators(pass);
    let sums: Vec<Value> = roles.iter().map(|role| frame.argument(*role)).collect();
    let initial: Vec<&Value> = sums.iter().collect();
    let carried = frame.f.for_loop(n.div_ceil(chunk), &initial, |trip, carried| {
        // The last chunk is shifted to end at the last token; rows that count twice do not matter here.
        let start = (trip * trip.like(chunk as i64)).min(&trip.like((n - chunk) as i64));
        let at = [&start, &start.like(0)];
        let rows = hidden.dynamic_slice(&at, &[chunk, h]);
        let tile = head.logits(spec, &rows).convert(dtype(spec.numerics.dlogits));
        let add = |(role, sum): (&Role, &Value)| match role {
            Role::GradHidden => {
                let there = sum.dynamic_slice(&at, &[chunk, h]);
                sum.dynamic_update_slice(&accumulate(&there, &head.hidden_gradient(&tile)), &at)
            }
            Role::GradLmHead => accumulate(sum, &head.weight_gradient(&tile, &rows)),
            _ => accumulate(sum, &tile.convert(Dtype::F32).reduce(stablehlo::Reducer::Add, &[0])),
        };
        roles.iter().zip(carried).map(add).collect()
    });
    roles.into_iter().zip(carried).collect()
}
