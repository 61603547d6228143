//! Atomic writes of whole files, and reads up to a size limit.

use crate::error::{Error, Result};
use crate::unique::UniqueKeys;
use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

/// The limit of symbolic links followed from one name, as in Linux.
const MAX_LINKS: usize = 40;
/// The size in bytes of the header's length, with which a safetensors file starts.
const SAFETENSORS_PREFIX: usize = 8;
pub(crate) const TEMPORARY: (&str, &str) = (".grpo-", ".tmp");
/// The size limit of a safetensors header in bytes, defined by the format.
const MAX_SAFETENSORS_HEADER: u64 = 100_000_000;

/// Writes a file of this program so that readers see either the old or the new contents.
///
/// The contents go to a new file with an unpredictable name in the same folder, which is synced and renamed. An existing file is
/// replaced; a symbolic link is not followed.
///
/// # Errors
/// [`Error::Io`]; an existing file is then unchanged.
pub fn write_atomically(path: &Path, content: &[u8]) -> Result<()> {
    let permissions = std::fs::symlink_metadata(path).ok().filter(Metadata::is_file).map(|m| m.permissions());
    replace(path, permissions, content).map_err(|e| Error::io("write", path, e))
}

/// Like [`write_atomically`], for secrets: only the owner may read the file, on systems with such permissions.
///
/// # Errors
/// The errors of [`write_atomically`].
pub fn write_private(path: &Path, content: &[u8]) -> Result<()> {
    replace(path, private(), content).map_err(|e| Error::io("write", path, e))
}

#[cfg(unix)]
fn private() -> Option<Permissions> {
    Some(std::os::unix::fs::PermissionsExt::from_mode(0o600))
}

#[cfg(not(unix))]
fn private() -> Option<Permissions> {
    None
}

/// Writes a file that the user named.
///
/// A regular or missing file is replaced as by [`write_atomically`], following symbolic links and keeping permissions. Anything else
/// (a device such as `/dev/null`, a pipe, `/dev/stdout`) is opened and written to.
///
/// # Errors
/// [`Error::Io`].
pub fn write_output(path: &Path, content: &[u8]) -> Result<()> {
    let write = || match Destination::of(path)? {
        Destination::File { path, permissions } => replace(&path, permissions, content),
        // Standard output may be redirected to a file that already has contents.
        Destination::Stream(path) => OpenOptions::new().append(true).open(path)?.write_all(content),
    };
    write().map_err(|e| Error::io("write", path, e))
}

/// Checks, before any work, that [`write_output`] can write `path`: its folder exists and is writable.
///
/// # Errors
/// [`Error::Io`] with the problem.
pub fn check_output(path: &Path) -> Result<()> {
    let check = || match Destination::of(path)? {
        Destination::File { path, .. } => temporary_in(folder_of(&path)).map(drop),
        Destination::Stream(_) => Ok(()),
    };
    check().map_err(|e| Error::io("write", path, e))
}

/// Creates the folder `path` if it is missing, and checks that it is writable.
///
/// # Errors
/// [`Error::Io`].
pub fn make_folder(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).map_err(|e| Error::io("create the folder", path, e))?;
    temporary_in(path).map(drop).map_err(|e| Error::io("write into the folder", path, e))
}

/// Checks, before any work, that [`make_folder`] can create `path`: its nearest existing ancestor is writable.
///
/// # Errors
/// [`Error::Io`].
pub fn check_folder(path: &Path) -> Result<()> {
    let absolute = std::path::absolute(path).map_err(|e| Error::io("write into the folder", path, e))?;
    let nearest = absolute.ancestors().find(|folder| folder.symlink_metadata().is_ok()).unwrap_or(path);
    temporary_in(nearest).map(drop).map_err(|e| Error::io("write into the folder", path, e))
}

/// Returns the bytes of a regular file of at most `limit` bytes.
///
/// # Errors
/// `InvalidInput` for a folder, a device, a pipe or a socket; `FileTooLarge`; errors of reading.
pub fn read_regular(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let (file, length) = open_regular(path)?;
    let too_large =
        |found: u64| io::Error::new(ErrorKind::FileTooLarge, format!("expected at most {limit} bytes, got {found}"));
    if length > limit {
        return Err(too_large(length));
    }
    let bytes = read_to_end(file, Vec::new(), limit.saturating_add(1))?;
    // The file grew, or the system does not report its length.
    if bytes.len() as u64 > limit { Err(too_large(bytes.len() as u64)) } else { Ok(bytes) }
}

/// Returns the bytes of a safetensors file, a regular file that is not longer than its header says. The parser of the result checks
/// whether it is too short or its header is invalid; with an invalid header, only the header is read.
///
/// # Errors
/// `InvalidInput` for a folder, a device, a pipe or a socket; `FileTooLarge`; `InvalidData` for a header with a duplicate key; errors of
/// reading.
pub fn read_safetensors(path: &Path) -> io::Result<Vec<u8>> {
    let (file, length) = open_regular(path)?;
    let head = read_to_end(&file, Vec::new(), SAFETENSORS_PREFIX as u64)?;
    let Ok(prefix) = <[u8; SAFETENSORS_PREFIX]>::try_from(head.as_slice()) else { return Ok(head) };
    let header = u64::from_le_bytes(prefix);
    if header > MAX_SAFETENSORS_HEADER {
        return Ok(head);
    }
    let bytes = read_to_end(&file, head, header)?;
    let text = &bytes[SAFETENSORS_PREFIX..];
    if serde_json::from_slice::<serde::de::IgnoredAny>(text).is_ok() {
        let UniqueKeys = serde_json::from_slice(text)
            .map_err(|e| io::Error::new(ErrorKind::InvalidData, format!("the header is not readable: {e}")))?;
    }
    let Some(data) = data_length(text) else { return Ok(bytes) };
    let justified = (SAFETENSORS_PREFIX as u64 + header).saturating_add(data);
    if length > justified {
        let message = format!("expected {justified} bytes, which is what its header describes, got {length}");
        return Err(io::Error::new(ErrorKind::FileTooLarge, message));
    }
    read_to_end(&file, bytes, data)
}

/// Opens a regular file for reading, and returns it with its length.
///
/// # Errors
/// `InvalidInput` for anything else; errors of opening.
pub fn open_regular(path: &Path) -> io::Result<(File, u64)> {
    // Checked before opening, because opening a pipe waits for a writer.
    expect_regular(&std::fs::metadata(path)?)?;
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    expect_regular(&metadata)?;
    Ok((file, metadata.len()))
}

/// Checks that `metadata` describes a regular file.
///
/// # Errors
/// `InvalidInput` for anything else.
pub fn expect_regular(metadata: &Metadata) -> io::Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    let message = format!("expected a regular file, got {}", kind(metadata));
    Err(io::Error::new(ErrorKind::InvalidInput, message))
}

/// The identity of a file, equal for all its names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId(u64, u64);

impl FileId {
    /// Returns the identity of the file with this `metadata`.
    #[cfg(unix)]
    pub fn of(metadata: &Metadata) -> Self {
        use std::os::unix::fs::MetadataExt;
        Self(metadata.dev(), metadata.ino())
    }

    /// Returns the same identity for all files, because other systems do not allow an open file to be moved or deleted.
    #[cfg(not(unix))]
    pub fn of(_: &Metadata) -> Self {
        Self(0, 0)
    }

    /// Returns `true` if `path` currently names this file.
    pub fn is_at(self, path: &Path) -> bool {
        std::fs::metadata(path).is_ok_and(|metadata| Self::of(&metadata) == self)
    }
}

/// Makes `options` refuse symbolic links, on systems that support it.
pub fn without_links(options: &mut OpenOptions) -> &mut OpenOptions {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(options, libc::O_NOFOLLOW);
    options
}

/// Syncs the entries of a folder to disk, on systems that support it.
///
/// # Errors
/// Errors of opening and syncing the folder.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(path)?.sync_all() } else { Ok(()) }
}

enum Destination {
    /// A regular or missing file, with symbolic links resolved.
    File { path: PathBuf, permissions: Option<Permissions> },
    /// A device, a pipe, or an open file of a process.
    Stream(PathBuf),
}

impl Destination {
    fn of(path: &Path) -> io::Result<Self> {
        let mut path = path.to_owned();
        for _ in 0..MAX_LINKS {
            let folder = folder_of(&path);
            let folder = folder.canonicalize().map_err(|e| {
                io::Error::new(e.kind(), format!("the folder {} cannot be used: {e}", folder.display()))
            })?;
            let Some(name) = path.file_name() else { return Err(ErrorKind::IsADirectory.into()) };
            path = folder.join(name);
            // /proc/self/fd/1 and the like name an open file, whose users would not see a replacement.
            if folder.starts_with("/proc") {
                return Ok(Self::Stream(path));
            }
            match std::fs::symlink_metadata(&path) {
                Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Self::File { path, permissions: None }),
                Err(e) => return Err(e),
                Ok(m) if m.is_symlink() => path = folder.join(std::fs::read_link(&path)?),
                Ok(m) if m.is_dir() => return Err(ErrorKind::IsADirectory.into()),
                Ok(m) if m.is_file() => return Ok(Self::File { path, permissions: Some(m.permissions()) }),
                Ok(_) => return Ok(Self::Stream(path)),
            }
        }
        Err(io::Error::other(format!("more than {MAX_LINKS} symbolic links")))
    }
}

/// Removes leftovers of processes that were killed while writing in `folder`: files, and folders of [`NewFolder`](crate::NewFolder).
///
/// # Errors
/// Errors of reading the folder and of removing files.
pub fn remove_temporary(folder: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let is_ours = name.to_str().is_some_and(|name| name.starts_with(TEMPORARY.0) && name.ends_with(TEMPORARY.1));
        match entry.file_type()? {
            kind if is_ours && kind.is_file() => std::fs::remove_file(entry.path())?,
            kind if is_ours && kind.is_dir() => std::fs::remove_dir_all(entry.path())?,
            _ => {}
        }
    }
    Ok(())
}

fn replace(path: &Path, permissions: Option<Permissions>, content: &[u8]) -> io::Result<()> {
    let folder = folder_of(path);
    let mut file = temporary_in(folder)?;
    // Set before the contents are written, so that other users can never open the file.
    if let Some(permissions) = permissions {
        file.as_file().set_permissions(permissions)?;
    }
    file.write_all(content)?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    sync_folder(folder)
}

/// Creates a file with an unpredictable name and default permissions.
fn temporary_in(folder: &Path) -> io::Result<tempfile::NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(TEMPORARY.0).suffix(TEMPORARY.1);
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder)
}

/// Returns the parent folder of `path`; for a bare name, the current folder.
pub(crate) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Appends at most `limit` bytes to `bytes`. Memory grows only with the bytes that exist.
fn read_to_end(file: impl Read, mut bytes: Vec<u8>, limit: u64) -> io::Result<Vec<u8>> {
    file.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns the length of the data that a safetensors header describes; `None` if the header is invalid.
fn data_length(header: &[u8]) -> Option<u64> {
    #[derive(serde::Deserialize)]
    struct Entry {
        data_offsets: Option<(u64, u64)>,
    }
    let entries: std::collections::BTreeMap<String, Entry> = serde_json::from_slice(header).ok()?;
    Some(entries.values().filter_map(|entry| entry.data_offsets).map(|(_, end)| end).max().unwrap_or(0))
}

#[cfg(unix)]
fn kind(metadata: &Metadata) -> &'static str {
    use std::os::unix::fs::FileTypeExt;
    let kind = metadata.file_type();
    match () {
        () if kind.is_dir() => "a folder",
        () if kind.is_fifo() => "a pipe",
        () if kind.is_socket() => "a socket",
        () if kind.is_char_device() || kind.is_block_device() => "a device",
        () => "something else",
    }
}

#[cfg(not(unix))]
fn kind(metadata: &Metadata) -> &'static str {
    if metadata.is_dir() { "a folder" } else { "something else" }
}

#[cfg(test)]
pub(crate) mod tests;
