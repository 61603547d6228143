//! Folders of tests in the user's cache, next to the PJRT plugins.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Returns the project's folder in the user's cache.
pub(crate) fn folder() -> PathBuf {
    let cache = variable("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| variable("HOME").map(|home| Path::new(&home).join(".cache")));
    cache.unwrap_or_else(std::env::temp_dir).join("grpo")
}

/// Returns an environment variable that is not empty.
pub(crate) fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// If the files of `folder` have more than `limit` bytes, removes those that were read longest ago until half of the limit remains. Other
/// processes may do the same, or read and write the folder: a file that is open stays readable.
pub(crate) fn shrink(folder: &Path, limit: u64) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let described = entries.flatten().filter_map(|entry| {
        let metadata = entry.metadata().ok().filter(fs::Metadata::is_file)?;
        // Linux updates the time of the last read at most once a day.
        let used = metadata.accessed().into_iter().chain(metadata.modified()).max();
        Some((used.unwrap_or(SystemTime::UNIX_EPOCH), metadata.len(), entry.path()))
    });
    let mut files: Vec<_> = described.collect();
    let mut total: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
    if total <= limit {
        return;
    }
    files.sort();
    for (_, bytes, path) in files {
        if total <= limit / 2 {
            break;
        }
        let _ = fs::remove_file(path);
        total -= bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{File, FileTimes};
    use std::time::Duration;

    #[test]
    fn files_that_were_read_longest_ago_are_removed_above_the_limit() {
        let cache = tempfile::tempdir().unwrap();
        for age in 0..10_u64 {
            let path = cache.path().join(age.to_string());
            fs::write(&path, [0; 100]).unwrap();
            let used = SystemTime::now() - Duration::from_secs(3600 * age);
            let long_ago = SystemTime::UNIX_EPOCH;
            let times = FileTimes::new().set_accessed(used).set_modified(long_ago);
            File::options().write(true).open(&path).unwrap().set_times(times).unwrap();
        }
        let names = || {
            let mut names: Vec<_> =
                fs::read_dir(cache.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names
        };
        shrink(cache.path(), 1000);
        assert_eq!(names().len(), 10);
        shrink(cache.path(), 999);
        assert_eq!(names(), ["0", "1", "2", "3"]);
        shrink(&cache.path().join("missing"), 0);
    }
}
