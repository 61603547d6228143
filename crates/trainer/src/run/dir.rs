//! The folder of a run.
//!
//! | file | what |
//! |---|---|
//! | `config.yaml` | the resolved configuration |
//! | `metrics.jsonl` | one object per step and evaluation, TRL's names |
//! | `completions.jsonl` | sampled completions now and then |
//! | `checkpoints/` | see [`super::checkpoint`] |
//! | `summary.json` | written when the run is done |
//! | `curves.svg` | drawn when the run stops or is done |
//! | `tensorboard/` | event files, with `logging.tensorboard` |
//! | `wandb/`, `wandb-id` | parts of a W&B run and its id, with `wandb.mode` |

use crate::config_layers::{Layers, to_yaml};
use crate::error::{Error, Result};
use crate::train_config::TrainConfig;
use std::fs::{File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

/// A run folder that this process holds: no other process trains in it meanwhile.
#[derive(Debug)]
pub struct RunDir {
    root: PathBuf,
    /// The lock ends with the process, however that ends.
    _lock: File,
}

/// Most runs of one name in one folder.
const MAX_NUMBER: u32 = 999_999;

impl RunDir {
    /// A new folder for a run: `path`, or the next free `runs/<run.name>-<number>`.
    ///
    /// # Errors
    /// [`Error::RunDir`] when there is a run in the folder already; [`Error::Io`].
    pub fn create(path: Option<&Path>, config: &TrainConfig) -> Result<Self> {
        let root = match path {
            Some(path) => path.to_owned(),
            None => next_numbered(Path::new("runs"), &config.run.name)?,
        };
        std::fs::create_dir_all(&root).map_err(|e| Error::io("create the run folder", &root, e))?;
        let dir = Self { _lock: lock(&root)?, root };
        for name in ["config.yaml", "metrics.jsonl", "checkpoints", "summary.json"] {
            if dir.root.join(name).exists() {
                let reason = format!(
                    "it holds a run already ({name}): name another folder with --run-dir, or continue that run with \
                     `--resume {}`",
                    dir.root.display()
                );
                return Err(Error::RunDir { path: dir.root, reason });
            }
        }
        write_atomically(&dir.config_path(), to_yaml(config)?.as_bytes())?;
        Ok(dir)
    }

    /// The folder of a run that was begun before.
    ///
    /// # Errors
    /// [`Error::RunDir`] when there is no run in it or another process works on it.
    pub fn open(path: &Path) -> Result<Self> {
        if !path.join("config.yaml").is_file() {
            let reason = "there is no run in it (no config.yaml)".to_owned();
            return Err(Error::RunDir { path: path.to_owned(), reason });
        }
        Ok(Self { _lock: lock(path)?, root: path.to_owned() })
    }

    /// The configuration that was resolved when the run began.
    ///
    /// # Errors
    /// As [`Layers::file`] and [`Layers::resolve`].
    pub fn config(&self) -> Result<TrainConfig> {
        Layers::new().file(&self.config_path())?.resolve()
    }

    /// The folder itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// `config.yaml`.
    pub fn config_path(&self) -> PathBuf {
        self.root.join("config.yaml")
    }

    /// `metrics.jsonl`.
    pub fn metrics_path(&self) -> PathBuf {
        self.root.join("metrics.jsonl")
    }

    /// `completions.jsonl`.
    pub fn completions_path(&self) -> PathBuf {
        self.root.join("completions.jsonl")
    }

    /// `checkpoints/`.
    pub fn checkpoints_path(&self) -> PathBuf {
        self.root.join("checkpoints")
    }

    /// `summary.json`.
    pub fn summary_path(&self) -> PathBuf {
        self.root.join("summary.json")
    }

    /// `curves.svg`.
    pub fn curves_path(&self) -> PathBuf {
        self.root.join("curves.svg")
    }
}

/// Writes a whole file so that it has either its old content or the new one, whatever happens meanwhile.
///
/// # Errors
/// [`Error::Io`].
pub fn write_atomically(path: &Path, content: &[u8]) -> Result<()> {
    let temporary = path.with_extension("tmp");
    let write = || {
        let mut file = File::create(&temporary)?;
        file.write_all(content)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)
    };
    write().map_err(|e| Error::io("write", path, e))?;
    path.parent().map_or(Ok(()), sync_dir)
}

/// Renames what is at `path`, if anything is, to a name beside it that nothing has: `NAME.old-1`. Returns that name.
///
/// # Errors
/// [`Error::Io`].
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

/// Makes the entries of a folder durable, where the system can.
pub(crate) fn sync_dir(path: &Path) -> Result<()> {
    if cfg!(unix) {
        // "" is the parent of a bare file name.
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        File::open(path).and_then(|dir| dir.sync_all()).map_err(|e| Error::io("sync", path, e))?;
    }
    Ok(())
}

fn lock(root: &Path) -> Result<File> {
    let path = root.join(".lock");
    let file = File::create(&path).map_err(|e| Error::io("create", &path, e))?;
    match file.try_lock() {
        // A file system without locks is no reason not to train.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            Err(Error::RunDir { path: root.to_owned(), reason: "another process is working on this run".into() })
        }
    }
}

/// Creates `parent/name-NNN` with the first number that is free; two processes never get the same one.
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
    Err(Error::RunDir { path: parent.to_owned(), reason: format!("every number of {name} is taken: use --run-dir") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_with_a_run_is_never_taken_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b");
        let config = TrainConfig { seed: 3, ..TrainConfig::default() };
        let dir = RunDir::create(Some(&path), &config).unwrap();
        assert_eq!(dir.config().unwrap(), config);
        assert!(RunDir::open(&path).unwrap_err().to_string().contains("another process"));
        drop(dir);
        let error = RunDir::create(Some(&path), &config).unwrap_err().to_string();
        assert!(error.contains("holds a run already") && error.contains("--resume"), "{error}");
        assert!(RunDir::open(&path).is_ok());
        assert!(RunDir::open(folder.path()).unwrap_err().to_string().contains("no config.yaml"));
    }

    #[test]
    fn numbers_count_up() {
        let folder = tempfile::tempdir().unwrap();
        for number in ["x-001", "x-002", "x-003"] {
            assert_eq!(next_numbered(folder.path(), "x").unwrap(), folder.path().join(number));
        }
    }
}
