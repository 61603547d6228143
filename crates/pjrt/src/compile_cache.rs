//! Compiled programs on disk, so that a program is compiled once per machine.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::cache::{Cache, Key};
use crate::client::Client;
use crate::compile_options::CompileOptions;
use crate::device::Device;
use crate::error::Result;
use crate::executable::LoadedExecutable;

/// A directory of compiled programs.
///
/// An entry is found by program, options, the compiler's flags in the environment, platform, its version, the version of
/// the API and the model of the first device; for XLA's CPU also by the instruction sets of this machine. An entry that is damaged, that has the layout of another
/// release, or that the plugin will not load, is never used: it is compiled again and replaced
/// ([`CacheOutcome::Replaced`]). Several processes may share a
/// directory, but not several users: an entry is code, so one that another user may write to is refused.
#[derive(Clone, Debug)]
pub struct CompileCache {
    entries: Cache,
}

/// The origin of a compiled program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheOutcome {
    /// The program was read from the directory.
    Hit,
    /// The compiler made the program, which is in the directory now.
    Miss,
    /// There was an entry that cannot be used: damaged, or of another release. The compiler made the program, which is in its
    /// place now.
    Replaced,
    /// The compiler made the program, and it is not in the directory: the plugin cannot serialize it, or it could not be written,
    /// which a warning in the log says.
    Uncacheable,
}

impl CompileCache {
    /// Uses `directory`, which is created when the first entry is written.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        CompileCache { entries: Cache::new(directory) }
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        self.entries.directory()
    }

    /// Compiles `program`, or loads it if that has been done before. A program that has been compiled and cannot be written (no
    /// room on the disk, say) is returned all the same, with a warning in the log.
    ///
    /// # Errors
    ///
    /// Those of [`Client::compile`], and [`crate::Error::Exposed`] if others may write to the entry or to a folder above it.
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
        let serialized = executable.executable().serialize();
        match serialized.and_then(|serialized| self.entries.write(&key, &serialized)) {
            Ok(()) => return Ok((executable, outcome)),
            // Of no use to anybody who reads the log: no program of this plugin is kept.
            Err(error) if error.is_unsupported() => {}
            Err(error) => {
                let folder = self.directory().display();
                tracing::warn!("{folder}: a compiled program is not kept, and will be compiled again: {error}");
            }
        }
        Ok((executable, CacheOutcome::Uncacheable))
    }
}

fn key(client: &Client, program: &[u8], options: &CompileOptions) -> Result<Key> {
    let (major, minor) = client.plugin().api_version();
    let api = format!("{major}.{minor}");
    // Versions say nothing of it, and machines with other GPUs may share the directory.
    let first = client.addressable_devices().first().map(Device::description).transpose()?;
    let model = first.map_or(String::new(), |device| device.kind);
    Ok(Key::of(&[
        client.platform_name().as_bytes(),
        client.platform_version().as_bytes(),
        api.as_bytes(),
        model.as_bytes(),
        // Code for a processor with other instructions ends the process, and homes are shared between machines.
        if client.platform_name() == "cpu" { instruction_sets() } else { "" }.as_bytes(),
        &options.fingerprint(),
        program,
    ]))
}

/// The instruction sets of this machine's processor, as Linux lists them; empty elsewhere.
fn instruction_sets() -> &'static str {
    static LISTED: OnceLock<String> = OnceLock::new();
    LISTED.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        // x86-64, and Arm.
        let listed = text.lines().find(|line| line.starts_with("flags") || line.starts_with("Features"));
        listed.unwrap_or_default().to_owned()
    })
}

#[cfg(test)]
mod tests {
    #[test]
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    fn instruction_sets_are_listed() {
        assert!(super::instruction_sets().split_whitespace().any(|name| name == "sse2"));
    }
}
