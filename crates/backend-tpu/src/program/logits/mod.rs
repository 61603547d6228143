//! The loss of given logits: one pass for the statistics, and one that writes the gradient where the logits lie.
//!
//! Avoids every temporary of the size of the logits: the target is found by comparing columns, never by a gather or a
//! scatter, so that the compiler fuses each pass of the dense program into one loop over the donated buffer. With
//! [`Spec::mosaic`] the passes are TPU kernels of our own ([`kernels`]).
//!
//! Hidden states are multiplied into `[N, V]` logits first.

mod kernels;

use super::dense;
use super::frame::Program;
use super::kind::Pass;
use super::spec::Spec;
use grpo_core::error::Result;
use kernels::Kernels;

/// The program of `pass`.
pub(super) fn program(spec: &Spec, pass: Pass) -> Result<Program> {
    let Some(blocks) = spec.mosaic else { return dense::program(spec, pass) };
    dense::build(spec, pass, Some(kernels::scale(spec)), |logits| {
        Ok(Box::new(Kernels::new(spec, blocks, logits.values, logits.targets, logits.first_column)?))
    })
}
