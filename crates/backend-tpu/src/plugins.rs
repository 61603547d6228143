//! Finds the plugin for a kind of device: a path from the caller, else the file in [`VARIABLE`], else the installation
//! of `grpo plugin install` in the user's cache.

use grpo_core::error::{Error, Result};
pub use grpo_pjrt::install::{Kind, install};
use grpo_pjrt::{Client, KeyValueStore, NamedValue, Plugin, Topology};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The environment variable with the path of a plugin, for any kind of device.
pub const VARIABLE: &str = "GRPO_PJRT_PLUGIN";

/// Returns the file of the plugin for `kind`. `path` takes precedence over the environment, and the environment over
/// the cache. [`grpo_pjrt::install::find`] verifies plugins in the cache.
///
/// # Errors
/// [`Error::Backend`] if the file does not exist, with the command that installs it; also if an installed plugin is
/// damaged, with the command that reinstalls it.
pub fn find(kind: Kind, path: Option<&Path>) -> Result<PathBuf> {
    let variable = || std::env::var_os(VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from);
    let (path, origin) = match (path, variable()) {
        (Some(path), _) => (path.to_owned(), "the configuration"),
        (None, Some(path)) => (path, VARIABLE),
        (None, None) => return find_installed(kind),
    };
    match path.is_file() {
        true => Ok(path),
        false => Err(failed(kind, format!("{origin} names {}, and there is no such file", path.display()))),
    }
}

fn find_installed(kind: Kind) -> Result<PathBuf> {
    if let Some(path) = grpo_pjrt::install::find(kind).map_err(|error| failed(kind, error))? {
        return Ok(path);
    }
    let cache = grpo_pjrt::install::cache_dir().map_err(|error| failed(kind, error))?;
    let (cache, install) = (cache.display(), format!("`grpo plugin install {}`", kind.name()));
    Err(failed(kind, format!("no plugin is installed in {cache}: run {install}, or set {VARIABLE} to its path")))
}

/// Loads the plugin for `kind`; see [`find`].
///
/// # Errors
/// The errors of [`find`]; [`Error::Backend`] with the loader's message.
pub fn load(kind: Kind, path: Option<&Path>) -> Result<Plugin> {
    Plugin::load(find(kind, path)?).map_err(|error| failed(kind, error))
}

/// Opens the devices of `kind`; see [`find`] and [`Plugin::client`].
///
/// # Errors
/// The errors of [`load`]; [`Error::Backend`] if the plugin finds no devices, or serves another kind.
pub fn client(kind: Kind, path: Option<&Path>, options: &[(&str, NamedValue)]) -> Result<Client> {
    check_presence(kind, path, is_prepared_for_libtpu())?;
    let plugin = load(kind, path)?;
    opened(kind, plugin, plugin.client(options))
}

/// Opens the devices of `kind` in one of several processes; see [`find`] and [`Plugin::client_with_store`].
///
/// # Errors
/// The errors of [`client`].
pub fn client_with_store(
    kind: Kind,
    path: Option<&Path>,
    options: &[(&str, NamedValue)],
    store: Arc<dyn KeyValueStore>,
) -> Result<Client> {
    check_presence(kind, path, is_prepared_for_libtpu())?;
    let plugin = load(kind, path)?;
    opened(kind, plugin, plugin.client_with_store(options, store))
}

/// Returns `true` if the machine has a TPU, or if the user has prepared the environment for libtpu.
fn is_prepared_for_libtpu() -> bool {
    grpo_pjrt::has_tpu() || std::env::var_os(grpo_pjrt::TPU_ENVIRONMENT[0].0).is_some()
}

/// Checks that there may be a TPU before libtpu is installed or loaded, which needs an environment of its own without one.
fn check_presence(kind: Kind, path: Option<&Path>, is_prepared: bool) -> Result<()> {
    let is_libtpu = |file: PathBuf| file.file_name().is_some_and(|name| name.to_string_lossy().contains("libtpu"));
    if kind != Kind::Tpu || is_prepared || !find(kind, path).map_or(true, is_libtpu) {
        return Ok(());
    }
    let message = "this machine has no TPU: expected a device such as /dev/accel0 or /dev/vfio/0, found none; run on a TPU virtual machine, or \
                   use `grpo plan` and `grpo aot`, which compile for absent TPUs";
    Err(failed(kind, message))
}

/// Returns an opened client that serves `kind`.
fn opened(kind: Kind, plugin: Plugin, client: grpo_pjrt::Result<Client>) -> Result<Client> {
    let client =
        client.map_err(|error| failed(kind, format!("{} opens no devices: {error}", plugin.path().display())))?;
    check_platform(kind, plugin, client.platform_name())?;
    Ok(client)
}

/// Describes devices of `kind` that need not be present; see [`find`] and [`Plugin::topology`].
///
/// # Errors
/// The errors of [`load`]; [`Error::Backend`] if the plugin does not know the devices, or serves another kind.
pub fn topology(kind: Kind, path: Option<&Path>, name: &str, options: &[(&str, NamedValue)]) -> Result<Topology> {
    let plugin = load(kind, path)?;
    let topology = plugin.topology(name, options).map_err(|error| match error.is_unsupported() {
        true => failed(kind, format!("{} cannot compile for absent devices: {error}", plugin.path().display())),
        false => failed(kind, error),
    })?;
    let platform = topology.platform_name().map_err(|error| failed(kind, error))?;
    check_platform(kind, plugin, &platform)?;
    Ok(topology)
}

/// Checks that the plugin serves `kind`; only an opened client or topology reports that.
fn check_platform(kind: Kind, plugin: Plugin, platform: &str) -> Result<()> {
    match platform.eq_ignore_ascii_case(kind.name()) {
        true => Ok(()),
        false => Err(failed(kind, format!("{} serves the platform `{platform}`", plugin.path().display()))),
    }
}

/// Makes an error of the backend `pjrt:KIND`.
pub(crate) fn failed(kind: Kind, message: impl ToString) -> Error {
    Error::Backend { backend: format!("{}:{}", crate::error::NAME, kind.name()), message: message.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_tpu_is_named_before_its_plugin() {
        let folder = tempfile::tempdir().unwrap();
        let [libtpu, other] = ["libtpu.so", "pjrt_cpu.so"].map(|name| folder.path().join(name));
        for file in [&libtpu, &other] {
            std::fs::write(file, "no library").unwrap();
        }
        for path in [&*libtpu, Path::new("/nowhere/libtpu.so")] {
            let error = check_presence(Kind::Tpu, Some(path), false).unwrap_err().to_string();
            assert!(error.contains("pjrt:tpu") && error.contains("this machine has no TPU"), "{error}");
            check_presence(Kind::Tpu, Some(path), true).unwrap();
        }
        // Another plugin that was named for this kind has an error of its own.
        check_presence(Kind::Tpu, Some(&other), false).unwrap();
        check_presence(Kind::Cuda, Some(&libtpu), false).unwrap();
    }
}
