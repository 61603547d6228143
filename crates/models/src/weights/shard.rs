//! One safetensors file, mapped into memory.

use crate::error::{Error, Result};
use bytes::Bytes;
use grpo_files::UniqueKeys;
use memmap2::Mmap;
use safetensors::tensor::{Metadata, SafeTensorError, SafeTensors};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The size in bytes of the header's length, with which the file starts.
const PREFIX: usize = 8;
/// The start of a Git LFS pointer, which a clone without Git LFS has instead of the file.
const LFS_POINTER: &[u8] = b"version https://git-lfs";

/// A weight file.
#[derive(Debug)]
pub(super) struct Shard {
    pub(super) path: PathBuf,
    map: Arc<Mmap>,
    /// The bytes of the mapping, which lives as long as any slice of them.
    bytes: Bytes,
    /// The offset of the first tensor.
    data: usize,
    pub(super) header: Metadata,
}

impl Shard {
    /// Maps the file and checks its length against its header.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let (file, length) = grpo_files::open_regular(path).map_err(|e| Error::io("read", path, e))?;
        if length == 0 {
            return Err(Error::weights(path, "the file is empty"));
        }
        let map = map(&file).map_err(|e| Error::io("map", path, e))?;
        if map.starts_with(LFS_POINTER) {
            return Err(Error::weights(
                path,
                "this is a pointer of Git LFS and not the file itself; `git lfs pull` in the folder fetches it",
            ));
        }
        let (header_length, header) =
            SafeTensors::read_metadata(&map).map_err(|error| Error::weights(path, damage(&map, &error)))?;
        let UniqueKeys = serde_json::from_slice(&map[PREFIX..PREFIX + header_length])
            .map_err(|error| Error::weights(path, format!("the header is not readable: {error}")))?;
        let map = Arc::new(map);
        let bytes = Bytes::from_owner(Mapping(Arc::clone(&map)));
        Ok(Self { path: path.to_owned(), map, bytes, data: PREFIX + header_length, header })
    }

    /// Returns all bytes of the file, including its header.
    pub(super) fn file(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the bytes of a tensor at the offsets in the header.
    pub(super) fn bytes(&self, (begin, end): (usize, usize)) -> &[u8] {
        &self.bytes[self.data + begin..self.data + end]
    }

    /// Removes the pages of a tensor from this process's memory. The next use reads them again.
    #[allow(unsafe_code)]
    pub(super) fn release(&self, (begin, end): (usize, usize)) {
        #[cfg(unix)]
        {
            let advice = memmap2::UncheckedAdvice::DontNeed;
            // SAFETY: the mapping is shared, of a file, and never written, so its pages are read again from the file with the same bytes.
            let released = unsafe { self.map.unchecked_advise_range(advice, self.data + begin, end - begin) };
            // Only advice: without it, the system may still reclaim the pages.
            drop(released);
        }
        #[cfg(not(unix))]
        let _ = (&self.map, begin, end);
    }

    /// Returns the bytes of a tensor as a slice that keeps the mapping alive.
    pub(super) fn shared(&self, (begin, end): (usize, usize)) -> Bytes {
        self.bytes.slice(self.data + begin..self.data + end)
    }
}

/// A mapping that slices share.
struct Mapping(Arc<Mmap>);

impl AsRef<[u8]> for Mapping {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// Describes how a file contradicts its header.
fn damage(bytes: &[u8], error: &SafeTensorError) -> String {
    let length = bytes.len();
    let header_length = bytes.first_chunk::<PREFIX>().map(|prefix| u64::from_le_bytes(*prefix));
    match (error, header_length) {
        (SafeTensorError::MetadataIncompleteBuffer, Some(header)) => {
            let text = bytes.get(PREFIX..PREFIX + header as usize).unwrap_or_default();
            let Ok(described) = serde_json::from_slice::<Metadata>(text) else { return error.to_string() };
            let expected = PREFIX as u64 + header + described.data_len() as u64;
            let what = if expected > length as u64 { "truncated" } else { "longer than its header says" };
            format!("the file is {what}: the header describes {expected} bytes and the file has {length}")
        }
        (SafeTensorError::InvalidHeaderLength, Some(header)) => {
            format!("the file is truncated: its header alone would have {header} bytes and the file has {length}")
        }
        (SafeTensorError::HeaderTooSmall, _) => format!("the file is truncated: it has {length} bytes"),
        _ => format!("not readable as safetensors: {error}"),
    }
}

/// Maps a file for reading.
///
/// Mapping keeps weights out of the heap: the system reads a page on first use and may drop it later. It is `unsafe` because another
/// process may change the file: a write changes the bytes seen here, and a truncation ends this process with SIGBUS. Other programs that
/// map weights (`transformers`, llama.cpp) accept this, too. Replacing the file by a new one of the same name, as the writers of this
/// project do, does not affect existing mappings.
#[allow(unsafe_code)]
fn map(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the mapping is only read as bytes, for which every value is valid, and it outlives its borrows. The user must not change the
    // file meanwhile, as documented above.
    unsafe { Mmap::map(file) }
}
