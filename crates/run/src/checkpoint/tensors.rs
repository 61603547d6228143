//! Reads and writes the tensors of a checkpoint as safetensors files.
//!
//! The state is never copied in memory: each tensor is exported twice, once for the header and once for its values, and files are read
//! through memory maps.

use crate::error::{Error, Result};
use models::{Dtype, NamedTensor};
use policy::{Policy, StateGroup, TensorSink, TensorSource, Weights};
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use std::fs::File;
use std::io::{BufWriter, ErrorKind, Write};
use std::path::Path;
use trainer::TrainState;

/// A source that exports the tensors of a state. Repeated calls export the same tensors.
pub trait StateSource {
    /// Passes the tensors of a group to `sink`; see [`Policy::export`].
    ///
    /// # Errors
    /// The errors of [`Policy::export`].
    fn export(&self, group: StateGroup, sink: &mut dyn TensorSink) -> policy::Result<()>;
}

impl StateSource for dyn Policy + '_ {
    fn export(&self, group: StateGroup, sink: &mut dyn TensorSink) -> policy::Result<()> {
        Policy::export(self, group, sink)
    }
}

impl StateSource for TrainState {
    fn export(&self, group: StateGroup, sink: &mut dyn TensorSink) -> policy::Result<()> {
        let tensors = match group {
            StateGroup::Weights(Weights::Policy) => &self.policy,
            StateGroup::Weights(Weights::RefPolicy) => &self.ref_policy,
            StateGroup::Optimizer => &self.optimizer,
        };
        tensors.iter().try_for_each(|tensor| sink.tensor(tensor.clone()))
    }
}

/// The names and shapes of a group of tensors, all of them finite.
pub(super) struct Layout {
    group: StateGroup,
    entries: Vec<(String, Vec<usize>)>,
}

/// A sink that collects names and shapes and checks for non-finite values.
#[derive(Default)]
struct Look {
    entries: Vec<(String, Vec<usize>)>,
    not_finite: bool,
}

impl TensorSink for Look {
    fn tensor(&mut self, tensor: NamedTensor) -> policy::Result<()> {
        self.not_finite |= !is_finite(&tensor);
        self.entries.push((tensor.name, tensor.shape));
        Ok(())
    }
}

/// Returns `true` if all values are finite.
fn is_finite(tensor: &NamedTensor) -> bool {
    tensor.data.iter().all(|value| value.is_finite())
}

impl Layout {
    /// Collects the layout of a group and checks that all values are finite.
    ///
    /// # Errors
    /// [`policy::Error::NotFinite`] with `what` as the name of the group; the errors of the source.
    pub(super) fn new(source: &(impl StateSource + ?Sized), group: StateGroup, what: &str, steps: u64) -> Result<Self> {
        let mut look = Look::default();
        source.export(group, &mut look)?;
        if look.not_finite {
            return Err(policy::Error::NotFinite { what: what.into(), step: steps }.into());
        }
        Ok(Self { group, entries: look.entries })
    }

    /// Returns `true` if there are no tensors.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the header of the file: its length in bytes, then the JSON.
    fn header(&self) -> Result<Vec<u8>> {
        let (mut header, mut end) = (serde_json::Map::new(), 0_u64);
        for (name, shape) in &self.entries {
            let start = end;
            end += 4 * shape.iter().product::<usize>() as u64;
            let entry = serde_json::json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, end] });
            header.insert(name.clone(), entry);
        }
        let mut text = serde_json::to_vec(&header).map_err(|e| Error::Text(format!("safetensors: {e}")))?;
        // Values start at a multiple of eight bytes.
        text.resize(text.len().next_multiple_of(8), b' ');
        Ok([&(text.len() as u64).to_le_bytes()[..], &text].concat())
    }

    /// Writes the tensors to a new file and syncs it. Returns its SHA-256.
    ///
    /// # Errors
    /// [`Error::File`]; the errors of the source.
    pub(super) fn write(&self, source: &(impl StateSource + ?Sized), path: &Path) -> Result<[u8; 32]> {
        let io = |e| Error::io("write", path, e);
        let mut file = Hashed { to: BufWriter::new(File::create(path).map_err(io)?), hash: Sha256::new() };
        file.write(&self.header()?).map_err(io)?;
        let mut values = Values { file, failed: None };
        let exported = source.export(self.group, &mut values);
        let Values { mut file, failed } = values;
        match failed {
            Some(failed) => return Err(io(failed)),
            None => exported?,
        }
        file.to.flush().and_then(|()| file.to.get_ref().sync_all()).map_err(io)?;
        Ok(file.hash.finalize().into())
    }
}

/// A file that is hashed while it is written.
struct Hashed {
    to: BufWriter<File>,
    hash: Sha256,
}

impl Hashed {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.hash.update(bytes);
        self.to.write_all(bytes)
    }
}

/// A sink that writes the values of tensors.
struct Values {
    file: Hashed,
    /// The first I/O error. The policy's errors would lose its kind.
    failed: Option<std::io::Error>,
}

impl TensorSink for Values {
    fn tensor(&mut self, tensor: NamedTensor) -> policy::Result<()> {
        let mut bytes = Vec::new();
        for values in tensor.data.chunks(1 << 16) {
            bytes.clear();
            bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            if let Err(error) = self.file.write(&bytes) {
                let text = error.to_string();
                self.failed = Some(error);
                return Err(policy::Error::other(text));
            }
        }
        Ok(())
    }
}

/// The tensors of a checkpoint's file, sorted by name. The file is mapped: values take no heap memory and are read on use. The files of a
/// checkpoint must not change in the meantime.
#[derive(Debug, Default)]
pub struct StoredTensors(Option<models::Weights>);

impl StoredTensors {
    /// Maps a file in which all tensors are f32. Also returns its length in bytes and its SHA-256.
    ///
    /// # Errors
    /// The defect of the file as text.
    pub(super) fn open(path: &Path) -> Result<(Self, usize, [u8; 32]), String> {
        let file = models::Weights::open_file(path).map_err(|error| match error {
            models::Error::Weights { reason, .. } => reason,
            models::Error::File(grpo_files::Error::Io { source, .. }) => match source.kind() {
                ErrorKind::NotFound => "the file is missing".to_owned(),
                _ => format!("it cannot be read: {source}"),
            },
            other => other.to_string(),
        })?;
        for name in file.names() {
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
        file.names().find(|name| file.tensor(name).and_then(|tensor| tensor.check_finite()).is_err())
    }
}

impl TensorSource for StoredTensors {
    fn shapes(&self) -> Vec<(&str, &[usize])> {
        let Some(file) = &self.0 else { return Vec::new() };
        let tensors = file.names().filter_map(|name| file.tensor(name).ok());
        tensors.map(|tensor| (tensor.name(), tensor.shape())).collect()
    }

    fn values(&self, name: &str) -> policy::Result<Cow<'_, [f32]>> {
        match &self.0 {
            Some(file) => Ok(file.tensor(name)?.values()),
            None => Err(policy::Error::state(name, "a tensor", "none")),
        }
    }
}
