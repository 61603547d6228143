//! Row groups whose pages are decompressed within limits.

use super::codecs::{Fault, decompressed};
use super::{PREFIXED_BATCH, too_large};
use ::parquet::basic::{Compression, Encoding, Type as PhysicalType};
use ::parquet::bloom_filter::Sbbf;
use ::parquet::column::page::{Page, PageMetadata, PageReader};
use ::parquet::errors::{ParquetError, Result};
use ::parquet::file::metadata::{ColumnChunkMetaData, RowGroupMetaData};
use ::parquet::file::reader::RowGroupReader;
use ::parquet::file::serialized_reader::SerializedPageReader;
use ::parquet::record::reader::RowIter;
use ::parquet::schema::types::Type;
use bytes::Bytes;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A row group of a file.
pub(super) struct RowGroup<'a> {
    file: &'a Arc<File>,
    metadata: &'a RowGroupMetaData,
    /// The columns, with the codec `UNCOMPRESSED`, so that the crate `parquet` returns pages as they are in the file.
    columns: Vec<ColumnChunkMetaData>,
    /// The largest number of bytes of pages at a time, and of the values that they expand to.
    limit: u64,
    /// The bytes of the current pages of all columns.
    held: Arc<AtomicU64>,
}

impl<'a> RowGroup<'a> {
    pub(super) fn new(file: &'a Arc<File>, metadata: &'a RowGroupMetaData, limit: u64) -> Result<Self> {
        let as_stored = |column: &ColumnChunkMetaData| {
            column.clone().into_builder().set_compression(Compression::UNCOMPRESSED).build()
        };
        let columns = metadata.columns().iter().map(as_stored).collect::<Result<_>>()?;
        Ok(Self { file, metadata, columns, limit, held: Arc::default() })
    }
}

impl RowGroupReader for RowGroup<'_> {
    fn metadata(&self) -> &RowGroupMetaData {
        self.metadata
    }

    fn num_columns(&self) -> usize {
        self.columns.len()
    }

    fn get_column_page_reader(&self, i: usize) -> Result<Box<dyn PageReader>> {
        let rows = usize::try_from(self.metadata.num_rows())?;
        let column = &self.columns[i];
        Ok(Box::new(Pages {
            stored: SerializedPageReader::new(Arc::clone(self.file), column, rows, None)?,
            codec: self.metadata.column(i).compression(),
            name: column.column_path().string(),
            is_nested: column.column_descr().max_rep_level() > 0,
            are_texts: column.column_type() == PhysicalType::BYTE_ARRAY,
            limit: self.limit,
            held: Arc::clone(&self.held),
            current: 0,
            dictionary: 0,
            longest_entry: 0,
            values: 0,
        }))
    }

    fn get_column_bloom_filter(&self, _: usize) -> Option<&Sbbf> {
        None
    }

    fn get_row_iter(&self, projection: Option<Type>) -> Result<RowIter<'_>> {
        RowIter::from_row_group(projection, self)
    }
}

/// The pages of a column of a row group.
struct Pages {
    stored: SerializedPageReader<File>,
    codec: Compression,
    name: String,
    /// `true` if a row can have several values.
    is_nested: bool,
    are_texts: bool,
    limit: u64,
    held: Arc<AtomicU64>,
    /// The bytes of the current page, and of the dictionary.
    current: u64,
    dictionary: u64,
    longest_entry: u64,
    /// The number of values of all pages until now.
    values: u64,
}

impl Pages {
    fn refused(&self, reason: String) -> ParquetError {
        ParquetError::External(format!("column {:?}: {reason}", self.name).into())
    }

    /// Returns the decompressed bytes behind the first `begin` bytes, which are not compressed.
    fn decompress(&self, stored: &Bytes, begin: usize) -> Result<Bytes> {
        let Some((levels, values)) = stored.split_at_checked(begin) else {
            return Err(self.refused("expected levels within their page".into()));
        };
        if self.codec == Compression::UNCOMPRESSED || values.is_empty() {
            return Ok(stored.clone());
        }
        let most = self.limit.saturating_sub(self.held.load(Relaxed));
        let values = decompressed(self.codec, values, usize::try_from(most).unwrap_or(usize::MAX - 1));
        match values {
            Ok(values) if levels.is_empty() => Ok(values.into()),
            Ok(values) => Ok([levels, &values].concat().into()),
            Err(Fault::TooLarge) => Err(self.refused(too_large("a page of it", self.limit))),
            Err(Fault::Bytes(reason)) => Err(self.refused(reason)),
        }
    }

    /// Counts the bytes of a new page, whose predecessor is dropped.
    fn hold(&mut self, bytes: usize, is_dictionary: bool) -> Result<()> {
        let held = if is_dictionary { &mut self.dictionary } else { &mut self.current };
        let before = std::mem::replace(held, bytes as u64);
        self.held.fetch_sub(before, Relaxed);
        let all = self.held.fetch_add(bytes as u64, Relaxed) + bytes as u64;
        if all > self.limit { Err(self.refused(too_large("its pages", self.limit))) } else { Ok(()) }
    }

    /// Checks what the values of a page can expand to, where the reader has no other limit: a row with several values is read as a whole.
    fn check(&mut self, values: u32, encoding: Encoding, bytes: usize) -> Result<()> {
        /// The bytes of a value that is read, without its text.
        const VALUE: u64 = 8;
        /// A page's values are seldom all as long as the longest.
        const SLACK: u64 = 4;
        self.values += u64::from(values);
        let is_prefixed = encoding == Encoding::DELTA_BYTE_ARRAY;
        let has_dictionary = matches!(encoding, Encoding::RLE_DICTIONARY | Encoding::PLAIN_DICTIONARY);
        let texts = u64::from(values).saturating_mul(self.longest_entry) / SLACK;
        let is_large = (self.is_nested && self.values.saturating_mul(VALUE) > self.limit)
            || (self.is_nested && has_dictionary && texts > self.limit)
            || (is_prefixed && bytes as u64 * PREFIXED_BATCH as u64 > self.limit);
        if is_large { Err(self.refused(too_large("its values", self.limit))) } else { Ok(()) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.held.fetch_sub(self.current + self.dictionary, Relaxed);
    }
}

impl Iterator for Pages {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl PageReader for Pages {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        let Some(mut page) = self.stored.get_next_page()? else { return Ok(None) };
        // The page before this one is dropped now.
        if !matches!(page, Page::DictionaryPage { .. }) {
            self.hold(0, false)?;
        }
        match &mut page {
            Page::DataPage { buf, num_values, encoding, .. } => {
                *buf = self.decompress(buf, 0)?;
                self.hold(buf.len(), false)?;
                self.check(*num_values, *encoding, buf.len())?;
            }
            Page::DataPageV2 {
                buf,
                num_values,
                encoding,
                def_levels_byte_len,
                rep_levels_byte_len,
                is_compressed,
                ..
            } => {
                if *is_compressed {
                    let levels = u64::from(*def_levels_byte_len) + u64::from(*rep_levels_byte_len);
                    *buf = self.decompress(buf, usize::try_from(levels)?)?;
                }
                self.hold(buf.len(), false)?;
                self.check(*num_values, *encoding, buf.len())?;
            }
            Page::DictionaryPage { buf, .. } => {
                *buf = self.decompress(buf, 0)?;
                self.hold(buf.len(), true)?;
                self.longest_entry = if self.are_texts { longest_entry(buf) } else { 0 };
            }
        }
        Ok(Some(page))
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        self.stored.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Result<()> {
        self.stored.skip_next_page()
    }
}

/// Returns the length in bytes of the longest text of a dictionary: each has its length before it.
fn longest_entry(mut dictionary: &[u8]) -> u64 {
    let mut longest = 0;
    while let Some((length, rest)) = dictionary.split_first_chunk::<4>() {
        let length = u32::from_le_bytes(*length);
        longest = longest.max(length);
        dictionary = rest.get(length as usize..).unwrap_or_default();
    }
    longest.into()
}
