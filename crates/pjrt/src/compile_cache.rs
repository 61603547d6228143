//! Compiled programs on disk, so that a program is compiled once per machine.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

use crate::access;
use crate::client::Client;
use crate::compile_options::CompileOptions;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::executable::LoadedExecutable;

/// A directory of compiled programs.
///
/// An entry is found by program, options, platform, its version, the version of the API and the model of the first device.
/// An entry that is damaged, or that the plugin will not load, is compiled again and replaced. Several processes may share a
/// directory, but not several users: an entry is code, so one that another user may write to is refused.
#[derive(Clone, Debug)]
pub struct CompileCache {
    directory: PathBuf,
}

/// The origin of a compiled program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheOutcome {
    /// The program was read from the directory.
    Hit,
    /// The compiler made the program, which is in the directory now.
    Miss,
    /// The compiler made the program, and the plugin cannot serialize it.
    Uncacheable,
}

/// An entry: this, its key, the digest of the rest, and the rest, which is the serialized executable.
const MAGIC: &[u8; 16] = b"pjrt-executable1";
const DIGEST: usize = 32;

impl CompileCache {
    /// Uses `directory`, which is created when the first entry is written.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        CompileCache { directory: directory.into() }
    }

    /// Compiles `program`, or loads it if that has been done before.
    ///
    /// # Errors
    ///
    /// Those of [`Client::compile`], [`Error::Cache`] if the entry cannot be written, and [`Error::Exposed`] if others may write
    /// to the entry or to a folder above it.
    pub fn compile(
        &self,
        client: &Client,
        program: impl AsRef<[u8]>,
        options: &CompileOptions,
    ) -> Result<(LoadedExecutable, CacheOutcome)> {
        let key = key(client, program.as_ref(), options)?;
        let path = self.directory.join(format!("{}.pjrt", hex(&key)));
        if let Ok(place) = path.canonicalize().or_else(|_| self.directory.canonicalize()) {
            access::check(&place)?;
        }
        if let Some(executable) = read(&path, &key).and_then(|serialized| client.load(&serialized).ok()) {
            return Ok((executable, CacheOutcome::Hit));
        }
        let executable = client.compile(program, options)?;
        match executable.executable().serialize() {
            Ok(serialized) => {
                write(&path, &key, &serialized).map_err(|reason| Error::Cache { path, reason })?;
                Ok((executable, CacheOutcome::Miss))
            }
            Err(error) if error.is_unsupported() => Ok((executable, CacheOutcome::Uncacheable)),
            Err(error) => Err(error),
        }
    }
}

fn key(client: &Client, program: &[u8], options: &CompileOptions) -> Result<[u8; DIGEST]> {
    let (major, minor) = client.plugin().api_version();
    let options = options.encode();
    let api = format!("{major}.{minor}");
    // Versions say nothing of it, and machines with other GPUs may share the directory.
    let first = client.addressable_devices().first().map(Device::description).transpose()?;
    let model = first.map_or(String::new(), |device| device.kind);
    let parts = [
        client.platform_name().as_bytes(),
        client.platform_version().as_bytes(),
        api.as_bytes(),
        model.as_bytes(),
        &options,
        program,
    ];
    let mut hasher = Sha256::new();
    for part in parts {
        // The length keeps neighbours apart.
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    Ok(hasher.finalize().into())
}

fn read(path: &Path, key: &[u8; DIGEST]) -> Option<Vec<u8>> {
    let mut entry = fs::read(path).ok()?;
    let head = MAGIC.len() + 2 * DIGEST;
    let (front, serialized) = entry.split_at_checked(head)?;
    let digest: [u8; DIGEST] = Sha256::digest(serialized).into();
    let intact = front == [&MAGIC[..], key, &digest].concat();
    entry.drain(..head);
    intact.then_some(entry)
}

/// Writes beside the entry and renames: a reader sees all of it or nothing.
fn write(path: &Path, key: &[u8; DIGEST], serialized: &[u8]) -> std::io::Result<()> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let unique = COUNTER.fetch_add(1, Ordering::Relaxed);
    let temporary = path.with_extension(format!("{}-{unique}.tmp", std::process::id()));
    access::create_folder(path.parent().unwrap_or(path))?;
    let digest: [u8; DIGEST] = Sha256::digest(serialized).into();
    let written = fs::File::create(&temporary).and_then(|mut file| {
        file.write_all(&[&MAGIC[..], key, &digest].concat())?;
        file.write_all(serialized)
    });
    let result = written.and_then(|()| fs::rename(&temporary, path));
    if result.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    result
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
