//! Folders that are created completely or not at all.

use crate::error::{Error, Result};
use crate::whole::{TEMPORARY, folder_of, sync_folder};
use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The suffix of a folder that is being replaced on systems that cannot exchange two names.
const REPLACED: &str = ".old";

/// A folder that is being written. It has an unpredictable name beside its target until [`NewFolder::finish`] renames it. If it is dropped
/// before, it is removed.
///
/// ```
/// let place = tempfile::tempdir()?;
/// let target = place.path().join("model");
/// let folder = grpo_files::NewFolder::create(&target, false)?;
/// std::fs::write(folder.path().join("config.json"), "{}")?;
/// assert!(!target.exists());
/// folder.finish()?;
/// assert_eq!(std::fs::read(target.join("config.json"))?, b"{}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct NewFolder {
    temporary: TempDir,
    target: PathBuf,
    replace: bool,
}

impl NewFolder {
    /// Creates the folder that becomes `target`, and its parents. With `replace`, an existing folder of this name is removed after the new one
    /// has replaced it.
    ///
    /// # Errors
    /// [`Error::Io`], also if `target` exists and `replace` is not set, or if it is not a folder. An empty folder is always replaced.
    pub fn create(target: &Path, replace: bool) -> Result<Self> {
        let make = || {
            let target = std::path::absolute(target)?;
            expect_free(&target, replace)?;
            let parent = folder_of(&target);
            std::fs::create_dir_all(parent)?;
            let mut builder = tempfile::Builder::new();
            builder.prefix(TEMPORARY.0).suffix(TEMPORARY.1);
            // The default of tempfile would exclude other users from the finished folder.
            #[cfg(unix)]
            builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o777));
            Ok(Self { temporary: builder.tempdir_in(parent)?, target, replace })
        };
        make().map_err(|e| Error::io("create the folder", target, e))
    }

    /// Returns the temporary path of the folder until [`NewFolder::finish`].
    pub fn path(&self) -> &Path {
        self.temporary.path()
    }

    /// Returns the final path.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Syncs everything to disk and renames the folder to its target.
    ///
    /// # Errors
    /// [`Error::Io`]; the target is then unchanged, and the new folder is removed.
    pub fn finish(self) -> Result<()> {
        let Self { temporary, target, replace } = self;
        let finish = || {
            sync_all(temporary.path())?;
            expect_free(&target, replace)?;
            if is_empty_or_absent(&target)? {
                std::fs::rename(temporary.path(), &target)?;
                // The folder was renamed, so there is nothing to remove.
                let _ = temporary.keep();
            } else {
                swap(&temporary, &target)?;
            }
            sync_folder(folder_of(&target))
        };
        finish().map_err(|e| Error::io("write the folder", &target, e))
    }
}

/// Renames `temporary` to `target` and removes the old `target`. Where supported, exchanging the two names is atomic.
fn swap(temporary: &TempDir, target: &Path) -> io::Result<()> {
    #[cfg(any(target_os = "linux", target_vendor = "apple"))]
    {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        match renameat_with(CWD, temporary.path(), CWD, target, RenameFlags::EXCHANGE) {
            // `temporary` is now the old folder, which is removed on drop.
            Ok(()) => return Ok(()),
            Err(e) if [rustix::io::Errno::INVAL, rustix::io::Errno::NOSYS, rustix::io::Errno::NOTSUP].contains(&e) => {}
            Err(e) => return Err(e.into()),
        }
    }
    // A process that ends between the two renames leaves the old folder under a name that is not cleaned up.
    let old = temporary.path().with_extension(&REPLACED[1..]);
    std::fs::rename(target, &old)?;
    if let Err(e) = std::fs::rename(temporary.path(), target) {
        std::fs::rename(&old, target)?;
        return Err(e);
    }
    std::fs::remove_dir_all(&old)
}

fn expect_free(target: &Path, replace: bool) -> io::Result<()> {
    match std::fs::symlink_metadata(target) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        Err(e) => Err(e),
        Ok(metadata) if !metadata.is_dir() => {
            Err(io::Error::new(ErrorKind::AlreadyExists, "something that is no folder has this name"))
        }
        Ok(_) if replace || is_empty_or_absent(target)? => Ok(()),
        Ok(_) => Err(io::Error::new(ErrorKind::AlreadyExists, "the folder is there and not empty")),
    }
}

fn is_empty_or_absent(folder: &Path) -> io::Result<bool> {
    match std::fs::read_dir(folder) {
        Ok(mut entries) => Ok(entries.next().is_none()),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(true),
        Err(e) => Err(e),
    }
}

/// Syncs all files of a folder, recursively, and their names.
fn sync_all(folder: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        match entry.file_type()? {
            kind if kind.is_dir() => sync_all(&entry.path())?,
            kind if kind.is_file() => File::open(entry.path())?.sync_all()?,
            _ => {}
        }
    }
    sync_folder(folder)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::whole::tests::names;

    fn written(target: &Path, replace: bool, file: &str) -> NewFolder {
        let folder = NewFolder::create(target, replace).unwrap();
        std::fs::create_dir(folder.path().join("sub")).unwrap();
        std::fs::write(folder.path().join("sub").join(file), "x").unwrap();
        folder
    }

    #[test]
    fn a_new_folder_is_complete_or_absent() {
        let place = tempfile::tempdir().unwrap();
        let target = place.path().join("runs/model");
        drop(written(&target, false, "a"));
        assert!(names(&place.path().join("runs")).is_empty(), "nothing stays of one that is dropped");
        written(&target, false, "a").finish().unwrap();
        assert_eq!(
            (names(&place.path().join("runs")), names(&target.join("sub"))),
            (vec!["model".into()], vec!["a".into()])
        );
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let plain = place.path().join("plain");
            std::fs::create_dir(&plain).unwrap();
            let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode();
            assert_eq!(mode(&target), mode(&plain), "others may read it as any folder");
        }
    }

    #[test]
    fn an_existing_folder_is_replaced_only_on_request() {
        let place = tempfile::tempdir().unwrap();
        let target = place.path().join("model");
        std::fs::create_dir(&target).unwrap();
        let unfinished = written(&target, false, "a");
        std::fs::write(target.join("mine"), "").unwrap();
        let error = unfinished.finish().unwrap_err();
        assert!(matches!(&error, Error::Io { source, .. } if source.to_string().contains("not empty")), "{error}");
        assert_eq!((names(place.path()), names(&target)), (vec!["model".into()], vec!["mine".into()]));
        assert!(NewFolder::create(&target, false).is_err());
        written(&target, true, "b").finish().unwrap();
        assert_eq!((names(place.path()), names(&target)), (vec!["model".into()], vec!["sub".into()]));
        let file = place.path().join("file");
        std::fs::write(&file, "mine").unwrap();
        assert!(NewFolder::create(&file, true).is_err());
        assert_eq!(std::fs::read(&file).unwrap(), b"mine");
    }

    #[test]
    fn leftovers_of_a_killed_process_are_removed_later() {
        let place = tempfile::tempdir().unwrap();
        std::mem::forget(written(&place.path().join("model"), false, "a"));
        std::fs::create_dir(place.path().join(".grpo-mine")).unwrap();
        assert_eq!(names(place.path()).len(), 2);
        crate::remove_temporary(place.path()).unwrap();
        assert_eq!(names(place.path()), [".grpo-mine"]);
    }
}
