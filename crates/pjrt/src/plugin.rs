//! A plugin: the shared library for one kind of device.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::access;
use crate::client::Client;
use crate::elf;
use crate::error::{Error, Result};
use crate::ffi;
use crate::key_value::KeyValueStore;
use crate::topology::Topology;
use crate::value::{self, Attributes, NamedValue};

/// A loaded plugin. It stays loaded until the process ends, because plugins run threads of their own.
#[derive(Clone, Copy)]
pub struct Plugin {
    loaded: &'static Loaded,
}

struct Loaded {
    path: PathBuf,
    api: ffi::Api,
}

/// The environment that libtpu needs on a machine without a TPU: do not query a metadata server (which takes minutes to
/// time out), do not lock the machine for one process, use a given name and type of worker instead of looking them up,
/// and write no log files to `/tmp`.
///
/// [`Plugin::load`] sets these variables if the process has one thread and `TPU_SKIP_MDS_QUERY` is unset.
pub const TPU_ENVIRONMENT: [(&str, &str); 7] = [
    ("TPU_SKIP_MDS_QUERY", "1"),
    ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
    ("TPU_WORKER_HOSTNAMES", "localhost"),
    ("TPU_ACCELERATOR_TYPE", "v6e-8"),
    ("TPU_LOG_DIR", "disabled"),
    ("TPU_MIN_LOG_LEVEL", "3"),
    ("TPU_STDERR_LOG_LEVEL", "3"),
];

/// The smallest level of log messages that the CPU and CUDA plugins write to stderr: warnings. XLA logs a line for every program that is
/// compiled for several devices. [`Plugin::load`] sets it if the process has one thread and the variable is unset.
const LOG_LEVEL: (&str, &str) = ("TF_CPP_MIN_LOG_LEVEL", "1");

/// Silences the log lines below warnings of plugins that are loaded later, unless the user has set `TF_CPP_MIN_LOG_LEVEL`. Returns `false` if the
/// process has several threads and the environment can no longer be set; a program calls it first.
pub fn quiet_logs() -> bool {
    ffi::set_variables(&[LOG_LEVEL])
}

/// Returns `true` if the machine has a TPU, by the files of its devices: `/dev/accel0`, or `/dev/vfio/0`, with any number.
pub fn has_tpu() -> bool {
    let has_number = |folder: &str, prefix: &str| {
        let names = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
        names.filter_map(|name| name.into_string().ok()).any(|name| {
            let number = name.strip_prefix(prefix).unwrap_or_default();
            !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
        })
    };
    has_number("/dev", "accel") || has_number("/dev/vfio", "")
}

/// Sets [`TPU_ENVIRONMENT`], unless the user has set it or the machine has a TPU.
fn prepare_for_libtpu() -> Result<()> {
    if has_tpu() || std::env::var_os(TPU_ENVIRONMENT[0].0).is_some() || ffi::set_variables(&TPU_ENVIRONMENT) {
        return Ok(());
    }
    let variables = TPU_ENVIRONMENT.iter().map(|(name, value)| format!("{name}={value}")).collect();
    Err(Error::Environment { variables })
}

/// Refuses other major versions, whose structs have other layouts.
fn check_version(path: &Path, version: (i32, i32)) -> Result<()> {
    match version.0 {
        0 => Ok(()),
        _ => Err(Error::Version { path: path.to_path_buf(), version }),
    }
}

/// All plugins of this process, so that none is initialised twice.
static LOADED: Mutex<BTreeMap<PathBuf, &'static Loaded>> = Mutex::new(BTreeMap::new());

impl Plugin {
    /// Loads the plugin in the file `path`, or returns it if this process has already loaded it.
    ///
    /// # Errors
    ///
    /// [`Error::Exposed`] if others may write to the file or to a folder above it; [`Error::Load`] if the file is not a
    /// plugin, or is truncated; [`Error::Environment`] if libtpu needs [`TPU_ENVIRONMENT`], which can no longer be set;
    /// [`Error::Version`] for another major version; [`Error::Api`] if initialisation fails.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let path =
            path.canonicalize().map_err(|error| Error::Load { path: path.to_path_buf(), reason: error.to_string() })?;
        let mut plugins = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(loaded) = plugins.get(&path) {
            return Ok(Plugin { loaded });
        }
        access::check(&path)?;
        elf::check(&path).map_err(|reason| Error::Load { path: path.clone(), reason })?;
        if path.file_name().is_some_and(|name| name.to_string_lossy().contains("libtpu")) {
            prepare_for_libtpu()?;
        }
        // Only for logs: they stay verbose if the process has other threads.
        quiet_logs();
        let api = ffi::open(&path)?;
        check_version(&path, api.version())?;
        api.call(&mut ffi::PluginInitialize::new())?;
        let loaded: &'static Loaded = Box::leak(Box::new(Loaded { path: path.clone(), api }));
        plugins.insert(path, loaded);
        Ok(Plugin { loaded })
    }

    /// Returns the canonical path of the file.
    pub fn path(&self) -> &'static Path {
        &self.loaded.path
    }

    /// Returns the (major, minor) version of the C API that the plugin was built with.
    pub fn api_version(&self) -> (i32, i32) {
        self.api().version()
    }

    /// Returns the plugin's attributes, such as the StableHLO versions that it supports.
    pub fn attributes(&self) -> Result<Attributes> {
        let args = self.api().outputs(ffi::PluginAttributes::new())?;
        Ok(value::read(args.attributes.get()))
    }

    /// Opens the plugin's devices. `options` depend on the plugin: the CPU plugin has `cpu_device_count`, a number of
    /// virtual devices.
    pub fn client(&self, options: &[(&str, NamedValue)]) -> Result<Client> {
        Client::new(*self, options, None)
    }

    /// Opens the plugin's devices in one of several processes, which exchange their topologies through `store`. [`Client::devices`] are then
    /// the devices of all processes. The CUDA plugin has the options `node_id`, the number of this process, and `num_nodes`, the number of
    /// processes. XLA's CPU plugin and libtpu do not use the store.
    ///
    /// The store is called from threads of the plugin, and lives as long as the process. This was tested with a fake plugin only, because
    /// the CUDA plugin needs GPUs.
    pub fn client_with_store(&self, options: &[(&str, NamedValue)], store: Arc<dyn KeyValueStore>) -> Result<Client> {
        Client::new(*self, options, Some(store))
    }

    /// Describes devices that need not be present, to compile for them.
    ///
    /// For libtpu, `name` is a slice such as `v6e:2x4`. The CUDA plugin ignores `name` and needs the options
    /// `target_config`, a text proto that describes the GPU, and `topology`, "hosts x processes x devices", such as
    /// `1x1x1`.
    pub fn topology(&self, name: &str, options: &[(&str, NamedValue)]) -> Result<Topology> {
        Topology::new(*self, name, options)
    }

    pub(crate) fn api(&self) -> &'static ffi::Api {
        &self.loaded.api
    }
}

impl std::fmt::Debug for Plugin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plugin").field("path", &self.loaded.path).field("api_version", &self.api_version()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_major_versions_are_refused_with_instructions() {
        let path = Path::new("/opt/plugins/pjrt_c_api_cpu.so");
        for version in [(1, 0), (2, 15), (-1, 81)] {
            let error = check_version(path, version).unwrap_err();
            assert!(matches!(error, Error::Version { .. }), "{error:?}");
            let (text, found) = (error.to_string(), format!("version {}.{} ", version.0, version.1));
            for part in ["/opt/plugins/pjrt_c_api_cpu.so", &found, "major version 0", "`grpo plugin install`"] {
                assert!(text.contains(part), "{part:?} is not in: {text}");
            }
        }
        for version in [(0, 0), (0, 81), (0, 116), (0, 9999)] {
            check_version(path, version).unwrap();
        }
    }
}
