//! The loss of given logits, in one pass for the statistics and one that writes the gradient where the logits lie.

use super::{Pass, Program, Spec, reference};
use grpo_core::error::Result;

pub(super) fn program(spec: &Spec, pass: Pass) -> Result<Program> {
    reference::dense("logits", spec, pass)
}
