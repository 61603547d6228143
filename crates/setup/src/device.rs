//! The devices of policies.

use crate::Result;
use grpo_backend_tpu::plugins::Kind;
use grpo_distributed::Store;
use grpo_policy_pjrt::Runtime;
use grpo_run_config::PolicyDevice;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Opens the devices of all processes of a run, for a mesh over them, if the plugin of `kind` connects the processes: XLA's CPU plugin does not.
///
/// # Errors
/// The errors of [`Runtime::open_process`].
pub(crate) fn open_process(
    kind: Kind,
    plugin: Option<&Path>,
    compile_cache: Option<&Path>,
    store: Option<&Arc<Store>>,
) -> Result<Option<Runtime>> {
    let Some(store) = store.filter(|store| store.num_processes() > 1 && kind != Kind::Cpu) else { return Ok(None) };
    let runtime = Runtime::open_process(kind, plugin, store).map_err(grpo_policy::Error::from)?;
    Ok(Some(with_cache(runtime, compile_cache)))
}

/// Returns the runtime with a cache of compiled programs in `compile_cache`, or in [`compile_cache()`].
pub fn with_cache(runtime: Runtime, compile_cache: Option<&Path>) -> Runtime {
    match compile_cache.map(Path::to_owned).or_else(self::compile_cache) {
        Some(folder) => runtime.with_compile_cache(folder),
        None => runtime,
    }
}

/// Returns the default folder of compiled programs: `programs`, next to the installed plugins. `None` if the user has no cache folder.
pub fn compile_cache() -> Option<PathBuf> {
    Some(grpo_pjrt::install::cache_dir().ok()?.with_file_name("programs"))
}

/// Returns the kind of a PJRT device; `None` for this CPU without a plugin.
pub(crate) fn kind(device: PolicyDevice) -> Option<Kind> {
    match device {
        PolicyDevice::Host => None,
        PolicyDevice::PjrtCpu => Some(Kind::Cpu),
        PolicyDevice::PjrtCuda => Some(Kind::Cuda),
        PolicyDevice::PjrtTpu => Some(Kind::Tpu),
    }
}
