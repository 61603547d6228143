//! Reads and writes the tensors of a checkpoint as safetensors files.
//!
//! The state is never copied in memory: each tensor is exported twice, once for the header and once for its values, and files are read
//! through memory maps.

use crate::error::{Error, Result};
use grpo_models::{Dtype, NamedTensor};
use grpo_policy::{StateGroup, TensorSink, TensorSource, is_moment_codes, moment_codes};
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use std::fs::File;
use std::io::{BufWriter, ErrorKind, Write};
use std::path::Path;

/// The dtype of the codes of 8-bit moments; all other tensors are f32.
const CODES: &str = "U8";

/// Passes the tensors of a group to a sink, as [`grpo_policy::Policy::export`] does. Repeated calls export the same tensors.
pub type Export<'a> = dyn Fn(StateGroup, &mut dyn TensorSink) -> grpo_policy::Result<()> + 'a;

/// The names and shapes of a group of tensors, all of them finite.
pub(super) struct Layout {
    group: StateGroup,
    entries: Vec<(String, Vec<usize>)>,
}

impl Layout {
    /// Collects the layout of a group and checks that all values are finite.
    ///
    /// # Errors
    /// [`grpo_policy::Error::NotFinite`] with `what` as the name of the group; the errors of `export`.
    pub(super) fn new(export: &Export<'_>, group: StateGroup, what: &str, step: u64) -> Result<Self> {
        let (mut entries, mut is_finite) = (Vec::new(), true);
        let mut look = |tensor: NamedTensor| {
            is_finite &= tensor.data.iter().all(|value| value.is_finite());
            entries.push((tensor.name, tensor.shape));
            Ok(())
        };
        export(group, &mut look)?;
        match is_finite {
            true => Ok(Self { group, entries }),
            false => Err(grpo_policy::Error::NotFinite { what: what.into(), step }.into()),
        }
    }

    /// Returns `true` if there are no tensors.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the header of the file: its length in bytes, then the JSON.
    fn header(&self) -> Vec<u8> {
        let (mut header, mut end) = (serde_json::Map::new(), 0_u64);
        for (name, shape) in &self.entries {
            let start = end;
            let (dtype, bytes) = if is_moment_codes(name) { (CODES, 1) } else { ("F32", 4) };
            end += bytes * shape.iter().product::<usize>() as u64;
            let entry = serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, end] });
            header.insert(name.clone(), entry);
        }
        let mut text = serde_json::Value::Object(header).to_string().into_bytes();
        // Values start at a multiple of eight bytes.
        text.resize(text.len().next_multiple_of(8), b' ');
        [&(text.len() as u64).to_le_bytes()[..], &text].concat()
    }

    /// Writes the tensors to a new file and syncs it. Returns its SHA-256.
    ///
    /// # Errors
    /// [`Error::File`]; the errors of `export`.
    pub(super) fn write(&self, export: &Export<'_>, path: &Path) -> Result<[u8; 32]> {
        let io = |e| Error::io("write", path, e);
        let mut file = BufWriter::new(File::create(path).map_err(io)?);
        let digest = self.stream(export, &mut file, path)?;
        file.flush().and_then(|()| file.get_ref().sync_all()).map_err(io)?;
        Ok(digest)
    }

    /// Returns the SHA-256 of the file that [`Layout::write`] would write.
    ///
    /// # Errors
    /// The errors of `export`.
    pub(super) fn digest(&self, export: &Export<'_>) -> Result<[u8; 32]> {
        self.stream(export, &mut std::io::sink(), Path::new("no file"))
    }

    /// Writes the tensors to `file`, which is at `path`. Returns the SHA-256 of its bytes.
    fn stream(&self, export: &Export<'_>, file: &mut dyn Write, path: &Path) -> Result<[u8; 32]> {
        let io = |e| Error::io("write", path, e);
        let mut hash = Sha256::new();
        let mut write = |bytes: &[u8]| {
            hash.update(bytes);
            file.write_all(bytes)
        };
        write(&self.header()).map_err(io)?;
        // The first I/O error; the policy's errors would lose its kind.
        let mut failed = None;
        let mut values = |tensor: NamedTensor| {
            let mut bytes = Vec::new();
            for values in tensor.data.chunks(1 << 16) {
                bytes.clear();
                match is_moment_codes(&tensor.name) {
                    true => bytes.extend(moment_codes(&tensor.name, values)?),
                    false => bytes.extend(values.iter().flat_map(|value| value.to_le_bytes())),
                }
                write(&bytes).map_err(|error| grpo_policy::Error::other(failed.insert(error).to_string()))?;
            }
            Ok(())
        };
        let exported = export(self.group, &mut values);
        match failed {
            Some(failed) => return Err(io(failed)),
            None => exported?,
        }
        Ok(hash.finalize().into())
    }
}

/// The tensors of a checkpoint's file, sorted by name. The file is mapped: values take no heap memory and are read on use. The files of a
/// checkpoint must not change in the meantime.
#[derive(Debug, Default)]
pub struct StoredTensors(Option<grpo_models::Weights>);

impl StoredTensors {
    /// Maps a file in which all tensors are f32, or bytes if they are codes of 8-bit moments. Also returns its length in bytes and its SHA-256.
    ///
    /// # Errors
    /// The defect of the file as text.
    pub(super) fn open(path: &Path) -> Result<(Self, usize, [u8; 32]), String> {
        let file = grpo_models::Weights::open_as_stored(path).map_err(|error| match error {
            grpo_models::Error::Weights { reason, .. } => reason,
            grpo_models::Error::File(grpo_files::Error::Io { source, .. }) => match source.kind() {
                ErrorKind::NotFound => "the file is missing".to_owned(),
                _ => format!("it cannot be read: {source}"),
            },
            other => other.to_string(),
        })?;
        for name in file.names() {
            if is_moment_codes(name) {
                match file.bytes(name) {
                    Some(_) => continue,
                    None => return Err(format!("tensor `{name}` has another dtype than {CODES}, which codes have")),
                }
            }
            let dtype = file.tensor(name).map_err(|error| error.to_string())?.dtype();
            if dtype != Dtype::F32 {
                return Err(format!("tensor `{name}` is {}, expected F32", dtype.safetensors_name()));
            }
        }
        // The hash is computed from the mapped bytes, the same bytes that are used later.
        let (mut length, mut hash) = (0, Sha256::new());
        for (_, bytes) in file.files() {
            length += bytes.len();
            hash.update(bytes);
        }
        Ok((Self(Some(file)), length, hash.finalize().into()))
    }

    /// Returns the name of the first tensor with a non-finite value.
    pub(super) fn not_finite(&self) -> Option<&str> {
        let file = self.0.as_ref()?;
        let mut values = file.names().filter(|name| !is_moment_codes(name));
        values.find(|name| file.tensor(name).and_then(|tensor| tensor.check_finite()).is_err())
    }
}

impl TensorSource for StoredTensors {
    fn shapes(&self) -> Vec<(&str, &[usize])> {
        let Some(file) = &self.0 else { return Vec::new() };
        let shape = |name| match file.bytes(name) {
            Some((shape, _)) => Some((name, shape)),
            None => file.tensor(name).ok().map(|tensor| (name, tensor.shape())),
        };
        file.names().filter_map(shape).collect()
    }

    fn values(&self, name: &str) -> grpo_policy::Result<Cow<'_, [f32]>> {
        match &self.0 {
            Some(file) => Ok(match file.bytes(name) {
                Some((_, codes)) => codes.iter().copied().map(f32::from).collect(),
                None => file.tensor(name)?.values(),
            }),
            None => Err(grpo_policy::Error::state(name, "a tensor", "none")),
        }
    }
}
