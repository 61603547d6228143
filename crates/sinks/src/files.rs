//! Append-only files of records, with one write per row, so that a killed process rarely leaves a partial row.

use crate::error::{Error, Result};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub(crate) struct Appender {
    path: PathBuf,
    file: File,
}

impl Appender {
    pub(crate) fn create(path: PathBuf) -> Result<Self> {
        let file = File::create_new(&path).map_err(Error::io("create", &path))?;
        Ok(Self { path, file })
    }

    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(Error::io("append to", &self.path))
    }

    pub(crate) fn sync(&mut self) -> Result<()> {
        self.file.sync_data().map_err(Error::io("sync", &self.path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// Returns the entries of a folder, sorted; empty if the folder does not exist.
pub(crate) fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let read = match std::fs::read_dir(folder) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        read => read.map_err(Error::io("list", folder))?,
    };
    let paths = read.map(|entry| Ok(entry?.path())).collect::<std::io::Result<BTreeSet<_>>>();
    Ok(paths.map_err(Error::io("list", folder))?.into_iter().collect())
}

/// Returns the file name of a path, if it is UTF-8.
pub(crate) fn name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

pub(crate) fn host() -> String {
    gethostname::gethostname().to_string_lossy().into_owned()
}
