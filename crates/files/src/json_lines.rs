//! Append-only logs with one JSON object per line, which can be truncated to the length at a checkpoint.

use crate::error::{Error, Result};
use crate::whole::{FileId, expect_regular, open_regular, without_links};
use serde::{Serialize, de::DeserializeOwned};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

/// An append-only log with one JSON object per line.
#[derive(Debug)]
pub struct JsonLines {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl JsonLines {
    /// Creates an empty log.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn create(path: &Path) -> Result<Self> {
        let mut options = OpenOptions::new();
        let options = without_links(options.write(true).create(true).truncate(true));
        let file = options.open(path).map_err(|e| Error::io("create", path, e))?;
        Ok(Self { path: path.to_owned(), file, bytes: 0 })
    }

    /// Opens an existing log and truncates it to `bytes` bytes.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Rows`] if the file is shorter.
    pub fn truncate(path: &Path, bytes: u64) -> Result<Self> {
        let file = Self::check(path, bytes)?;
        file.set_len(bytes).map_err(|e| Error::io("continue", path, e))?;
        Ok(Self { path: path.to_owned(), file, bytes })
    }

    /// Opens a log and checks that it has at least `bytes` bytes.
    ///
    /// # Errors
    /// The errors of [`JsonLines::truncate`].
    pub fn check(path: &Path, bytes: u64) -> Result<File> {
        let io = |e| Error::io("continue", path, e);
        expect_regular(&std::fs::metadata(path).map_err(io)?).map_err(io)?;
        let file = OpenOptions::new().append(true).open(path).map_err(io)?;
        let found = file.metadata().map_err(io)?.len();
        if found < bytes {
            let reason = format!(
                "{found} bytes, but it had {bytes} when the checkpoint was taken: rows are missing; restore the file, \
                 or continue from an earlier checkpoint with `--from`"
            );
            return Err(Error::Rows { path: path.to_owned(), reason });
        }
        Ok(file)
    }

    /// Appends a row with a single write, so that readers rarely see a partial row.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn append<T: Serialize>(&mut self, row: &T) -> Result<()> {
        let mut line = serde_json::to_vec(row).map_err(|e| Error::Text(format!("a row of JSON: {e}")))?;
        line.push(b'\n');
        self.file.write_all(&line).map_err(|e| Error::io("append to", &self.path, e))?;
        self.bytes += line.len() as u64;
        Ok(())
    }

    /// Syncs the file to disk and returns its length in bytes.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn sync(&mut self) -> Result<u64> {
        self.file.sync_all().map_err(|e| Error::io("sync", &self.path, e))?;
        Ok(self.bytes)
    }

    /// Returns `true` if the file is still in its place: not moved, deleted or replaced.
    pub fn is_in_place(&self) -> bool {
        self.file.metadata().is_ok_and(|metadata| FileId::of(&metadata).is_at(&self.path))
    }
}

/// Returns every row of a log.
///
/// # Errors
/// [`Error::Io`]; [`Error::Rows`] with the number of the first invalid line.
pub fn read_rows<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>> {
    let mut rows = Vec::new();
    each_row(path, u64::MAX, |row| {
        rows.push(row);
        Ok(())
    })?;
    Ok(rows)
}

/// Passes every row of the first `bytes` bytes of a file to `check`; an error of `check` gets the line number. The bytes must end with a
/// whole row, unless the file is shorter.
pub fn each_row<T: DeserializeOwned>(
    path: &Path,
    bytes: u64,
    mut check: impl FnMut(T) -> std::result::Result<(), String>,
) -> Result<()> {
    let io = |e| Error::io("read", path, e);
    let (file, length) = open_regular(path).map_err(io)?;
    let mut lines = BufReader::new(file.take(bytes));
    let (mut line, mut number) = (Vec::new(), 0u64);
    while lines.read_until(b'\n', &mut line).map_err(io)? > 0 {
        number += 1;
        let whole = line.ends_with(b"\n") || length < bytes;
        let row = if whole { serde_json::from_slice(&line).map_err(|e| e.to_string()) } else { Err(CUT.to_owned()) };
        row.and_then(&mut check)
            .map_err(|e| Error::Rows { path: path.to_owned(), reason: format!("line {number}: {e}") })?;
        line.clear();
    }
    Ok(())
}

const CUT: &str = "it does not end where the checkpoint says that the file ended";

#[cfg(test)]
mod tests {
    use super::*;

    type Row = std::collections::BTreeMap<String, f64>;

    fn row(step: f64) -> Row {
        Row::from([("reward".to_owned(), 0.5), ("step".to_owned(), step)])
    }

    #[test]
    fn log_rows_round_trip_and_logs_can_be_truncated() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut file = JsonLines::create(&path).unwrap();
        file.append(&row(1.0)).unwrap();
        let bytes = file.sync().unwrap();
        file.append(&row(2.0)).unwrap();
        drop(file);
        assert_eq!(read_rows::<Row>(&path).unwrap(), [row(1.0), row(2.0)]);

        let mut file = JsonLines::truncate(&path, bytes).unwrap();
        file.append(&row(3.0)).unwrap();
        assert_eq!(read_rows::<Row>(&path).unwrap(), [row(1.0), row(3.0)]);
        let error = JsonLines::truncate(&path, 1 << 40).unwrap_err().to_string();
        assert!(error.contains("rows are missing"), "{error}");
    }

    #[test]
    fn an_invalid_log_line_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        std::fs::write(&path, "{\"step\":1}\n{\"step\"").unwrap();
        assert!(read_rows::<Row>(&path).unwrap_err().to_string().contains("line 2"));
    }
}
