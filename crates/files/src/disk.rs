//! Disk space: the size of a folder, and the free space of its file system.

use crate::error::{Error, Result};
use std::io::ErrorKind;
use std::path::Path;

/// The size of a folder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FolderSize {
    /// The sum of the lengths of the files in bytes.
    pub bytes: u64,
    /// The number of files.
    pub files: u64,
}

/// Returns the size of a folder with its subfolders; `None` if it does not exist. Symbolic links below it are not followed. Entries that
/// disappear meanwhile are skipped.
///
/// # Errors
/// [`Error::Io`] with the folder that cannot be read.
///
/// # Examples
/// ```
/// let folder = tempfile::tempdir()?;
/// std::fs::write(folder.path().join("a"), [0; 1000])?;
/// let size = grpo_files::folder_size(folder.path())?.expect("it exists");
/// assert_eq!((size.bytes, size.files), (1000, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn folder_size(folder: &Path) -> Result<Option<FolderSize>> {
    if let Err(error) = std::fs::metadata(folder) {
        return match error.kind() {
            ErrorKind::NotFound => Ok(None),
            _ => Err(Error::io("read", folder, error)),
        };
    }
    let mut size = FolderSize::default();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries = match std::fs::read_dir(&folder) {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            entries => entries.map_err(|error| Error::io("read", &folder, error))?,
        };
        for entry in entries {
            let entry = entry.map_err(|error| Error::io("read", &folder, error))?;
            // Does not follow links: files in Hugging Face's cache have several.
            let metadata = match entry.metadata() {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                metadata => metadata.map_err(|error| Error::io("read", &entry.path(), error))?,
            };
            if metadata.is_dir() {
                folders.push(entry.path());
            } else if metadata.is_file() {
                size.bytes = size.bytes.saturating_add(metadata.len());
                size.files += 1;
            }
        }
    }
    Ok(Some(size))
}

/// Returns the free bytes of the file system of `folder`; `None` if the system does not report them.
pub fn free_space(folder: &Path) -> Option<u64> {
    #[cfg(unix)]
    {
        let stat = rustix::fs::statvfs(folder).ok()?;
        Some(stat.f_bavail.saturating_mul(stat.f_frsize))
    }
    #[cfg(not(unix))]
    {
        let _ = folder;
        None
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn links_are_not_followed_and_missing_folders_have_no_size() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        assert_eq!(folder_size(&path("missing")).unwrap(), None);
        std::fs::create_dir_all(path("a/b")).unwrap();
        std::fs::write(path("a/b/large"), [1; 5000]).unwrap();
        std::fs::write(path("small"), [1; 10]).unwrap();
        std::os::unix::fs::symlink(path("a/b/large"), path("link")).unwrap();
        // A loop.
        std::os::unix::fs::symlink(folder.path(), path("a/loop")).unwrap();
        assert_eq!(folder_size(folder.path()).unwrap(), Some(FolderSize { bytes: 5010, files: 2 }));
        let text = folder_size(&path("small")).unwrap_err().to_string();
        assert!(text.contains(&path("small").display().to_string()), "{text}");
        assert!(free_space(folder.path()).unwrap() > 0);
    }
}
