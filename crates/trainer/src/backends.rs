//! Opens loss backends by name, and the devices of policies.

use crate::{Error, Result};
use backend_cpu::CpuBackend;
use backend_tpu::PjrtBackend;
use backend_tpu::plugins::Kind;
use grpo_core::Backend;
use policy_pjrt::Runtime;
use std::path::Path;
use std::sync::Arc;

/// The names of the backends that [`open`] knows.
pub const NAMES: [&str; 4] = ["cpu", "pjrt:cpu", "pjrt:tpu", "pjrt:cuda"];

/// Opens the backend `name`. PJRT backends need their plugin: the file `plugin`, or the one that [`backend_tpu::plugins::find`]
/// finds.
///
/// # Errors
/// [`Error::Argument`] with the known names; an error if the plugin is missing.
pub fn open(name: &str, plugin: Option<&Path>) -> Result<Arc<dyn Backend>> {
    if name == "cpu" {
        return Ok(Arc::new(CpuBackend::new()));
    }
    match Kind::ALL.into_iter().find(|kind| name.strip_prefix("pjrt:") == Some(kind.name())) {
        Some(kind) => Ok(Arc::new(PjrtBackend::open(kind, plugin)?)),
        None => Err(Error::argument("backend", format!("one of {}", NAMES.join(", ")), format!("`{name}`"))),
    }
}

/// Opens the first device of `kind` for a policy, with the plugin `plugin`, or the one that [`backend_tpu::plugins::find`] finds. Compiled
/// programs are cached in `compile_cache`, or in the folder `programs` beside installed plugins.
///
/// # Errors
/// An error if the plugin is missing or opens no device.
pub fn device(kind: Kind, plugin: Option<&Path>, compile_cache: Option<&Path>) -> Result<Runtime> {
    let runtime = Runtime::open(kind, plugin).map_err(policy::Error::from)?;
    let beside_plugins = || Some(pjrt::install::cache_dir().ok()?.with_file_name("programs"));
    Ok(match compile_cache.map(Path::to_owned).or_else(beside_plugins) {
        Some(folder) => runtime.with_compile_cache(folder),
        None => runtime,
    })
}
