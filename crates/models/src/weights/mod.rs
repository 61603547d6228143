//! Weights in memory-mapped safetensors files, by name.

mod check;
mod dtype;
mod experts;
pub(crate) mod files;
mod shard;
mod write;

pub(crate) use check::first_difference;
pub use dtype::Dtype;
pub(crate) use write::{FileTensor, SafetensorsWriter};

use crate::error::{Error, Result, nearest};
use crate::names::{CORRECTION_BIAS, TextNames};
use bytes::Bytes;
use experts::Mxfp4;
use files::{INDEX, WeightFiles};
use shard::Shard;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The tensors of a model folder or a single file. Files are mapped, not read: a tensor takes memory when it is used, and the system may
/// reclaim that memory.
///
/// ```no_run
/// let weights = grpo_models::Weights::open("Qwen2.5-0.5B-Instruct".as_ref())?;
/// let norm = weights.tensor("model.norm.weight")?;
/// let mut values = vec![0.0; norm.len()];
/// norm.read(0, &mut values)?;
/// # Ok::<(), grpo_models::Error>(())
/// ```
#[derive(Debug)]
pub struct Weights {
    path: PathBuf,
    shards: Vec<Shard>,
    /// The place of each tensor.
    tensors: BTreeMap<String, Place>,
    /// The tensors that are not the text decoder's: of a wrapper, or of further layers of a family.
    carried: BTreeMap<String, Place>,
    /// The names of the text decoder's tensors in the files of a wrapper.
    names: Option<TextNames>,
}

/// The place of a tensor in the files.
#[derive(Debug)]
struct Place {
    /// The index of the shard.
    shard: usize,
    source: Source,
}

#[derive(Debug)]
enum Source {
    /// A tensor of the shard with this name.
    Tensor(String),
    /// `shape` values from the flat index `start` on of the tensor `of`.
    Rows { of: String, start: usize, shape: [usize; 2] },
    /// A quantised tensor.
    Mxfp4(Mxfp4),
}

/// A tensor that is copied as it is.
pub(crate) struct CarriedTensor<'a> {
    pub(crate) file: FileTensor,
    pub(crate) bytes: &'a [u8],
}

impl Weights {
    /// Maps the weights of a folder: `model.safetensors`, or the shards of `model.safetensors.index.json`, or, without an index,
    /// `model-00001-of-0000N.safetensors` and its siblings.
    ///
    /// # Errors
    /// [`Error::File`]; [`Error::Json`]; [`Error::Weights`] for a shard that is missing, truncated or not in the index, a tensor that is in
    /// two shards or not in the one of the index, and a folder without readable weights.
    pub fn open(folder: &Path) -> Result<Self> {
        let files = WeightFiles::find(folder)?;
        let shards = files.names.iter().map(|name| Shard::open(&folder.join(name))).collect::<Result<Vec<_>>>()?;
        let mut weights = Self::of_shards(folder, shards)?;
        if let Some(index) = files.index {
            weights.compare_with_index(&index)?;
        }
        experts::expand(folder, &weights.shards, &mut weights.tensors)?;
        Ok(weights)
    }

    /// Maps the tensors of one safetensors file.
    ///
    /// # Errors
    /// [`Error::File`]; [`Error::Weights`] for a damaged file.
    pub fn open_file(file: &Path) -> Result<Self> {
        let mut weights = Self::open_as_stored(file)?;
        experts::expand(file, &weights.shards, &mut weights.tensors)?;
        Ok(weights)
    }

    /// Maps the tensors of one safetensors file by their stored names: a tensor of all experts stays one tensor.
    ///
    /// # Errors
    /// See [`Weights::open_file`].
    pub fn open_as_stored(file: &Path) -> Result<Self> {
        Self::of_shards(file, vec![Shard::open(file)?])
    }

    fn of_shards(path: &Path, shards: Vec<Shard>) -> Result<Self> {
        let tensors = places(path, &shards)?;
        Ok(Self { path: path.to_owned(), tensors, carried: BTreeMap::new(), names: None, shards })
    }

    /// Returns the weights of the text decoder of a model of images and text, by the decoder's own names. The other tensors are only
    /// carried along.
    pub(crate) fn of_text(mut self) -> Result<Self> {
        let Some(names) = TextNames::find(|name| self.contains(name)) else {
            let expected = TextNames::embeddings();
            let reason = format!("expected the embedding of the text decoder as one of {expected}, found none");
            return Err(Error::weights(&self.path, reason));
        };
        for (stored, place) in std::mem::take(&mut self.tensors) {
            match (names.own(&stored), &place.source) {
                (Some(own), _) => drop(self.tensors.insert(own, place)),
                (None, Source::Tensor(_)) => drop(self.carried.insert(stored, place)),
                (None, _) => return Err(self.expert_outside(&stored)),
            }
        }
        self.names = Some(names);
        Ok(self)
    }

    /// Only carries along the tensors whose names start with `prefix`.
    ///
    /// # Errors
    /// [`Error::Weights`] for a tensor of experts, which cannot be copied.
    pub(crate) fn carrying(mut self, prefix: Option<&str>) -> Result<Self> {
        let Some(prefix) = prefix else { return Ok(self) };
        for (name, place) in std::mem::take(&mut self.tensors) {
            match &place.source {
                _ if !name.starts_with(prefix) => drop(self.tensors.insert(name, place)),
                Source::Tensor(_) => drop(self.carried.insert(name, place)),
                _ => return Err(self.expert_outside(&name)),
            }
        }
        Ok(self)
    }

    fn expert_outside(&self, name: &str) -> Error {
        Error::weights(&self.path, format!("`{name}` is an expert outside of the text decoder, which cannot be copied"))
    }

    /// Returns the weights with other names.
    pub(crate) fn renamed(mut self, name: impl Fn(&str) -> String) -> Self {
        self.tensors = self.tensors.into_iter().map(|(stored, place)| (name(&stored), place)).collect();
        self
    }

    /// Returns the names of the text decoder's tensors in the files of a wrapper.
    pub(crate) fn text_names(&self) -> Option<TextNames> {
        self.names
    }

    /// Returns the tensors that are not the text decoder's, sorted by name.
    pub(crate) fn carried(&self) -> impl Iterator<Item = CarriedTensor<'_>> {
        self.carried.iter().filter_map(|(name, place)| {
            let shard = &self.shards[place.shard];
            let Source::Tensor(stored) = &place.source else { return None };
            let info = shard.header.info(stored)?;
            let bytes = shard.bytes(info.data_offsets);
            let dtype = info.dtype.to_string();
            let file = FileTensor { name: name.clone(), shape: info.shape.clone(), dtype, bytes: bytes.len() as u64 };
            Some(CarriedTensor { file, bytes })
        })
    }

    /// Returns the folder or the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns `true` if there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Returns the tensor of this name. The matrices of an expert may be parts of a tensor of all experts, and experts in MXFP4 are
    /// dequantised to bf16 when their values are first used.
    ///
    /// # Errors
    /// [`Error::UnknownTensor`] with the nearest name; [`Error::TensorDtype`] for a dtype other than F32, BF16 and F16.
    pub fn tensor(&self, name: &str) -> Result<WeightTensor<'_>> {
        let unknown = || Error::UnknownTensor {
            path: self.path.clone(),
            what: "no tensor",
            name: name.to_owned(),
            nearest: nearest(name, self.names()),
        };
        let (name, place) = self.tensors.get_key_value(name).ok_or_else(unknown)?;
        let shard = &self.shards[place.shard];
        let stored = match &place.source {
            Source::Mxfp4(values) => {
                let (dtype, shape, data) = (Dtype::Bf16, &values.shape[..], Data::Mxfp4(values));
                return Ok(WeightTensor { name, dtype, shape, shard, data });
            }
            Source::Tensor(stored) | Source::Rows { of: stored, .. } => stored,
        };
        let info = shard.header.info(stored).ok_or_else(unknown)?;
        let dtype = Dtype::of_safetensors(info.dtype).ok_or_else(|| Error::TensorDtype {
            path: shard.path.clone(),
            name: stored.clone(),
            found: info.dtype.to_string(),
        })?;
        let (offsets, shape) = match &place.source {
            Source::Rows { start, shape, .. } => {
                let begin = info.data_offsets.0 + start * dtype.size();
                ((begin, begin + shape[0] * shape[1] * dtype.size()), &shape[..])
            }
            _ => (info.data_offsets, &info.shape[..]),
        };
        Ok(WeightTensor { name, dtype, shape, shard, data: Data::Mapped(offsets) })
    }

    /// Returns shape and values of the tensor of this name if it has bytes (U8), which are no weights.
    pub fn bytes(&self, name: &str) -> Option<(&[usize], &[u8])> {
        let place = self.tensors.get(name)?;
        let (shard, Source::Tensor(stored)) = (&self.shards[place.shard], &place.source) else { return None };
        let info = shard.header.info(stored).filter(|info| info.dtype == safetensors::Dtype::U8)?;
        Some((&info.shape, shard.bytes(info.data_offsets)))
    }

    /// Returns the dtype in which the weights can be used from the mapped files: the common dtype of all tensors, or f32 if dtypes differ or
    /// are f16, which must be converted.
    pub fn mapped_dtype(&self) -> Dtype {
        // Correction biases of routers stay f32, also in files of bf16 weights.
        let names = self.names().filter(|name| !name.ends_with(CORRECTION_BIAS));
        let mut dtypes = names.filter_map(|name| self.tensor(name).ok()).map(|tensor| tensor.dtype());
        let first = dtypes.next().filter(|first| *first != Dtype::F16);
        first.filter(|first| dtypes.all(|dtype| dtype == *first)).unwrap_or(Dtype::F32)
    }

    /// Returns the path and the mapped bytes, header and tensors, of every file, for checksums.
    pub fn files(&self) -> impl Iterator<Item = (&Path, &[u8])> {
        self.shards.iter().map(|shard| (shard.path.as_path(), shard.file()))
    }

    fn compare_with_index(&self, index: &BTreeMap<String, String>) -> Result<()> {
        let path = self.path.join(INDEX);
        for (name, file) in index {
            let found = self.tensors.get(name).map(|place| self.shards[place.shard].path.as_path());
            if found != Some(self.path.join(file).as_path()) {
                let other = found.and_then(Path::file_name).map(|file| format!("; it is in {}", file.display()));
                let other = other.unwrap_or_default();
                let reason = format!("the index says that {file} holds `{name}`, and it does not{other}");
                return Err(Error::weights(&path, reason));
            }
        }
        match self.names().find(|name| !index.contains_key(*name)) {
            None => Ok(()),
            Some(name) => {
                let file = self.shards[self.tensors[name].shard].path.file_name().unwrap_or_default().display();
                Err(Error::weights(&path, format!("{file} holds `{name}`, which the index does not name")))
            }
        }
    }
}

/// Returns the place of each tensor.
fn places(path: &Path, shards: &[Shard]) -> Result<BTreeMap<String, Place>> {
    let mut tensors = BTreeMap::new();
    for (place, shard) in shards.iter().enumerate() {
        for name in shard.header.tensors().into_keys() {
            let of_name = Place { shard: place, source: Source::Tensor(name.clone()) };
            if let Some(first) = tensors.insert(name.clone(), of_name) {
                let [first, second] =
                    [first.shard, place].map(|place| shards[place].path.file_name().unwrap_or_default().display());
                let reason = format!("the tensor `{name}` is in two shards, {first} and {second}");
                return Err(Error::weights(path, reason));
            }
        }
    }
    Ok(tensors)
}

/// A tensor in a mapped file.
#[derive(Clone, Copy, Debug)]
pub struct WeightTensor<'a> {
    name: &'a str,
    dtype: Dtype,
    shape: &'a [usize],
    shard: &'a Shard,
    data: Data<'a>,
}

#[derive(Clone, Copy, Debug)]
enum Data<'a> {
    /// The range of the tensor's bytes in the shard.
    Mapped((usize, usize)),
    Mxfp4(&'a Mxfp4),
}

impl<'a> WeightTensor<'a> {
    /// Returns the name.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// Returns the dtype.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns the sizes of the dimensions, outermost first.
    pub fn shape(&self) -> &'a [usize] {
        self.shape
    }

    /// Returns the values as stored in the file: little-endian, row-major.
    pub fn bytes(&self) -> &'a [u8] {
        match self.data {
            Data::Mapped(offsets) => self.shard.bytes(offsets),
            Data::Mxfp4(values) => values.values(),
        }
    }

    /// Returns [`WeightTensor::bytes`] without a copy and with an unlimited lifetime: the result keeps the file mapped.
    pub fn shared_bytes(&self) -> Bytes {
        match self.data {
            Data::Mapped(offsets) => self.shard.shared(offsets),
            Data::Mxfp4(values) => values.values().clone(),
        }
    }

    /// Removes the pages of a mapped tensor from this process's memory, for readers that need its values once. The next use reads them again.
    pub fn release(&self) {
        if let Data::Mapped(offsets) = self.data {
            self.shard.release(offsets);
        }
    }

    /// Returns the number of values.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns `true` if the tensor has no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads `out.len()` values from the flat index `start` on as f32, which represents all three dtypes exactly.
    ///
    /// # Errors
    /// [`Error::Length`] if the tensor is too short.
    pub fn read(&self, start: usize, out: &mut [f32]) -> Result<()> {
        let size = self.dtype.size();
        let end = start.checked_add(out.len()).filter(|&end| end <= self.len()).ok_or_else(|| Error::Length {
            name: self.name.to_owned(),
            expected: format!("at most {} from index {start} on", self.len().saturating_sub(start)),
            found: out.len(),
        })?;
        let bytes = &self.bytes()[start * size..end * size];
        match self.dtype {
            Dtype::F32 => widen(bytes, out, f32::from_le_bytes),
            Dtype::Bf16 => widen(bytes, out, |bytes| half::bf16::from_le_bytes(bytes).to_f32()),
            Dtype::F16 => widen(bytes, out, |bytes| half::f16::from_le_bytes(bytes).to_f32()),
        }
        Ok(())
    }

    /// Returns all values as f32, borrowed from the file if it stores f32, else a copy.
    pub fn values(&self) -> Cow<'a, [f32]> {
        match bytemuck::try_cast_slice(self.bytes()) {
            Ok(values) if self.dtype == Dtype::F32 && cfg!(target_endian = "little") => Cow::Borrowed(values),
            _ => Cow::Owned(self.to_vec()),
        }
    }

    /// Returns all values as f32.
    pub fn to_vec(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.len()];
        self.read(0, &mut values).expect("as many values as the tensor has");
        values
    }
}

fn widen<const SIZE: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn([u8; SIZE]) -> f32) {
    out.iter_mut().zip(bytes.as_chunks().0).for_each(|(to, from)| *to = value(*from));
}
