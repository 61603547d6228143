//! Append-only files with one JSON object per line, which can be cut back to where a checkpoint was taken.

use crate::error::{Error, Result};
use crate::files::{FileId, expect_regular, open_regular, without_links};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

/// Which part of a run a row of metrics.jsonl belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowKind {
    /// A supervised step.
    Warmup,
    /// A GRPO step.
    Grpo,
    /// A held-out evaluation after `step` GRPO steps.
    Eval,
}

/// A row of metrics.jsonl.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MetricsRow {
    /// What was done.
    pub phase: RowKind,
    /// Steps of the phase that were done, this one included.
    pub step: u64,
    /// Metrics under TRL's names; what is not finite is null.
    #[serde(flatten)]
    pub values: BTreeMap<String, Option<f64>>,
}

impl MetricsRow {
    /// A row; values that are not finite become null, which JSON can say.
    pub fn new<N: Into<String>>(phase: RowKind, step: u64, values: impl IntoIterator<Item = (N, f64)>) -> Self {
        let values = values.into_iter().map(|(name, v)| (name.into(), v.is_finite().then_some(v))).collect();
        Self { phase, step, values }
    }

    /// A metric, if it is there.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.values.get(name).copied().flatten()
    }
}

/// A row of completions.jsonl.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CompletionRow {
    /// GRPO step.
    pub step: u64,
    /// Name of the task.
    pub task: String,
    /// The question.
    pub prompt: String,
    /// A right answer.
    pub answer: String,
    /// What the policy wrote.
    pub completion: String,
    /// Whether the length limit cut it off.
    pub truncated: bool,
    /// Its reward; null when no reward function had anything to say.
    pub reward: Option<f32>,
    /// Its advantage.
    pub advantage: f32,
}

/// A file being appended to.
#[derive(Debug)]
pub struct JsonLines {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl JsonLines {
    /// An empty file.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn create(path: &Path) -> Result<Self> {
        let mut options = OpenOptions::new();
        let options = without_links(options.write(true).create(true).truncate(true));
        let file = options.open(path).map_err(|e| Error::io("create", path, e))?;
        Ok(Self { path: path.to_owned(), file, bytes: 0 })
    }

    /// The first `bytes` bytes of an existing file; what came after them is dropped.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::RunDir`] when the file is shorter.
    pub fn truncate(path: &Path, bytes: u64) -> Result<Self> {
        let file = Self::check(path, bytes)?;
        file.set_len(bytes).map_err(|e| Error::io("continue", path, e))?;
        Ok(Self { path: path.to_owned(), file, bytes })
    }

    /// Opens a file that has `bytes` bytes at least.
    ///
    /// # Errors
    /// As [`JsonLines::truncate`].
    pub(super) fn check(path: &Path, bytes: u64) -> Result<File> {
        let io = |e| Error::io("continue", path, e);
        expect_regular(&std::fs::metadata(path).map_err(io)?).map_err(io)?;
        let file = OpenOptions::new().append(true).open(path).map_err(io)?;
        let found = file.metadata().map_err(io)?.len();
        if found < bytes {
            let reason = format!(
                "{found} bytes, but it had {bytes} when the checkpoint was taken: rows are missing; restore the file, \
                 or continue from an earlier checkpoint with `--from`"
            );
            return Err(Error::RunDir { path: path.to_owned(), reason });
        }
        Ok(file)
    }

    /// Appends a row in one write, so that a reader hardly ever sees half of one.
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

    /// Makes what was appended durable and returns the length in bytes.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn sync(&mut self) -> Result<u64> {
        self.file.sync_all().map_err(|e| Error::io("sync", &self.path, e))?;
        Ok(self.bytes)
    }

    /// Whether the file is still where it was: neither moved nor deleted nor replaced by another.
    pub(super) fn is_in_place(&self) -> bool {
        self.file.metadata().is_ok_and(|metadata| FileId::of(&metadata).is_at(&self.path))
    }
}

/// Every row of a file.
///
/// # Errors
/// [`Error::Io`]; [`Error::RunDir`] with the number of the first line that is no such row.
pub fn read_rows<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>> {
    let mut rows = Vec::new();
    each_row(path, u64::MAX, |row| {
        rows.push(row);
        Ok(())
    })?;
    Ok(rows)
}

/// Hands every row of the first `bytes` bytes of a file to `check`, whose error is told with the number of the line. They
/// have to end where a row ends, unless the file ends before.
pub(super) fn each_row<T: DeserializeOwned>(
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
            .map_err(|e| Error::RunDir { path: path.to_owned(), reason: format!("line {number}: {e}") })?;
        line.clear();
    }
    Ok(())
}

const CUT: &str = "it does not end where the checkpoint says that the file ended";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_round_trip_and_the_tail_can_be_cut() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let row = |step| MetricsRow::new(RowKind::Grpo, step, [("reward", 0.5), ("kl", f64::NAN)]);
        let mut file = JsonLines::create(&path).unwrap();
        file.append(&row(1)).unwrap();
        let bytes = file.sync().unwrap();
        file.append(&row(2)).unwrap();
        drop(file);
        assert_eq!(read_rows::<MetricsRow>(&path).unwrap(), [row(1), row(2)]);
        assert_eq!((row(1).get("reward"), row(1).get("kl")), (Some(0.5), None));

        let mut file = JsonLines::truncate(&path, bytes).unwrap();
        file.append(&row(3)).unwrap();
        assert_eq!(read_rows::<MetricsRow>(&path).unwrap(), [row(1), row(3)]);
        let error = JsonLines::truncate(&path, 1 << 40).unwrap_err().to_string();
        assert!(error.contains("rows are missing"), "{error}");
    }

    #[test]
    fn a_bad_line_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        std::fs::write(&path, "{\"phase\":\"grpo\",\"step\":1}\n{\"phase\":\"grpo\"").unwrap();
        assert!(read_rows::<MetricsRow>(&path).unwrap_err().to_string().contains("line 2"));
    }
}
