//! Writes a safetensors file tensor by tensor.

use super::Dtype;
use crate::error::{Error, Result};
use crate::names::CORRECTION_BIAS;
use crate::parameters::Parameter;
use half::{bf16, f16};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// The number of values that are converted at a time.
const BLOCK: usize = 1 << 16;
/// The alignment of the header's length in bytes, so that tensors are aligned.
const ALIGNMENT: usize = 8;

/// A tensor of a file that is written.
#[derive(Clone, Debug)]
pub(crate) struct FileTensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    /// The dtype by safetensors' name.
    pub(crate) dtype: String,
    /// The number of bytes.
    pub(crate) bytes: u64,
}

impl FileTensor {
    /// Returns the parameter stored in a dtype.
    pub(crate) fn of(Parameter { name, shape }: Parameter, dtype: Dtype) -> Self {
        let dtype = stored(&name, dtype);
        let bytes = (shape.iter().product::<usize>() * dtype.size()) as u64;
        Self { name, shape, dtype: dtype.safetensors_name(), bytes }
    }
}

/// Returns the dtype of a tensor in a file of this dtype: correction biases of routers stay f32, as in transformers, because rounding would change the
/// choice of experts.
fn stored(name: &str, dtype: Dtype) -> Dtype {
    if name.ends_with(CORRECTION_BIAS) { Dtype::F32 } else { dtype }
}

/// A safetensors file whose tensors are known beforehand and may be written in any order. The file has its final length, and every tensor
/// its offset, from the start.
#[derive(Debug)]
pub(crate) struct SafetensorsWriter {
    path: PathBuf,
    file: File,
    /// The offset of the first tensor in the file.
    data: u64,
    dtype: Dtype,
    places: BTreeMap<String, TensorSlot>,
}

#[derive(Debug)]
struct TensorSlot {
    /// The offset behind the header.
    offset: u64,
    /// The number of bytes.
    bytes: u64,
    written: bool,
}

impl SafetensorsWriter {
    /// Creates the file with its header: the tensors in this order, and the metadata that `transformers` and PEFT require (`format: pt`).
    /// Values are converted to `dtype`.
    pub(crate) fn create(path: &Path, dtype: Dtype, tensors: &[FileTensor]) -> Result<Self> {
        let mut header = Map::from_iter([("__metadata__".to_owned(), json!({"format": "pt"}))]);
        let (mut end, mut places) = (0, BTreeMap::new());
        for FileTensor { name, shape, dtype, bytes } in tensors {
            let (offset, bytes) = (end, *bytes);
            end += bytes;
            header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}));
            places.insert(name.clone(), TensorSlot { offset, bytes, written: false });
        }
        let mut text = Value::Object(header).to_string();
        text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(ALIGNMENT) - text.len()));
        let data = (size_of::<u64>() + text.len()) as u64;
        let create = || -> io::Result<File> {
            let mut file = File::create_new(path)?;
            file.set_len(data + end)?;
            file.write_all(&(text.len() as u64).to_le_bytes())?;
            file.write_all(text.as_bytes())?;
            Ok(file)
        };
        let file = create().map_err(|e| Error::io("write", path, e))?;
        Ok(Self { path: path.to_owned(), file, data, dtype, places })
    }

    /// Writes the bytes of a tensor; returns `false` if the file has none of this name.
    pub(crate) fn copy(&mut self, name: &str, bytes: &[u8]) -> Result<bool> {
        if !self.start(name, bytes.len(), 1)? {
            return Ok(false);
        }
        self.file.write_all(bytes).map_err(|e| Error::io("write", &self.path, e))?;
        self.finish(name);
        Ok(true)
    }

    fn finish(&mut self, name: &str) {
        self.places.entry(name.to_owned()).and_modify(|place| place.written = true);
    }

    /// Seeks to a tensor of `count` values of `size` bytes; returns `false` if the file has none of this name.
    fn start(&mut self, name: &str, count: usize, size: usize) -> Result<bool> {
        let Some(place) = self.places.get(name) else { return Ok(false) };
        if place.written || place.bytes != (count * size) as u64 {
            let values = place.bytes / size as u64;
            let expected = if place.written { "it once".to_owned() } else { format!("{values} values") };
            return Err(Error::Length { name: name.to_owned(), expected, found: count });
        }
        let at = SeekFrom::Start(self.data + place.offset);
        self.file.seek(at).map_err(|e| Error::io("write", &self.path, e))?;
        Ok(true)
    }

    /// Writes a tensor; returns `false` if the file has none of this name.
    pub(crate) fn write(&mut self, name: &str, values: &[f32]) -> Result<bool> {
        let dtype = stored(name, self.dtype);
        if !self.start(name, values.len(), dtype.size())? {
            return Ok(false);
        }
        let io = |e| Error::io("write", &self.path, e);
        let mut bytes = Vec::with_capacity(BLOCK.min(values.len()) * dtype.size());
        for (number, block) in values.chunks(BLOCK).enumerate() {
            bytes.clear();
            if let Some(index) = encode(block, dtype, &mut bytes) {
                return Err(Error::NotFinite {
                    path: self.path.clone(),
                    name: name.to_owned(),
                    index: number * BLOCK + index,
                    value: block[index],
                });
            }
            self.file.write_all(&bytes).map_err(io)?;
        }
        self.finish(name);
        Ok(true)
    }

    /// Returns the names of all tensors.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    /// Returns the tensors that were not written yet.
    pub(crate) fn missing(&self) -> impl Iterator<Item = &str> {
        self.places.iter().filter(|(_, place)| !place.written).map(|(name, _)| name.as_str())
    }
}

/// Appends the bytes of `values` in a dtype. Returns the index of the first value that is not finite in this dtype.
fn encode(values: &[f32], dtype: Dtype, bytes: &mut Vec<u8>) -> Option<usize> {
    let finite = |value: f32| match dtype {
        Dtype::F32 => value.is_finite(),
        Dtype::Bf16 => bf16::from_f32(value).is_finite(),
        Dtype::F16 => f16::from_f32(value).is_finite(),
    };
    match dtype {
        Dtype::F32 => values.iter().for_each(|value| bytes.extend(value.to_le_bytes())),
        Dtype::Bf16 => values.iter().for_each(|&value| bytes.extend(bf16::from_f32(value).to_le_bytes())),
        Dtype::F16 => values.iter().for_each(|&value| bytes.extend(f16::from_f32(value).to_le_bytes())),
    }
    values.iter().position(|&value| !finite(value))
}
