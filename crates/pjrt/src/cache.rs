//! A folder of entries under content keys.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

use crate::access;
use crate::error::{Error, Result};

/// A directory of entries that are expensive to compute. The key of an entry is a hash of all inputs of the
/// computation.
///
/// Several processes may share a directory, but not several users: an entry that another user may write to is refused.
/// A damaged entry counts as missing.
///
/// ```
/// use grpo_pjrt::{Cache, Key};
///
/// # let folder = tempfile::tempdir()?;
/// let cache = Cache::new(folder.path());
/// let key = Key::of(&[b"compiler 1.2", b"a program"]);
/// assert_eq!(cache.read(&key)?, None);
/// cache.write(&key, b"what the compiler made of it")?;
/// assert_eq!(cache.read(&key)?.as_deref(), Some(&b"what the compiler made of it"[..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Cache {
    directory: PathBuf,
}

/// The key of an entry: a SHA-256 of its inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key([u8; DIGEST]);

/// The first bytes of an entry; its key, the digest of the content, and the content follow.
const MAGIC: &[u8; 16] = b"pjrt-executable1";
const DIGEST: usize = 32;

impl Key {
    /// Returns the key of all `parts` in this order.
    pub fn of(parts: &[&[u8]]) -> Self {
        let mut hasher = Sha256::new();
        for part in parts {
            // The length separates neighbouring parts.
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        Key(hasher.finalize().into())
    }
}

impl Cache {
    /// Uses `directory`, which is created when the first entry is written.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Cache { directory: directory.into() }
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Reads the entry of `key`; `None` if it is missing or damaged.
    ///
    /// # Errors
    ///
    /// [`Error::Exposed`] if others may write to the entry or to a folder above it.
    pub fn read(&self, key: &Key) -> Result<Option<Vec<u8>>> {
        let path = self.path(key);
        if let Ok(place) = path.canonicalize().or_else(|_| self.directory.canonicalize()) {
            access::check(&place)?;
        }
        Ok(read(&path, key))
    }

    /// Returns `true` if there is an entry of `key`, intact or damaged.
    pub fn contains(&self, key: &Key) -> bool {
        self.path(key).exists()
    }

    /// Writes the entry of `key` and replaces an existing one.
    ///
    /// # Errors
    ///
    /// [`Error::Cache`] if it cannot be written.
    pub fn write(&self, key: &Key, content: &[u8]) -> Result<()> {
        let path = self.path(key);
        write(&path, key, content).map_err(|reason| Error::Cache { path, reason })
    }

    fn path(&self, key: &Key) -> PathBuf {
        let name: String = key.0.iter().map(|byte| format!("{byte:02x}")).collect();
        self.directory.join(name + ".pjrt")
    }
}

fn read(path: &Path, key: &Key) -> Option<Vec<u8>> {
    let mut entry = read_regular(path).ok()?;
    let head = MAGIC.len() + 2 * DIGEST;
    let (front, content) = entry.split_at_checked(head)?;
    let digest: [u8; DIGEST] = Sha256::digest(content).into();
    let intact = front == [&MAGIC[..], &key.0, &digest].concat();
    entry.drain(..head);
    intact.then_some(entry)
}

/// Reads a regular file. Others are refused: opening a pipe could block, and a device may have no end.
fn read_regular(path: &Path) -> std::io::Result<Vec<u8>> {
    if fs::metadata(path)?.is_file() { fs::read(path) } else { Err(std::io::ErrorKind::InvalidInput.into()) }
}

/// Writes a temporary file and renames it, so that a reader sees the complete entry or none.
fn write(path: &Path, key: &Key, content: &[u8]) -> std::io::Result<()> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let unique = COUNTER.fetch_add(1, Ordering::Relaxed);
    let temporary = path.with_extension(format!("{}-{unique}.tmp", std::process::id()));
    access::create_folder(path.parent().unwrap_or(path))?;
    let digest: [u8; DIGEST] = Sha256::digest(content).into();
    let written = fs::File::create(&temporary).and_then(|mut file| {
        file.write_all(&[&MAGIC[..], &key.0, &digest].concat())?;
        file.write_all(content)
    });
    let result = written.and_then(|()| fs::rename(&temporary, path));
    if result.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    result
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    /// Reading a pipe without a writer would block, and reading a device would not end.
    #[test]
    fn entries_that_are_not_regular_files_count_as_missing() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(folder.path());
        let keys = [b"pipe", b"fold", b"zero"].map(|part| Key::of(&[part]));
        let made = std::process::Command::new("mkfifo").arg(cache.path(&keys[0])).status().unwrap();
        assert!(made.success());
        fs::create_dir(cache.path(&keys[1])).unwrap();
        symlink("/dev/zero", cache.path(&keys[2])).unwrap();
        for key in &keys {
            let (sender, receiver) = std::sync::mpsc::channel();
            let (cache, key) = (cache.clone(), *key);
            std::thread::spawn(move || sender.send(cache.read(&key).ok().flatten()));
            let found = receiver.recv_timeout(std::time::Duration::from_secs(10));
            assert_eq!(found.expect("it is not waited for"), None);
        }
        let key = &keys[0];
        cache.write(key, b"program").unwrap();
        assert_eq!(cache.read(key).unwrap().as_deref(), Some(&b"program"[..]));
    }
}
