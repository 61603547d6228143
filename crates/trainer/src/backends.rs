//! Backends of the loss by name.

use crate::{Error, Result};
use backend_cpu::CpuBackend;
use backend_tpu::PjrtBackend;
use backend_tpu::plugins::Kind;
use grpo_core::Backend;
use std::path::Path;
use std::sync::Arc;

/// The names of the backends that [`open`] knows.
pub const NAMES: [&str; 4] = ["cpu", "pjrt:cpu", "pjrt:tpu", "pjrt:cuda"];

/// The backend called `name`. Those of PJRT need their plugin: the file `plugin`, or what [`backend_tpu::plugins::find`]
/// finds.
///
/// # Errors
/// [`Error::Argument`] that lists the known names, or that of a plugin that is not there.
pub fn open(name: &str, plugin: Option<&Path>) -> Result<Arc<dyn Backend>> {
    if name == "cpu" {
        return Ok(Arc::new(CpuBackend::new()));
    }
    match Kind::ALL.into_iter().find(|kind| name.strip_prefix("pjrt:") == Some(kind.name())) {
        Some(kind) => Ok(Arc::new(PjrtBackend::open(kind, plugin)?)),
        None => Err(Error::argument("backend", format!("one of {}", NAMES.join(", ")), format!("`{name}`"))),
    }
}
