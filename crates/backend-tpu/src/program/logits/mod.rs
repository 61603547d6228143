//! The loss of precomputed logits: one pass for the statistics, and one that replaces logits by their gradient.
//!
//! There are no temporaries of the size of the logits: the target is found by comparing columns instead of a gather or
//! scatter, so that the compiler fuses each pass of the dense program into one loop over the donated buffer. With
//! [`Spec::mosaic`], the passes are Mosaic TPU kernels ([`kernels`]).
//!
//! Hidden states are first multiplied into `[N, V]` logits.

mod kernels;

use super::dense;
use super::frame::Frame;
use super::kind::Pass;
use super::role::Role;
use super::spec::Spec;
use grpo_core::error::Result;
use kernels::Kernels;
use stablehlo::Value;

/// Computes the results of `pass` from the arguments in `frame`.
pub(super) fn results(spec: &Spec, frame: &Frame, pass: Pass) -> Result<Vec<(Role, Value)>> {
    let Some(blocks) = spec.mosaic else { return dense::results(spec, frame, pass) };
    dense::build(spec, frame, pass, Some(kernels::scale(spec)), |logits| {
        Ok(Box::new(Kernels::new(spec, blocks, logits.values, logits.targets, logits.first_column)?))
    })
}
