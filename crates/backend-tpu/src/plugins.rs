//! Which plugin serves a kind of device: a path given by the caller, else the file that [`VARIABLE`] names, else what
//! `grpo plugin install` has put into the user's cache.

use grpo_core::error::{Error, Result};
pub use pjrt::install::{Kind, install};
use pjrt::{Client, NamedValue, Plugin, Topology};
use std::path::{Path, PathBuf};

/// Environment variable with the path of a plugin. It is used for whatever kind of device is asked for.
pub const VARIABLE: &str = "GRPO_PJRT_PLUGIN";

/// The file of the plugin for `kind`; `path` wins over the environment, and that over the cache. One from the cache is what
/// was installed; [`pjrt::install::find`] has checked it.
///
/// # Errors
/// [`Error::Backend`] when the file is not there, with the command that fetches it, and when an installed one is not what was
/// installed, with the command that installs it again.
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
    let installed = pjrt::install::find(kind).map_err(|error| failed(kind, error))?;
    installed.map_or_else(
        || {
            let cache = pjrt::install::cache_dir().map_err(|error| failed(kind, error))?;
            let (cache, install) = (cache.display(), format!("`grpo plugin install {}`", kind.name()));
            Err(failed(
                kind,
                format!("no plugin is installed in {cache}: run {install}, or set {VARIABLE} to its path"),
            ))
        },
        Ok,
    )
}

/// Loads the plugin for `kind`; see [`find`].
///
/// # Errors
/// Those of [`find`]; [`Error::Backend`] with the loader's words.
pub fn load(kind: Kind, path: Option<&Path>) -> Result<Plugin> {
    Plugin::load(find(kind, path)?).map_err(|error| failed(kind, error))
}

/// Opens the devices of `kind`; see [`find`] and [`Plugin::client`].
///
/// # Errors
/// Those of [`load`]; [`Error::Backend`] when the plugin has no devices here, or serves another kind.
pub fn client(kind: Kind, path: Option<&Path>, options: &[(&str, NamedValue)]) -> Result<Client> {
    let plugin = load(kind, path)?;
    let opened = plugin.client(options);
    let client =
        opened.map_err(|error| failed(kind, format!("{} opens no devices: {error}", plugin.path().display())))?;
    check_platform(kind, plugin, client.platform_name())?;
    Ok(client)
}

/// Describes devices of `kind` that need not be there; see [`find`] and [`Plugin::topology`].
///
/// # Errors
/// Those of [`load`]; [`Error::Backend`] when the plugin does not know the devices, or serves another kind.
pub fn topology(kind: Kind, path: Option<&Path>, name: &str, options: &[(&str, NamedValue)]) -> Result<Topology> {
    let plugin = load(kind, path)?;
    let topology = plugin.topology(name, options).map_err(|error| match error.is_unsupported() {
        true => failed(kind, format!("{} compiles for no device that is not there: {error}", plugin.path().display())),
        false => failed(kind, error),
    })?;
    let platform = topology.platform_name().map_err(|error| failed(kind, error))?;
    check_platform(kind, plugin, &platform)?;
    Ok(topology)
}

/// Checks that the plugin serves `kind`, which only what it opens can say.
fn check_platform(kind: Kind, plugin: Plugin, platform: &str) -> Result<()> {
    match platform.eq_ignore_ascii_case(kind.name()) {
        true => Ok(()),
        false => Err(failed(kind, format!("{} serves the platform `{platform}`", plugin.path().display()))),
    }
}

/// An error of the backend `pjrt:KIND`.
pub(crate) fn failed(kind: Kind, message: impl ToString) -> Error {
    Error::Backend { backend: format!("{}:{}", crate::error::NAME, kind.name()), message: message.to_string() }
}
