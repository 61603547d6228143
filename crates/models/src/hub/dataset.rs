//! Data sets of the hub: the listing of a commit, and its files.
//!
//! The listing is saved next to the snapshots, in `listings/COMMIT.json`, so that a data set in the cache is used without a network, and a
//! branch stays at its commit until the folder is removed from the cache. Other programs fill the cache without a listing; then the hub is
//! asked, and offline the files in the snapshot are the listing.

use super::repository::{Repository, is_inside};
use super::{Hub, MAIN, commit_in, is_name, is_revision};
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// The size limit of a listing in bytes.
pub(super) const MAX_LISTING: u64 = 32 << 20;

impl Hub {
    /// Returns the names of all files of the data set `name` (`OWNER/NAME`) at `revision` (a branch, a tag or a commit; `main` by default),
    /// relative to its root. A name may come from a server and is checked when the file is fetched.
    ///
    /// # Errors
    /// [`Error::DatasetNotFound`] with all attempts: nothing in the cache, no network, no such data set or revision, a missing token.
    pub fn list_dataset(&self, name: &str, revision: Option<&str>) -> Result<Vec<String>> {
        let revision = revision.unwrap_or(MAIN);
        let mut tried = checked(name, revision)?;
        let repository = Repository::dataset(name);
        let folder = self.cache.join(repository.cache_folder());
        let commit = commit_in(&folder, revision);
        let names = commit.as_ref().map_or(Ok(None), |commit| read_listing(&folder, commit));
        match names {
            Ok(Some(names)) => return Ok(names),
            Ok(None) => {
                tried.push(format!("the cache has no listing of its revision {revision}: {}", folder.display()))
            }
            Err(reason) => tried.push(reason),
        }
        let reason = match self.request_listing(repository, revision) {
            Ok(names) => return Ok(names),
            Err(reason) => reason,
        };
        // Another program has filled the cache.
        let snapshot = commit.ok().map(|commit| folder.join("snapshots").join(commit));
        match snapshot.map(|snapshot| names_in(&snapshot)) {
            Some(Ok(names)) if !names.is_empty() => {
                if !self.offline {
                    log_fallback(name, &reason);
                }
                Ok(names)
            }
            _ => {
                tried.push(reason);
                Err(Error::DatasetNotFound { name: name.to_owned(), tried })
            }
        }
    }

    /// Returns the paths of files of a data set on this machine, in the order of `files`. Missing files are downloaded. [`Hub::list_dataset`]
    /// comes before it and selects the commit.
    ///
    /// # Errors
    /// [`Error::DatasetNotFound`] for a name that is not a path inside the data set, and for a file that is neither in the cache nor
    /// downloaded.
    pub fn fetch_dataset(&self, name: &str, revision: Option<&str>, files: &[String]) -> Result<Vec<PathBuf>> {
        let revision = revision.unwrap_or(MAIN);
        let mut tried = checked(name, revision)?;
        let missing = |tried| Err(Error::DatasetNotFound { name: name.to_owned(), tried });
        if let Some(file) = files.iter().find(|file| !is_inside(file)) {
            tried.push(format!("it lists the file {file:?}: expected a relative path of plain names"));
            return missing(tried);
        }
        let repository = Repository::dataset(name);
        let folder = self.cache.join(repository.cache_folder());
        let commit = match commit_in(&folder, revision) {
            Ok(commit) => commit,
            Err(reason) => {
                tried.push(reason);
                return missing(tried);
            }
        };
        let snapshot = folder.join("snapshots").join(&commit);
        let absent = files.iter().find(|file| !snapshot.join(file).is_file());
        if let Some(file) = absent {
            tried.push(format!("the cache {} has no {file}", snapshot.display()));
            if let Err(reason) = self.download_files(repository, revision, &commit, files) {
                tried.push(reason);
                return missing(tried);
            }
        } else if matches!(read_listing(&folder, &commit), Ok(None)) {
            // Without a listing, the names of shards say whether all of them are there.
            if let Some(reason) = files.iter().find_map(|file| missing_shards(&snapshot, file)) {
                tried.push(reason);
                return missing(tried);
            }
        }
        Ok(files.iter().map(|file| snapshot.join(file)).collect())
    }

    #[cfg(not(feature = "hub"))]
    fn request_listing(&self, repository: Repository<'_>, revision: &str) -> std::result::Result<Vec<String>, String> {
        Err(without_downloads(repository, revision))
    }

    #[cfg(not(feature = "hub"))]
    fn download_files(
        &self,
        repository: Repository<'_>,
        revision: &str,
        _: &str,
        _: &[String],
    ) -> std::result::Result<(), String> {
        Err(without_downloads(repository, revision))
    }

    #[cfg(feature = "hub")]
    fn request_listing(&self, repository: Repository<'_>, revision: &str) -> std::result::Result<Vec<String>, String> {
        self.expect_online()?;
        super::download::listing(self, repository, revision)
    }

    #[cfg(feature = "hub")]
    fn download_files(
        &self,
        repository: Repository<'_>,
        revision: &str,
        commit: &str,
        files: &[String],
    ) -> std::result::Result<(), String> {
        self.expect_online()?;
        super::download::download_files(self, repository, revision, commit, files)
    }
}

#[cfg(not(feature = "hub"))]
fn without_downloads(repository: Repository<'_>, revision: &str) -> String {
    format!(
        "this program was built without downloads (feature `hub`); `hf download {} --repo-type dataset --revision {revision}` fills the cache",
        repository.name
    )
}

#[cfg(feature = "hub")]
fn log_fallback(name: &str, reason: &str) {
    tracing::warn!(name, "using the files in the cache, because the hub has not listed the data set: {reason}");
}

#[cfg(not(feature = "hub"))]
fn log_fallback(_: &str, _: &str) {}

/// Checks the name and the revision of a data set, and returns the list for failed attempts.
fn checked(name: &str, revision: &str) -> Result<Vec<String>> {
    let fault = |reason: String| Err(Error::DatasetNotFound { name: name.to_owned(), tried: vec![reason] });
    if !is_name(name) || !name.contains('/') {
        return fault("it is not a name on Hugging Face (OWNER/NAME)".into());
    }
    if !is_revision(revision) {
        return fault(format!("{revision:?} is not a branch, a tag or a commit"));
    }
    Ok(vec![])
}

/// Returns the path of the saved listing of a commit.
pub(super) fn listing_path(folder: &Path, commit: &str) -> PathBuf {
    folder.join("listings").join(format!("{commit}.json"))
}

/// Returns the saved listing of a commit; `None` if there is none.
fn read_listing(folder: &Path, commit: &str) -> std::result::Result<Option<Vec<String>>, String> {
    let path = listing_path(folder, commit);
    if !path.exists() {
        return Ok(None);
    }
    let remove = |reason: String| format!("{}: {reason}: remove it", path.display());
    let bytes = grpo_files::read_regular(&path, MAX_LISTING).map_err(|error| remove(error.to_string()))?;
    serde_json::from_slice(&bytes).map(Some).map_err(|error| remove(error.to_string()))
}

/// Returns the names of the files in a snapshot.
fn names_in(snapshot: &Path) -> std::io::Result<Vec<String>> {
    let (mut names, mut folders) = (vec![], vec![(snapshot.to_owned(), String::new())]);
    while let Some((folder, prefix)) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            match entry.file_type()?.is_dir() {
                true => folders.push((entry.path(), format!("{prefix}{name}/"))),
                // A link to a removed blob is not a file.
                false if entry.path().is_file() => names.push(format!("{prefix}{name}")),
                false => {}
            }
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// Returns which shard of `NAME-00000-of-00002.EXTENSION` a snapshot lacks.
fn missing_shards(snapshot: &Path, file: &str) -> Option<String> {
    let (before, after) = file.rsplit_once("-of-")?;
    let (digits, end) = after.split_at_checked(5)?;
    let (prefix, _) = before.rsplit_once('-')?;
    let count: u32 = digits.parse().ok()?;
    let names = (0..count).map(|index| format!("{prefix}-{index:05}-of-{digits}{end}"));
    let lacking = names.into_iter().find(|name| !snapshot.join(name).is_file())?;
    Some(format!("the cache has only a part of it: {} has no {lacking}", snapshot.display()))
}
