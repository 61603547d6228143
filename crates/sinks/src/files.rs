//! Files of records: one write per row, so that a process that is killed hardly ever leaves half of one.

use crate::error::{Error, Result};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// A file that did not exist before.
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

/// What is in a folder, sorted; nothing when there is no such folder.
pub(crate) fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let read = match std::fs::read_dir(folder) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        read => read.map_err(Error::io("list", folder))?,
    };
    let mut paths = Vec::new();
    for entry in read {
        paths.push(entry.map_err(Error::io("list", folder))?.path());
    }
    paths.sort();
    Ok(paths)
}

/// The name of a path, if it is text.
pub(crate) fn name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

/// The name of this machine.
pub(crate) fn host() -> String {
    gethostname::gethostname().to_string_lossy().into_owned()
}
