//! The dense loss as automatic differentiation leaves it.

use super::{Program, Spec};
use grpo_core::error::Result;

pub(super) fn program(spec: &Spec) -> Result<Program> {
    super::reference::dense("materialised", spec, super::Pass::Gradient)
}
