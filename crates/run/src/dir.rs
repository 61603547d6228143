//! The folder of a run.
//!
//! | file | what |
//! |---|---|
//! | `config.yaml` | the resolved configuration; may be edited before a resume, see [`super::changes`]. The only file with [secrets](grpo_files::redact); only its owner can read it if it has any |
//! | `config.recorded.yaml` | the configuration that the run last started or resumed with, without secrets |
//! | `fingerprint.json` | digests of the model and data files at the start of the run, and the folder in which it was started |
//! | `rows.json` | the positions of the rows in the data files, so that a resumed run need not read them all again; may be deleted |
//! | `changes.jsonl` | changes of the configuration on resume, created with the first one |
//! | `metrics.jsonl` | one object per step and evaluation, with TRL's metric names |
//! | `completions.jsonl` | sampled completions at intervals |
//! | `checkpoints/` | see [`super::checkpoint`] |
//! | `model/` | the trained model in Hugging Face's layout (or an adapter in PEFT's), for a finished run of a pretrained model |
//! | `summary.json` | written when the run finishes |
//! | `failure.json` | the error that ended the run, removed on resume, see [`super::failure`] |
//! | `curves.svg` | drawn when the run stops or finishes |
//! | `tensorboard/` | event files, with `logging.tensorboard` |
//! | `wandb/`, `wandb-id` | files of a W&B run and its id, with `wandb.mode` |
//!
//! `config.yaml` can name code, such as a plugin. It is therefore compared with `config.recorded.yaml`, whose hash is in every checkpoint,
//! before anything that it names is loaded. A changed key that may not change is an error with its name.

use crate::error::{Error, Result};
use grpo_files::{FileId, check_folder, remove_temporary, without_links, write_atomically, write_private};
use grpo_files::{Layers, redacted, to_yaml_with_secrets};
use grpo_run_config::TrainConfig;
use serde::Serialize;
use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};

/// A locked run folder: no other process can train in it.
#[derive(Debug)]
pub struct RunDir {
    root: PathBuf,
    /// The identity of the folder, which survives a rename.
    id: FileId,
    /// The lock, which the system releases when the process ends.
    _lock: File,
}

/// Returns the run folder that contains `path`, and the option that names the checkpoint that is or contains `path`.
fn run_around(path: &Path) -> Option<(&Path, String)> {
    let is_run = |folder: &&Path| folder.join("config.yaml").is_file() && folder.join("checkpoints").is_dir();
    let run = path.ancestors().skip(1).take(4).find(is_run)?;
    let checkpoints = run.join("checkpoints");
    let checkpoint = path.ancestors().find(|folder| folder.parent() == Some(&checkpoints));
    let name = checkpoint.and_then(|folder| folder.file_name()?.to_str());
    Some((run, name.map_or_else(String::new, |name| format!(" --from {name}"))))
}

/// The parent of run folders that are not named explicitly.
const RUNS: &str = "runs";

/// The largest number in the names of numbered run folders.
const MAX_NUMBER: u32 = 999_999;

impl RunDir {
    /// Creates the folder of a new run: `path`, or the next free `runs/<run.name>-<number>`. config.yaml is written after `write_others` has
    /// written the files that every run has.
    ///
    /// # Errors
    /// [`Error::RunDir`] if the folder already has a run; [`Error::File`]; the errors of `write_others`.
    pub(crate) fn create(
        path: Option<&Path>,
        config: &TrainConfig,
        write_others: impl FnOnce(&Self) -> Result<()>,
    ) -> Result<Self> {
        let root = match path {
            Some(path) => path.to_owned(),
            None => next_numbered(Path::new(RUNS), &config.run.name)?,
        };
        std::fs::create_dir_all(&root).map_err(|e| Error::io("create the run folder", &root, e))?;
        let dir = Self::hold(root)?;
        expect_no_run(&dir.root)?;
        dir.write_recorded_config(config)?;
        write_others(&dir)?;
        // The last file makes the folder a run: a process that is killed before leaves a folder that another run may use.
        dir.write_own_config(config)?;
        Ok(dir)
    }

    /// Checks, before any work, that a new run can use the folder. Creates nothing.
    ///
    /// # Errors
    /// [`Error::RunDir`] if the folder already has a run; [`Error::File`] if it is not writable.
    pub fn check(path: Option<&Path>) -> Result<()> {
        if let Some(path) = path {
            expect_no_run(path)?;
        }
        Ok(check_folder(path.unwrap_or(Path::new(RUNS)))?)
    }

    /// Opens and locks the folder of an existing run.
    ///
    /// # Errors
    /// [`Error::RunDir`] if it has no run or another process uses it.
    pub fn open(path: &Path) -> Result<Self> {
        if !path.join("config.yaml").is_file() {
            let reason = match run_around(path) {
                Some((run, from)) => format!(
                    "expected the folder of a run, and this is a part of the run {run}: name the run, as in `{run}{from}`",
                    run = run.display()
                ),
                None => "there is no run in it (no config.yaml)".to_owned(),
            };
            return Err(Error::run_dir(path, reason));
        }
        let dir = Self::hold(path.to_owned())?;
        remove_temporary(path).map_err(|e| Error::io("clean", path, e))?;
        Ok(dir)
    }

    fn hold(root: PathBuf) -> Result<Self> {
        let lock = lock(&root)?;
        let metadata = std::fs::metadata(&root).map_err(|e| Error::io("open the run folder", &root, e))?;
        Ok(Self { id: FileId::of(&metadata), _lock: lock, root })
    }

    /// Returns the configuration of `config.yaml` with the assignments `set` (`a.b=value`) applied.
    ///
    /// # Errors
    /// The errors of [`Layers::file`], [`Layers::set`] and [`Layers::resolve`].
    pub fn config(&self, set: &[String]) -> Result<TrainConfig> {
        Ok(Layers::new().file(&self.config_path())?.set(set)?.resolve()?)
    }

    /// Returns the configuration that the run last started or resumed with.
    ///
    /// # Errors
    /// [`Error::RunDir`] if the file is missing; the errors of [`Layers::file`] and [`Layers::resolve`].
    pub fn recorded_config(&self) -> Result<TrainConfig> {
        let path = self.recorded_config_path();
        if !path.is_file() {
            let reason = "it is missing, so nothing says whether config.yaml is still the run's: restore it, or start a \
                          new run from config.yaml with `--config`";
            return Err(Error::run_dir(&path, reason));
        }
        Ok(Layers::new().file(&path)?.resolve()?)
    }

    /// Writes `config` to config.yaml, with secrets and then readable by its owner only, and to config.recorded.yaml, without secrets.
    ///
    /// # Errors
    /// [`Error::File`].
    pub(super) fn write_config(&self, config: &TrainConfig) -> Result<()> {
        // With this order, a crash between the two writes is detected and recorded as a change on the next resume.
        self.write_own_config(config)?;
        self.write_recorded_config(config)
    }

    fn write_own_config(&self, config: &TrainConfig) -> Result<()> {
        let write = if without_secrets(config)?.1 { write_private } else { write_atomically };
        Ok(write(&self.config_path(), to_yaml_with_secrets(config)?.as_bytes())?)
    }

    fn write_recorded_config(&self, config: &TrainConfig) -> Result<()> {
        let yaml = to_yaml_with_secrets(&without_secrets(config)?.0)?;
        Ok(write_atomically(&self.recorded_config_path(), yaml.as_bytes())?)
    }

    /// Returns `true` if the folder is still in its place: not moved, deleted or replaced.
    pub fn is_in_place(&self) -> bool {
        self.id.is_at(&self.root)
    }

    /// Returns the path of the folder.
    pub fn root(&self) -> &Path {
        &self.root
    }
}

macro_rules! paths {
    ($($name:ident: $file:literal,)*) => {
        impl RunDir {
            $(
                #[doc = concat!("Returns the path of `", $file, "`.")]
                pub fn $name(&self) -> PathBuf {
                    self.root.join($file)
                }
            )*
        }
    };
}

paths! {
    config_path: "config.yaml",
    recorded_config_path: "config.recorded.yaml",
    fingerprint_path: "fingerprint.json",
    rows_path: "rows.json",
    changes_path: "changes.jsonl",
    metrics_path: "metrics.jsonl",
    completions_path: "completions.jsonl",
    checkpoints_path: "checkpoints",
    summary_path: "summary.json",
    failure_path: "failure.json",
    model_path: "model",
    curves_path: "curves.svg",
}

/// Returns a configuration without secrets, and whether it had any.
fn without_secrets(config: &TrainConfig) -> Result<(TrainConfig, bool)> {
    redacted(config).map_err(|e| Error::Text(format!("configuration: {e}")))
}

/// Writes a value as JSON.
///
/// # Errors
/// [`Error::File`].
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let json = serde_json::to_vec_pretty(value).map_err(|e| Error::Text(format!("{}: {e}", path.display())))?;
    Ok(write_atomically(path, &json)?)
}

/// Checks that a folder has no run.
fn expect_no_run(root: &Path) -> Result<()> {
    let run_files = ["config.yaml", "metrics.jsonl", "completions.jsonl", "checkpoints", "summary.json"];
    let Some(name) = run_files.iter().find(|name| root.join(name).symlink_metadata().is_ok()) else { return Ok(()) };
    let reason = format!(
        "it holds a run already ({name}): name another folder with --run-dir, or continue that run with `--resume {}`",
        root.display()
    );
    Err(Error::run_dir(root, reason))
}

/// Renames the file or folder at `path`, if any, to the first free `NAME.old-1`, `NAME.old-2`, ... Returns the new name.
///
/// # Errors
/// [`Error::File`].
pub(crate) fn set_aside(path: &Path) -> Result<Option<PathBuf>> {
    if !path.exists() {
        return Ok(None);
    }
    let numbered = |n: u32| {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".old-{n}"));
        PathBuf::from(name)
    };
    let Some(aside) = (1..u32::MAX).map(numbered).find(|p| !p.exists()) else {
        return Err(Error::Text(format!("no free name beside {}", path.display())));
    };
    std::fs::rename(path, &aside).map_err(|e| Error::io("rename", path, e))?;
    Ok(Some(aside))
}

fn lock(root: &Path) -> Result<File> {
    let path = root.join(".lock");
    // The lock file is never truncated and links are not followed: in a shared folder, a link could lead to the user's files.
    let mut options = OpenOptions::new();
    let options = without_links(options.write(true).create(true).truncate(false));
    let file = options.open(&path).map_err(|e| Error::io("open the lock (a regular file, no link)", &path, e))?;
    match file.try_lock() {
        // File systems without locks are accepted.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(Error::run_dir(root, "another process is working on this run")),
    }
}

/// Creates `parent/name-NNN` with the first free number; two processes never get the same number.
fn next_numbered(parent: &Path, name: &str) -> Result<PathBuf> {
    std::fs::create_dir_all(parent).map_err(|e| Error::io("create", parent, e))?;
    for number in 1..=MAX_NUMBER {
        let path = parent.join(format!("{name}-{number:03}"));
        match std::fs::create_dir(&path) {
            Ok(()) => return Ok(path),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(Error::io("create", &path, e)),
        }
    }
    Err(Error::run_dir(parent, format!("every number of {name} is taken: use --run-dir")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftovers_of_a_killed_process_are_removed_and_other_files_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b");
        let config = TrainConfig { seed: 3, ..TrainConfig::built_in() };
        let dir = RunDir::create(Some(&path), &config, |_| Ok(())).unwrap();
        assert_eq!(dir.config(&["seed=4".to_owned()]).unwrap(), TrainConfig { seed: 4, ..config.clone() });
        assert_eq!(dir.recorded_config().unwrap(), config);
        drop(dir);
        std::fs::write(path.join(".grpo-a1B2c3.tmp"), "half").unwrap();
        std::fs::write(path.join("notes.tmp"), "mine").unwrap();
        assert!(RunDir::open(&path).is_ok());
        assert!(!path.join(".grpo-a1B2c3.tmp").exists() && path.join("notes.tmp").exists());
    }

    #[test]
    fn a_folder_without_all_files_of_a_new_run_is_no_run() {
        let folder = tempfile::tempdir().unwrap();
        let config = TrainConfig::built_in();
        let interrupted = |dir: &RunDir| {
            assert!(dir.recorded_config().is_ok() && !dir.config_path().exists());
            Err(Error::Text("killed".into()))
        };
        RunDir::create(Some(folder.path()), &config, interrupted).unwrap_err();
        assert!(RunDir::open(folder.path()).unwrap_err().to_string().contains("there is no run in it"));
        RunDir::check(Some(folder.path())).unwrap();
        RunDir::create(Some(folder.path()), &TrainConfig { seed: 3, ..config }, |_| Ok(())).unwrap();
        assert_eq!(RunDir::open(folder.path()).unwrap().recorded_config().unwrap().seed, 3);
    }

    #[test]
    #[cfg(unix)]
    fn planted_links_are_not_followed() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let precious = folder.path().join("precious");
        std::fs::write(&precious, "data").unwrap();
        let path = folder.path().join("run");
        std::fs::create_dir(&path).unwrap();
        for (name, to) in [(".lock", "precious"), ("completions.jsonl", "nothing"), ("summary.json", "nothing")] {
            symlink(folder.path().join(to), path.join(name)).unwrap();
            let error = RunDir::create(Some(&path), &TrainConfig::built_in(), |_| Ok(())).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
            std::fs::remove_file(path.join(name)).unwrap();
        }
        symlink(&precious, path.join("config.tmp")).unwrap();
        RunDir::create(Some(&path), &TrainConfig::built_in(), |_| Ok(())).unwrap();
        assert_eq!(std::fs::read(&precious).unwrap(), b"data");
    }

    #[test]
    fn run_folders_are_numbered() {
        let folder = tempfile::tempdir().unwrap();
        for number in ["x-001", "x-002", "x-003"] {
            assert_eq!(next_numbered(folder.path(), "x").unwrap(), folder.path().join(number));
        }
    }
}
