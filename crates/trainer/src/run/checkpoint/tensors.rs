//! Tensors of a checkpoint as safetensors files, written and read.
//!
//! Avoids a copy of the state in memory: tensors are asked for one by one, once for the header and once for their values.

use crate::error::{Error, Result};
use crate::trainer::TrainState;
use models::NamedTensor;
use policy::{Policy, StateGroup, TensorSink, Weights};
use safetensors::tensor::{Dtype, SafeTensors};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// What hands out the tensors of a state, as often as it is asked and always the same.
pub trait StateSource {
    /// Hands the tensors of a group to `sink`; see [`Policy::export`].
    ///
    /// # Errors
    /// As [`Policy::export`].
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

/// The names and shapes of a group of tensors, which were all finite.
pub(super) struct Layout {
    group: StateGroup,
    entries: Vec<(String, Vec<usize>)>,
}

/// Takes names and shapes, and looks for values that are not finite.
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

/// Whether all values are finite.
pub(super) fn is_finite(tensor: &NamedTensor) -> bool {
    tensor.data.iter().all(|value| value.is_finite())
}

impl Layout {
    /// Looks at the tensors of a group.
    ///
    /// # Errors
    /// [`policy::Error::NotFinite`], which calls the group `what`; otherwise those of the source.
    pub(super) fn new(source: &(impl StateSource + ?Sized), group: StateGroup, what: &str, steps: u64) -> Result<Self> {
        let mut look = Look::default();
        source.export(group, &mut look)?;
        if look.not_finite {
            return Err(Error::not_finite(what, steps));
        }
        Ok(Self { group, entries: look.entries })
    }

    /// Whether there are no tensors.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The header of the file: its length, and offsets by name.
    fn header(&self) -> Result<Vec<u8>> {
        let (mut header, mut end) = (serde_json::Map::new(), 0_u64);
        for (name, shape) in &self.entries {
            let start = end;
            end += 4 * shape.iter().product::<usize>() as u64;
            let entry = serde_json::json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, end] });
            header.insert(name.clone(), entry);
        }
        let mut text = serde_json::to_vec(&header).map_err(|e| Error::Text(format!("safetensors: {e}")))?;
        // Values begin at a multiple of eight bytes.
        text.resize(text.len().next_multiple_of(8), b' ');
        Ok([&(text.len() as u64).to_le_bytes()[..], &text].concat())
    }

    /// Writes the tensors to a new file, synced; its SHA-256.
    ///
    /// # Errors
    /// [`Error::File`]; otherwise those of the source.
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

/// A file whose hash is made on the way.
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

/// Writes the values of tensors.
struct Values {
    file: Hashed,
    /// Why a write failed, with its kind, which the policy's errors would not keep.
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

/// The tensors of a safetensors file, sorted by name.
///
/// # Errors
/// A text that says what is wrong with the file.
pub(super) fn parse_tensors(bytes: &[u8]) -> Result<Vec<NamedTensor>, String> {
    let file = SafeTensors::deserialize(bytes).map_err(|e| format!("it is not a safetensors file: {e}"))?;
    let mut views: Vec<_> = file.iter().collect();
    views.sort_unstable_by_key(|(name, _)| *name);
    views
        .into_iter()
        .map(|(name, view)| {
            if view.dtype() != Dtype::F32 {
                return Err(format!("tensor `{name}` is {:?}, expected F32", view.dtype()));
            }
            let data = view.data().as_chunks::<4>().0.iter().map(|chunk| f32::from_le_bytes(*chunk)).collect();
            Ok(NamedTensor { name: name.to_owned(), shape: view.shape().to_vec(), data })
        })
        .collect()
}
