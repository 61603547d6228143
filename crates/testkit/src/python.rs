//! Python packages that tests run, from the package index that the machine's own `pip` uses.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A folder with Python packages, in the cache where PJRT plugins are, too.
#[derive(Clone, Debug)]
pub struct Packages(PathBuf);

impl Packages {
    /// Fetches `requirements`, each with its version, unless a process has fetched them before. Any number of processes may ask at the
    /// same time.
    ///
    /// # Panics
    /// Without python3, pip, a package index or room on the disk: tests cannot do without.
    pub fn install(name: &str, requirements: &[&str]) -> Self {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let cache = variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache")));
        let cache = cache.unwrap_or_else(std::env::temp_dir).join("grpo");
        let folder = cache.join(format!("{name}-{}", requirements.join("-").replace("==", "-")));
        fs::create_dir_all(&cache).expect("the cache can be made");
        let lock = File::create(folder.with_added_extension("lock")).expect("a lock file");
        lock.lock().expect("a lock");
        if !folder.exists() {
            let scratch = folder.with_added_extension("tmp");
            let _ = fs::remove_dir_all(&scratch);
            let mut pip = Command::new("python3");
            pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-warn-conflicts"]);
            let pip = pip.arg("--target").arg(&scratch).args(requirements);
            let output = pip.output().expect("these tests need python3 with pip");
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "the packages cannot be installed by {pip:?}\n{said}");
            fs::rename(&scratch, &folder).expect("the packages can be put into place");
        }
        Self(folder)
    }

    /// The folder, for `PYTHONPATH`.
    pub fn path(&self) -> &Path {
        &self.0
    }
}
