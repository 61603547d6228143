//! The rows of a file: an index of their positions, and parsing on demand.

use crate::config::{DataFile, FileFormat};
use crate::error::{Error, Result};
use grpo_files::mark_long_integers;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::sync::Mutex;

/// The size limit of a line in bytes.
const LONGEST_LINE: u64 = 256 << 20;

/// The position of a row: the offset and the length of its text in bytes, and its line number, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct RowPosition(u64, u32, u32);

impl RowPosition {
    pub(super) fn line(self) -> u64 {
        self.2.into()
    }
}

/// The maximum number of rows, and of bytes, that are read before they are parsed.
const BATCH: usize = 1 << 11;
const BATCH_BYTES: u64 = 1 << 24;

pub(super) struct Lines {
    path: PathBuf,
    bytes: Bytes,
}

pub(super) type Line = (RowPosition, Vec<u8>);

enum Bytes {
    File(Mutex<File>),
    /// The rows of a file in another format, converted to JSON.
    Memory(Vec<u8>),
}

impl Lines {
    /// Opens a file of rows. Folders and devices are errors.
    pub(super) fn open(file: &DataFile) -> Result<Self> {
        let path = file.path.clone();
        let io = |e| grpo_files::Error::io("read", &path, e);
        let (mut opened, _) = grpo_files::open_regular(&path).map_err(io)?;
        if let Some(reason) = super::magic::fault(&path, &mut opened, file.format()).map_err(io)? {
            return Err(Error::File { path, reason });
        }
        let bytes = match file.format() {
            FileFormat::Jsonl => Bytes::File(Mutex::new(opened)),
            FileFormat::Json => match super::json::as_json_lines(&path, &mut opened)? {
                Some(lines) => Bytes::Memory(lines),
                None => Bytes::File(Mutex::new(opened)),
            },
            #[cfg(feature = "parquet")]
            FileFormat::Parquet => Bytes::Memory(super::parquet::as_json_lines(&path, opened)?),
            #[cfg(not(feature = "parquet"))]
            FileFormat::Parquet => {
                let reason = "this build does not read Parquet: build with the feature `parquet`, or write JSONL \
                              (`datasets.Dataset.to_json`)";
                return Err(Error::File { path, reason: reason.into() });
            }
        };
        Ok(Self { path, bytes })
    }

    /// Passes the bytes of all rows to `each`, in batches and in file order. Blank lines are skipped.
    pub(super) fn for_each(&self, mut each: impl FnMut(&[Line]) -> Result<()>) -> Result<()> {
        match &self.bytes {
            Bytes::Memory(bytes) => self.scan(&mut bytes.as_slice(), &mut each),
            Bytes::File(file) => {
                let mut file = lock(file);
                file.rewind().map_err(|e| self.io(e))?;
                self.scan(&mut BufReader::with_capacity(1 << 18, &mut *file), &mut each)
            }
        }
    }

    fn scan(&self, reader: &mut dyn BufRead, each: &mut dyn FnMut(&[Line]) -> Result<()>) -> Result<()> {
        let (mut offset, mut line) = (0_u64, 0_u32);
        loop {
            let (mut rows, mut size) = (vec![], 0);
            let mut end = Ok(false);
            while rows.len() < BATCH && size < BATCH_BYTES {
                match self.next_line(reader, &mut line) {
                    Ok(Some(bytes)) => {
                        let length = bytes.len() as u64;
                        if !bytes.trim_ascii().is_empty() {
                            rows.push((RowPosition(offset, length as u32, line), bytes));
                        }
                        (offset, size) = (offset + length, size + length);
                    }
                    Ok(None) => end = Ok(true),
                    Err(error) => end = Err(error),
                }
                if !matches!(end, Ok(false)) {
                    break;
                }
            }
            // The errors of earlier rows are reported first.
            each(&rows)?;
            if end? {
                return Ok(());
            }
        }
    }

    /// Returns the bytes of the next line and increments `line`, its number. `None` at the end of the file.
    fn next_line(&self, reader: &mut dyn BufRead, line: &mut u32) -> Result<Option<Vec<u8>>> {
        let mut bytes = vec![];
        let read = (&mut *reader).take(LONGEST_LINE).read_until(b'\n', &mut bytes).map_err(|e| self.io(e))? as u64;
        if read == 0 {
            return Ok(None);
        }
        *line = line.checked_add(1).ok_or_else(|| self.row(u64::from(*line), "too many lines".into()))?;
        if read == LONGEST_LINE {
            let limit = LONGEST_LINE >> 20;
            return Err(self.row(u64::from(*line), format!("expected a JSON object of at most {limit} MiB")));
        }
        Ok(Some(bytes))
    }

    pub(super) fn read(&self, place: RowPosition) -> Result<Map<String, Value>> {
        let changed = |what: String| {
            self.row(place.line(), format!("the file has changed since the run has read it first: {what}"))
        };
        let RowPosition(offset, length, _) = place;
        let mut bytes = vec![0; length as usize];
        match &self.bytes {
            Bytes::Memory(all) => bytes.copy_from_slice(&all[offset as usize..][..length as usize]),
            Bytes::File(file) => {
                let mut file = lock(file);
                file.seek(SeekFrom::Start(offset)).map_err(|e| self.io(e))?;
                file.read_exact(&mut bytes).map_err(|e| changed(e.to_string()))?;
            }
        }
        self.parse(&bytes, place.line()).map_err(|e| changed(e.to_string()))
    }

    /// Parses the bytes of a line, which must be a JSON object in UTF-8.
    pub(super) fn parse(&self, bytes: &[u8], line: u64) -> Result<Map<String, Value>> {
        // Some editors write a byte order mark.
        let bytes = if line == 1 { bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes) } else { bytes };
        let row = |reason: String| self.row(line, reason);
        let text = std::str::from_utf8(bytes)
            .map_err(|e| row(format!("expected UTF-8, which ends at byte {} of the line", e.valid_up_to() + 1)))?;
        // Without the line break, an unclosed string is reported at the end of the line.
        let text = text.trim_end_matches(['\r', '\n']);
        match serde_json::from_str(&mark_long_integers(text)) {
            Ok(Value::Object(fields)) => Ok(fields),
            Ok(other) => Err(row(format!("expected a JSON object, got {}", shown(&other)))),
            // A file with a single pretty-printed list or object.
            Err(e) if e.is_eof() => Err(row(format!(
                "expected a whole JSON object on this line, and it ends at column {}: {} (`jq -c . FILE > NEW` writes an object of several \
                 lines on one)",
                text.trim_end().chars().count(),
                quoted(text)
            ))),
            Err(e) => {
                Err(row(format!("expected a JSON object: column {}: {}: {}", e.column(), cause(&e), quoted(text))))
            }
        }
    }

    pub(super) fn row(&self, line: u64, reason: String) -> Error {
        Error::Row { path: self.path.clone(), line, reason }
    }

    fn io(&self, source: std::io::Error) -> Error {
        grpo_files::Error::io("read", &self.path, source).into()
    }
}

/// Locks the file, ignoring poisoning: a panic can only have left its position, which is set before every use.
fn lock(file: &Mutex<File>) -> std::sync::MutexGuard<'_, File> {
    file.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Returns the message of a JSON error without serde_json's position.
fn cause(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split(" at line ").next().unwrap_or_default().to_owned()
}

/// Quotes the beginning of a line for an error.
fn quoted(text: &str) -> String {
    const MOST: usize = 60;
    let text = text.trim();
    let more = if text.chars().nth(MOST).is_some() { "..." } else { "" };
    format!("`{}{more}`", text.chars().take(MOST).collect::<String>())
}

/// Formats a value for an error, truncated if it is long.
pub(super) fn shown(value: &Value) -> String {
    quoted(&value.to_string())
}
