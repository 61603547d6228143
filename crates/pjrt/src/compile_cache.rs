//! A cache of compiled executables on disk, so that a program is compiled once per machine.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::cache::{Cache, Key};
use crate::client::Client;
use crate::compile_options::CompileOptions;
use crate::device::{Device, DeviceDescription};
use crate::error::Result;
use crate::executable::LoadedExecutable;

/// A directory of compiled executables.
///
/// The key of an entry covers the program, the options, the compiler flags in the environment, the platform and its
/// version, the version of the API and all devices of the client (id, process, model and coordinates); for XLA's CPU
/// also the instruction sets of this machine. An entry that is damaged, has the layout of another release, or cannot be loaded by the plugin is
/// recompiled and replaced ([`CacheOutcome::Replaced`]). Several processes may share a directory, but not several
/// users: an entry is code, so an entry that another user may write to is refused.
#[derive(Clone, Debug)]
pub struct CompileCache {
    entries: Cache,
}

/// The origin of a compiled executable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheOutcome {
    /// The executable was read from the cache.
    Hit,
    /// The program was compiled and written to the cache.
    Miss,
    /// The entry could not be used, because it was damaged or of another release. The program was compiled, and the
    /// entry replaced.
    Replaced,
    /// The program was compiled but not cached: the plugin cannot serialize it, or writing failed, with a warning in
    /// the log.
    Uncacheable,
}

impl CompileCache {
    /// Uses `directory`, which is created when the first entry is written.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        CompileCache { entries: Cache::new(directory) }
    }

    /// Returns the directory.
    pub fn directory(&self) -> &Path {
        self.entries.directory()
    }

    /// Returns the serialized executable of `program`, for [`Client::load`]; `None` if there is none.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Exposed`] if others may write to the entry or to a folder above it.
    pub fn read(
        &self,
        client: &Client,
        program: impl AsRef<[u8]>,
        options: &CompileOptions,
    ) -> Result<Option<Vec<u8>>> {
        self.entries.read(&key(client, program.as_ref(), options)?)
    }

    /// Writes the executable of `program`. Returns `false` if the plugin cannot serialize it, or if writing fails, with a warning in the
    /// log.
    ///
    /// # Errors
    ///
    /// The errors of reading the descriptions of devices.
    pub fn write(
        &self,
        client: &Client,
        program: impl AsRef<[u8]>,
        options: &CompileOptions,
        executable: &LoadedExecutable,
    ) -> Result<bool> {
        Ok(self.write_at(&key(client, program.as_ref(), options)?, executable))
    }

    fn write_at(&self, key: &Key, executable: &LoadedExecutable) -> bool {
        let serialized = executable.executable().serialize();
        match serialized.and_then(|serialized| self.entries.write(key, &serialized)) {
            Ok(()) => return true,
            // Not logged: this plugin cannot serialize any executable.
            Err(error) if error.is_unsupported() => {}
            Err(error) => {
                let folder = self.directory().display();
                tracing::warn!("{folder}: an executable is not cached, and will be compiled again: {error}");
            }
        }
        false
    }

    /// Loads the executable of `program` from the cache, or compiles and caches it. If writing fails (for example
    /// because the disk is full), the executable is returned with a warning in the log.
    ///
    /// # Errors
    ///
    /// The errors of [`Client::compile`]; [`crate::Error::Exposed`] if others may write to the entry or to a folder
    /// above it.
    pub fn compile(
        &self,
        client: &Client,
        program: impl AsRef<[u8]>,
        options: &CompileOptions,
    ) -> Result<(LoadedExecutable, CacheOutcome)> {
        let key = key(client, program.as_ref(), options)?;
        if let Some(executable) = self.entries.read(&key)?.and_then(|serialized| client.load(&serialized).ok()) {
            return Ok((executable, CacheOutcome::Hit));
        }
        let outcome = if self.entries.contains(&key) { CacheOutcome::Replaced } else { CacheOutcome::Miss };
        let executable = client.compile(program, options)?;
        let is_cached = self.write_at(&key, &executable);
        Ok((executable, if is_cached { outcome } else { CacheOutcome::Uncacheable }))
    }
}

fn key(client: &Client, program: &[u8], options: &CompileOptions) -> Result<Key> {
    let (major, minor) = client.plugin().api_version();
    let api = format!("{major}.{minor}");
    let devices = client.devices().iter().map(Device::description).collect::<Result<Vec<_>>>()?;
    Ok(Key::of(&[
        client.platform_name().as_bytes(),
        client.platform_version().as_bytes(),
        api.as_bytes(),
        accelerator_config(&devices).as_bytes(),
        // Code for another processor would crash, and machines may share a home directory.
        if client.platform_name() == "cpu" { instruction_sets() } else { "" }.as_bytes(),
        &options.fingerprint(),
        program,
    ]))
}

/// Returns the properties of all devices of a client that the compiler may use: machines with other GPUs or slices of
/// other shapes may share the directory, and platform versions do not include them.
///
/// Processes of one job share entries, because each of them lists the devices of all processes. Other attributes are
/// left out: the attributes of GPUs, such as the UUID, differ between equal machines. In contrast to JAX, the options' device
/// assignment belongs to the key on GPUs too: JAX replaces the assignment when it loads an entry, but [`Client::load`]
/// uses the one that the entry was compiled with.
fn accelerator_config(devices: &[DeviceDescription]) -> String {
    const COORDINATES: [&str; 3] = ["coords", "core_on_chip", "slice_index"];
    let device_line = |device: &DeviceDescription| {
        let coordinates = COORDINATES.map(|name| device.attributes.get(name));
        format!("{} {} {:?} {coordinates:?}\n", device.id, device.process_index, device.kind)
    };
    devices.iter().map(device_line).collect()
}

/// Returns the instruction sets of this machine's processor, as Linux lists them; empty on other systems.
fn instruction_sets() -> &'static str {
    static LISTED: OnceLock<String> = OnceLock::new();
    LISTED.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        // `flags` on x86-64, `Features` on Arm.
        let listed = text.lines().find(|line| line.starts_with("flags") || line.starts_with("Features"));
        listed.unwrap_or_default().to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::NamedValue;

    fn gpu(id: i32, uuid: &str) -> DeviceDescription {
        let attributes = [("coords", NamedValue::Ints(vec![0, 0, i64::from(id)])), ("uuid", uuid.into())];
        DeviceDescription {
            id,
            process_index: 0,
            kind: "NVIDIA H100 80GB HBM3".into(),
            debug_string: format!("CudaDevice(id={id}, uuid={uuid})"),
            attributes: attributes.map(|(name, value)| (name.into(), value)).into(),
        }
    }

    #[test]
    fn the_accelerator_config_has_all_devices_but_nothing_of_one_machine() {
        let first = [gpu(0, "a"), gpu(1, "b")];
        let config = accelerator_config(&first);
        assert_eq!(accelerator_config(&[gpu(0, "c"), gpu(1, "d")]), config, "another machine with the same GPUs");
        let changed = |change: fn(&mut DeviceDescription)| {
            let mut devices = first.clone();
            change(&mut devices[1]);
            accelerator_config(&devices)
        };
        let others = [
            accelerator_config(&first[..1]),
            changed(|device| device.id = 2),
            changed(|device| device.process_index = 1),
            changed(|device| device.kind = "NVIDIA H200".into()),
            changed(|device| {
                device.attributes.insert("coords".into(), NamedValue::Ints(vec![0, 1, 0]));
            }),
            changed(|device| {
                device.attributes.insert("slice_index".into(), 1.into());
            }),
        ];
        for (i, other) in others.iter().enumerate() {
            assert!(*other != config && !others[..i].contains(other), "{other}");
        }
    }

    #[test]
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    fn instruction_sets_are_listed() {
        assert!(instruction_sets().split_whitespace().any(|name| name == "sse2"));
    }
}
