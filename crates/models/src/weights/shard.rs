//! One safetensors file, mapped into memory.

use crate::error::{Error, Result};
use bytes::Bytes;
use grpo_files::UniqueKeys;
use memmap2::Mmap;
use safetensors::tensor::{Metadata, SafeTensorError, SafeTensors};
use std::fs::File;
use std::path::{Path, PathBuf};

/// The size in bytes of the number that the file begins with: the length of its header.
const PREFIX: usize = 8;
/// How the file begins that git leaves in a clone without Git LFS.
const LFS_POINTER: &[u8] = b"version https://git-lfs";

/// A file of weights.
#[derive(Debug)]
pub(super) struct Shard {
    pub(super) path: PathBuf,
    /// The mapping, which lives as long as anybody holds a part of it.
    bytes: Bytes,
    /// Where the tensors begin.
    data: usize,
    pub(super) header: Metadata,
}

impl Shard {
    /// Maps the file and checks that it is as long as its header says.
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
        Ok(Self { path: path.to_owned(), bytes: Bytes::from_owner(map), data: PREFIX + header_length, header })
    }

    /// All bytes of the file, its header too.
    pub(super) fn file(&self) -> &[u8] {
        &self.bytes
    }

    /// The bytes of a tensor, at offsets that the header gives.
    pub(super) fn bytes(&self, (begin, end): (usize, usize)) -> &[u8] {
        &self.bytes[self.data + begin..self.data + end]
    }

    /// The same bytes, which keep the mapping alive.
    pub(super) fn shared(&self, (begin, end): (usize, usize)) -> Bytes {
        self.bytes.slice(self.data + begin..self.data + end)
    }
}

/// What is wrong with a file that does not fit to its header.
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
/// A mapping is what keeps weights out of the heap: the system reads a page when it is used, and may drop it again. It is
/// `unsafe` because the bytes are the file's: a process that writes into it meanwhile changes what is read here, and one that
/// cuts it off ends this process by SIGBUS. Everybody who maps weights lives with that (`transformers`, llama.cpp); who
/// replaces the file by a new one of the same name, as this project's writers do, changes nothing for its readers.
#[allow(unsafe_code)]
fn map(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the mapping is only read as bytes, for which every value is valid, and it lives as long as what borrows from it.
    // That nobody changes the file meanwhile is asked of the user, as said above.
    unsafe { Mmap::map(file) }
}
