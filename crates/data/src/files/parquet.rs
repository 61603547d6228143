//! Converts the rows of Parquet files to JSON.

use crate::error::{Error, Result};
use parquet::file::reader::{FileReader, SerializedFileReader};
use std::fs::File;
use std::path::Path;

/// Returns the rows of a Parquet file as one JSON object per line. They are kept in memory, because rows are drawn in any order and a
/// Parquet file can only be read by row groups.
pub(super) fn as_json_lines(path: &Path, file: File) -> Result<Vec<u8>> {
    let broken = |e: parquet::errors::ParquetError| Error::File {
        path: path.to_owned(),
        reason: format!("expected a Parquet file: {e}"),
    };
    let reader = SerializedFileReader::new(file).map_err(broken)?;
    let mut lines = vec![];
    for (index, row) in reader.get_row_iter(None).map_err(broken)?.enumerate() {
        let fault = |e: String| Error::Row { path: path.to_owned(), line: index as u64 + 1, reason: e };
        let row = row.map_err(|e| fault(e.to_string()))?.to_json_value();
        serde_json::to_writer(&mut lines, &row).map_err(|e| fault(e.to_string()))?;
        lines.push(b'\n');
    }
    Ok(lines)
}
