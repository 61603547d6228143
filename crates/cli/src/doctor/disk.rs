//! The caches of this user with their sizes, and free disk space.

use super::check::Check;
use grpo_backend_tpu::aot;
use grpo_core::readable_bytes;
use grpo_files::{check_folder, counted, folder_size, free_space};
use grpo_models::Hub;
use serde_json::json;
use std::path::{Path, PathBuf};

/// Less free space in bytes is a problem: a plugin, or a checkpoint of a small model, does not fit.
const LEAST: u64 = 1_000_000_000;
/// Less free space in bytes is a note.
const LITTLE: u64 = 10_000_000_000;

/// A cache, and the variable that sets its folder.
struct Cache {
    name: &'static str,
    folder: Option<PathBuf>,
    variable: &'static str,
}

pub(super) fn checks() -> Vec<Check> {
    let hub = Hub::from_env();
    let plugins = grpo_pjrt::install::cache_dir().ok();
    let xdg = |name, folder| Cache { name, folder, variable: "XDG_CACHE_HOME" };
    let caches = [
        xdg("plugins", plugins.clone()),
        xdg("programs", grpo_setup::device::compile_cache()),
        xdg("analyses", aot::user_cache()),
        Cache { name: "hub", folder: Some(hub.cache.clone()), variable: "HF_HUB_CACHE" },
    ];
    let mut checks: Vec<Check> = caches.iter().map(Cache::check).collect();
    checks.extend(plugins.map(|folder| space("disk.caches", &folder)));
    checks.push(space("disk.hub", &hub.cache));
    checks.push(match std::env::current_dir() {
        Ok(folder) => here(&folder),
        Err(error) => Check::problem("disk.here", format!("the current folder: {error}"), "change to another folder"),
    });
    checks
}

impl Cache {
    fn check(&self) -> Check {
        let id = format!("caches.{}", self.name);
        let Some(folder) = &self.folder else {
            return Check::note(id, "no folder")
                .advise("set HOME or XDG_CACHE_HOME to an absolute path")
                .with(json!({ "path": null, "bytes": null, "files": null }));
        };
        let size = folder_size(folder);
        let values = size.as_ref().ok().copied().flatten();
        let values = json!({
            "path": folder.display().to_string(),
            "bytes": values.map(|size| size.bytes),
            "files": values.map(|size| size.files),
        });
        let check = match size.and_then(|size| check_folder(folder).map(|()| size)) {
            Ok(Some(size)) => {
                let (bytes, files) = (readable_bytes(size.bytes), counted(size.files, "file"));
                Check::ok(id, format!("{bytes} in {files}, {}", folder.display()))
            }
            Ok(None) => Check::ok(id, format!("empty, {}", folder.display())),
            Err(error) => Check::problem(
                id,
                with_cause(error),
                format!("make it a folder that this user can read and write, or set {} to another one", self.variable),
            ),
        };
        check.with(values)
    }
}

/// Judges the free space of the file system of a folder, which need not exist.
fn space(id: &str, folder: &Path) -> Check {
    let existing = folder.ancestors().find(|folder| folder.exists()).unwrap_or(folder);
    judge(id, free_space(existing), existing)
}

/// Judges the current folder, in which runs create their folders.
fn here(folder: &Path) -> Check {
    let check = space("disk.here", folder);
    match check_folder(folder) {
        Ok(()) => check,
        Err(error) => Check::note("disk.here", with_cause(error))
            .advise("runs are written to `runs` in the current folder: change to another one, or set --run-dir")
            .with(check.values),
    }
}

/// Returns the message of an error with its causes.
fn with_cause(error: grpo_files::Error) -> String {
    format!("{:#}", anyhow::Error::from(error))
}

fn judge(id: &str, free: Option<u64>, folder: &Path) -> Check {
    let path = folder.display().to_string();
    let check = match free {
        None => Check::note(id, format!("the system does not report the free space of {path}")),
        Some(bytes) => {
            let found = format!("{} free, {path}", readable_bytes(bytes));
            match bytes {
                0..LEAST => Check::problem(id, found, "remove files, or use a folder on another disk"),
                LEAST..LITTLE => Check::note(id, found),
                _ => Check::ok(id, found),
            }
        }
    };
    check.with(json!({ "path": path, "free_bytes": free }))
}

#[cfg(test)]
mod tests {
    use super::super::check::Status;
    use super::*;

    #[test]
    fn little_free_space_is_a_note_and_less_is_a_problem() {
        let status = |free| judge("disk.here", free, Path::new("/a")).status;
        let found = [Some(LEAST - 1), Some(LEAST), Some(LITTLE), None].map(status);
        assert_eq!(found, [Status::Problem, Status::Note, Status::Ok, Status::Note]);
    }

    #[test]
    fn a_cache_that_is_no_folder_is_a_problem() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("cache");
        let check = || Cache { name: "hub", folder: Some(path.clone()), variable: "HF_HUB_CACHE" }.check();
        let empty = check();
        assert!(empty.status == Status::Ok && empty.found.starts_with("empty, "), "{empty:?}");
        assert!(empty.values["bytes"].is_null(), "{empty:?}");
        std::fs::write(&path, "text").expect("a file");
        let file = check();
        assert!(file.status == Status::Problem && file.found.contains(&path.display().to_string()), "{file:?}");
        assert!(file.advice.is_some_and(|advice| advice.contains("HF_HUB_CACHE")));
        assert!(space("disk.hub", &path.join("missing")).values["free_bytes"].is_u64());
    }
}
