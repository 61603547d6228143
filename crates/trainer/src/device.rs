//! Opens the devices of policies.

use crate::Result;
use backend_tpu::plugins::Kind;
use policy_pjrt::Runtime;
use std::path::Path;

/// Opens the first device of `kind` for a policy, with the plugin `plugin`, or the one that [`backend_tpu::plugins::find`] finds. Compiled
/// programs are cached in `compile_cache`, or in the folder `programs` beside installed plugins.
///
/// # Errors
/// An error if the plugin is missing or opens no device.
pub fn open(kind: Kind, plugin: Option<&Path>, compile_cache: Option<&Path>) -> Result<Runtime> {
    let runtime = Runtime::open(kind, plugin).map_err(policy::Error::from)?;
    let beside_plugins = || Some(pjrt::install::cache_dir().ok()?.with_file_name("programs"));
    Ok(match compile_cache.map(Path::to_owned).or_else(beside_plugins) {
        Some(folder) => runtime.with_compile_cache(folder),
        None => runtime,
    })
}
