//! Converts the rows of Parquet files to JSON, within limits on what a file may expand to.
//!
//! The crate `parquet` reads metadata, pages and values. Pages are decompressed here ([`codecs`]), because the crate decompresses without a
//! limit, and its zstd is a C library.

mod codecs;
mod pages;

use crate::error::{Error, Result};
use ::parquet::basic::Encoding;
use ::parquet::errors::ParquetError;
use ::parquet::file::metadata::ParquetMetaDataReader;
use ::parquet::record::reader::TreeBuilder;
use pages::RowGroup;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

/// The rows of a file take at most this many times its size as JSON, or [`SMALLEST_LIMIT`] bytes if that is more. Texts compress by a factor of
/// 3 to 10.
const EXPANSION: u64 = 32;
const SMALLEST_LIMIT: u64 = 256 << 20;

/// The number of values of a column that are decoded at once.
const BATCH: usize = 1 << 10;
/// The same for a row group with values that repeat the beginnings of other values, so that each can be as long as a page.
const PREFIXED_BATCH: usize = 1 << 6;

/// Returns the rows of a Parquet file as one JSON object per line. They are kept in memory, because rows are drawn in any order and a
/// Parquet file can only be read by row groups.
pub(super) fn as_json_lines(path: &Path, file: File) -> Result<Vec<u8>> {
    // Some damaged files make the crate `parquet` panic.
    let rows = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| rows(path, file)));
    rows.unwrap_or_else(|_| {
        let reason = "expected a Parquet file, and the crate `parquet` failed: the file is damaged".into();
        Err(Error::File { path: path.to_owned(), reason })
    })
}

fn rows(path: &Path, file: File) -> Result<Vec<u8>> {
    let size = file.metadata().map_err(|e| grpo_files::Error::io("read", path, e))?.len();
    let limit = size.saturating_mul(EXPANSION).max(SMALLEST_LIMIT);
    let unusable = |reason: String| Error::File { path: path.to_owned(), reason };
    let broken = |e: ParquetError| match e {
        // Errors of this module say what was expected.
        ParquetError::External(reason) => unusable(reason.to_string()),
        other => unusable(format!("expected a Parquet file: {other}")),
    };
    let metadata = ParquetMetaDataReader::new().parse_and_finish(&file).map_err(broken)?;
    let (file, mut lines, mut row) = (Arc::new(file), Lines { bytes: vec![], limit }, 0);
    for group in metadata.row_groups() {
        let is_prefixed =
            group.columns().iter().any(|column| column.encodings().any(|e| e == Encoding::DELTA_BYTE_ARRAY));
        let batch = if is_prefixed { PREFIXED_BATCH } else { BATCH };
        let reader = RowGroup::new(&file, group, limit).map_err(broken)?;
        let schema = metadata.file_metadata().schema_descr_ptr();
        for values in TreeBuilder::new().with_batch_size(batch).as_iter(schema, &reader).map_err(broken)? {
            row += 1;
            let fault = |reason: String| Error::Row { path: path.to_owned(), line: row, reason };
            let values = values.map_err(|e| match e {
                ParquetError::External(reason) => unusable(reason.to_string()),
                other => fault(other.to_string()),
            })?;
            serde_json::to_writer(&mut lines, &values.to_json_value()).map_err(|e| fault(e.to_string()))?;
            lines.write_all(b"\n").map_err(|e| fault(e.to_string()))?;
        }
    }
    Ok(lines.bytes)
}

/// The rows as JSON, up to the limit in bytes.
struct Lines {
    bytes: Vec<u8>,
    limit: u64,
}

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() as u64 + bytes.len() as u64 > self.limit {
            return Err(io::Error::other(too_large("the rows up to this one", self.limit)));
        }
        self.bytes.try_reserve(bytes.len()).map_err(|e| {
            let size = self.bytes.len() >> 20;
            io::Error::other(format!("expected memory for more than {size} MiB of rows as JSON: {e}: {JSON_LINES}"))
        })?;
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The alternative to a Parquet file that is too large.
const JSON_LINES: &str = "`datasets.load_dataset('parquet', data_files=FILE)['train'].to_json(NEW)` writes lines of JSON, which are not kept \
                          in memory";

/// Returns the error text for contents that expand beyond the limit in bytes.
fn too_large(what: &str, limit: u64) -> String {
    format!(
        "expected a Parquet file that expands to at most {} MiB ({EXPANSION} times its size, or {} MiB), and {what} would take more: {JSON_LINES}",
        limit >> 20,
        SMALLEST_LIMIT >> 20
    )
}
