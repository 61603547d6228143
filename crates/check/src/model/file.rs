//! Files of the format `grpo-model/1`: token ids, and another system's results of a decoder.

use super::compare::Running;
use crate::error::{Error, Result};
use grpo_core::backend_api::strict::nearest;
use grpo_models::{LoraConfig, ModelConfig, Parameter};
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// The name of the format in the metadata of a file.
const FORMAT: &str = "grpo-model/1";
/// The longest header of a safetensors file according to its specification.
const MAX_HEADER: u64 = 100_000_000;
/// Bytes of a tensor per read.
const BLOCK: usize = 1 << 20;
const LOGITS: &str = "expected.logits";
const LOSS: &str = "expected.loss";
const GRADIENT: &str = "expected.grad.";
const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// A file of the format `grpo-model/1`, opened for a model: a safetensors file with the metadata `format: grpo-model/1` and
///
/// * `ids` `[B, T]`, integers: the tokens of B sequences,
/// * `mask` `[B, T]`: 1 for tokens, 0 for padding on the right, which is ignored; optional, all 1 if missing,
/// * `expected.logits` `[B, T, V]`,
/// * `expected.loss`: the mean cross-entropy, in nats, of all tokens except the first of each sequence,
/// * `expected.grad.NAME`: the gradient of that loss with respect to the parameter that `transformers` calls NAME, also in a model of images
///   and text around the decoder.
///
/// At least one expected tensor is required. Expected tensors are f64, f32, bf16 or f16, and stay on disk: they are read during the
/// comparison.
#[derive(Debug)]
pub struct ModelFile {
    path: PathBuf,
    file: File,
    /// Start of the tensors.
    data: u64,
    header: Metadata,
    /// T.
    length: usize,
    vocab: usize,
    tied: bool,
    sequences: Vec<Vec<u32>>,
    loss: Option<f64>,
    logits: Option<Expected>,
    /// The gradients by the decoder's names of parameters.
    gradients: Vec<(String, Expected)>,
}

/// An expected tensor of the file.
#[derive(Clone, Debug)]
pub(crate) struct Expected {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    dtype: Dtype,
    /// Start of the tensor in the file.
    start: u64,
    /// Largest magnitude among the compared entries.
    pub(crate) largest: f64,
}

impl Expected {
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

impl ModelFile {
    /// Opens a file for a model of this configuration, or for adapters of it: their base is frozen, and gradients belong to the adapters,
    /// under PEFT's names. Every tensor is checked.
    ///
    /// # Errors
    /// [`Error::ModelFile`] for a damaged file or another format; tensors with unknown names, wrong shapes or dtypes,
    /// or values that are not finite; ids outside the vocabulary; a mask that is not padding on the right; and a file without expected tensors.
    pub fn open(path: &Path, config: &ModelConfig, lora: Option<&LoraConfig>) -> Result<Self> {
        let (mut file, length) = grpo_files::open_regular(path).map_err(|e| Error::io("read", path, e))?;
        let (data, header) = read_header(path, &mut file, length)?;
        let mut this = Self {
            path: path.to_owned(),
            file,
            data,
            header,
            length: 0,
            vocab: config.vocab_size,
            tied: config.tie_word_embeddings,
            sequences: Vec::new(),
            loss: None,
            logits: None,
            gradients: Vec::new(),
        };
        this.check_format()?;
        this.read_sequences()?;
        let parameters = match lora {
            Some(lora) => lora.parameters(config).map_err(Error::policy)?,
            None => config.parameters(),
        };
        this.read_expected(parameters)?;
        Ok(this)
    }

    pub(crate) fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// Returns the sequences without padding.
    pub fn sequences(&self) -> &[Vec<u32>] {
        &self.sequences
    }

    pub(crate) fn vocab(&self) -> usize {
        self.vocab
    }

    pub(crate) fn loss(&self) -> Option<f64> {
        self.loss
    }

    pub(crate) fn logits(&self) -> Option<&Expected> {
        self.logits.as_ref()
    }

    /// Iterates over the expected gradients by the names of their parameters.
    pub(crate) fn gradients(&self) -> impl Iterator<Item = (&str, &Expected)> {
        self.gradients.iter().map(|(parameter, expected)| (parameter.as_str(), expected))
    }

    /// Returns the names under which the file may contain the parameter `name`.
    pub(crate) fn aliases<'a>(&self, name: &'a str) -> Vec<&'a str> {
        if self.tied && name == EMBEDDING { vec![name, HEAD] } else { vec![name] }
    }

    /// Returns the index of the first logit at a position of a sequence.
    pub(crate) fn first_logit(&self, sequence: usize, position: usize) -> usize {
        (sequence * self.length + position) * self.vocab
    }

    /// Compares `found` with the entries of a tensor from `start` on.
    pub(crate) fn compare(
        &self,
        expected: &Expected,
        start: usize,
        found: &[f32],
        running: &mut Running,
    ) -> Result<()> {
        let mut values = (start..).zip(found);
        self.read(expected, start..start + found.len(), |expected| {
            if let Some((at, found)) = values.next() {
                running.add(at, expected, f64::from(*found));
            }
        })
    }

    fn refuse<T>(&self, reason: impl Into<String>) -> Result<T> {
        Err(Error::ModelFile { path: self.path.clone(), reason: reason.into() })
    }

    fn check_format(&self) -> Result<()> {
        let format = self.header.metadata().as_ref().and_then(|metadata| metadata.get("format"));
        match format.map(String::as_str) {
            Some(FORMAT) => Ok(()),
            Some(other @ "grpo-batch/1") => {
                self.refuse(format!("expected the metadata `format: {FORMAT}`, got {other}, which is compared without --model"))
            }
            other => self.refuse(format!(
                "expected the metadata `format: {FORMAT}`, got {}; with safetensors in Python: save_file(tensors, path, \
                 {{\"format\": \"{FORMAT}\"}})",
                other.unwrap_or("none")
            )),
        }
    }

    /// Returns a tensor of the file, if it exists.
    fn find(&self, name: &str) -> Result<Option<Expected>> {
        let Some(info) = self.header.info(name) else { return Ok(None) };
        let bytes = info.data_offsets.1.saturating_sub(info.data_offsets.0);
        let bits = info.shape.iter().try_fold(info.dtype.bitsize(), |product, d| product.checked_mul(*d));
        if bits != bytes.checked_mul(8) {
            let found = format!("{bytes} bytes for {:?} of {}", info.shape, info.dtype);
            return self.refuse(format!("its header gives `{name}` {found}"));
        }
        let start = self.data + info.data_offsets.0 as u64;
        Ok(Some(Expected { name: name.to_owned(), shape: info.shape.clone(), dtype: info.dtype, start, largest: 0.0 }))
    }

    /// Calls `see` with each of the entries `range` of a tensor.
    fn read(&self, tensor: &Expected, range: std::ops::Range<usize>, mut see: impl FnMut(f64)) -> Result<()> {
        let Some((size, value)) = reader(tensor.dtype) else {
            return self.refuse(format!("`{}` is {}, which is no dtype of such a file", tensor.name, tensor.dtype));
        };
        let io = |e| Error::io("read", &self.path, e);
        let mut file = &self.file;
        file.seek(SeekFrom::Start(tensor.start + (range.start * size) as u64)).map_err(io)?;
        let mut buffer = vec![0; BLOCK.min(range.len() * size)];
        let mut left = range.len() * size;
        while left > 0 {
            let piece = &mut buffer[..left.min(BLOCK)];
            file.read_exact(piece).map_err(io)?;
            piece.chunks_exact(size).for_each(|bytes| see(value(bytes)));
            left -= piece.len();
        }
        Ok(())
    }

    fn read_sequences(&mut self) -> Result<()> {
        let Some(ids) = self.find("ids")? else {
            return self.refuse("expected a tensor `ids` [B, T] of token ids, got none");
        };
        let [rows, length] = ids.shape[..] else {
            return self.refuse(format!("expected `ids` [B, T], got {:?}", ids.shape));
        };
        if rows == 0 || length == 0 {
            return self.refuse(format!("expected `ids` [B, T] with at least one token, got {:?}", ids.shape));
        }
        if is_float(ids.dtype) || ids.dtype == Dtype::BOOL || reader(ids.dtype).is_none() {
            return self.refuse(format!("expected `ids` of integers (I64), got {}", ids.dtype));
        }
        let mut masks = vec![1.0; rows * length];
        if let Some(mask) = self.find("mask")? {
            if mask.shape != ids.shape {
                return self.refuse(format!("expected `mask` {:?} as `ids`, got {:?}", ids.shape, mask.shape));
            }
            masks.clear();
            self.read(&mask, 0..rows * length, |value| masks.push(value))?;
        }
        let mut all = Vec::with_capacity(rows * length);
        self.read(&ids, 0..rows * length, |id| all.push(id))?;
        let mut sequences = Vec::with_capacity(rows);
        for (row, (ids, mask)) in all.chunks_exact(length).zip(masks.chunks_exact(length)).enumerate() {
            if let Some(column) = mask.iter().position(|m| *m != 0.0 && *m != 1.0) {
                return self.refuse(format!("`mask`[{row}, {column}] is {}; expected 0 or 1", mask[column]));
            }
            let tokens = mask.iter().take_while(|m| **m == 1.0).count();
            if let Some(behind) = mask[tokens..].iter().position(|m| *m == 1.0) {
                return self.refuse(format!(
                    "`mask` has 0 at [{row}, {tokens}] and 1 behind it at [{row}, {}]; expected padding on the right: 1 for the \
                     tokens of a row, then 0",
                    tokens + behind
                ));
            }
            let known = |id: f64| (id >= 0.0 && id < self.vocab as f64).then_some(id as u32);
            let sequence: Option<Vec<u32>> = ids[..tokens].iter().map(|id| known(*id)).collect();
            let Some(sequence) = sequence else {
                let column = ids.iter().position(|id| known(*id).is_none()).unwrap_or_default();
                let (id, vocab) = (ids[column], self.vocab);
                return self
                    .refuse(format!("`ids`[{row}, {column}] is {id}, outside the vocabulary of {vocab} tokens"));
            };
            sequences.push(sequence);
        }
        if sequences.iter().all(Vec::is_empty) {
            return self.refuse("`mask` is 0 everywhere: there is nothing to compare");
        }
        (self.sequences, self.length) = (sequences, length);
        Ok(())
    }

    fn read_expected(&mut self, mut parameters: Vec<Parameter>) -> Result<()> {
        if let Some(embedding) = parameters.iter().find(|p| self.tied && p.name == EMBEDDING) {
            let head = Parameter { name: HEAD.to_owned(), ..embedding.clone() };
            parameters.push(head);
        }
        let targets: usize = self.sequences.iter().map(|sequence| sequence.len().saturating_sub(1)).sum();
        let mut names: Vec<String> = self.header.tensors().into_keys().collect();
        names.sort();
        for name in names.iter().filter(|name| *name != "ids" && *name != "mask") {
            let Some(mut tensor) = self.find(name)? else { continue };
            if !is_float(tensor.dtype) {
                return self.refuse(format!("expected `{name}` of F64, F32, BF16 or F16, got {}", tensor.dtype));
            }
            let gradient_name = name.strip_prefix(GRADIENT).map(grpo_models::text_tensor);
            let shape = match gradient_name.as_deref() {
                None if name == LOSS && tensor.len() == 1 => tensor.shape.clone(),
                None if name == LOSS => vec![],
                None if name == LOGITS => vec![self.sequences.len(), self.length, self.vocab],
                parameter => match parameters.iter().find(|p| Some(p.name.as_str()) == parameter) {
                    Some(parameter) => parameter.shape.clone(),
                    None => return self.unknown(name, &parameters),
                },
            };
            if tensor.shape != shape {
                return self.refuse(format!("expected `{name}` {shape:?}, got {:?}", tensor.shape));
            }
            if name != LOGITS && targets == 0 {
                return self.refuse(format!("`{name}` is of a loss, but no sequence has a second token to predict"));
            }
            self.measure(&mut tensor)?;
            match name.as_str() {
                LOSS => {
                    let mut loss = None;
                    self.read(&tensor, 0..1, |value| loss = Some(value))?;
                    self.loss = loss;
                }
                LOGITS => self.logits = Some(tensor),
                _ => self.gradients.push((gradient_name.unwrap_or_default().into_owned(), tensor)),
            }
        }
        if self.loss.is_none() && self.logits.is_none() && self.gradients.is_empty() {
            return self.refuse(format!("there is nothing to compare: expected {LOSS}, {LOGITS} or {GRADIENT}NAME"));
        }
        Ok(())
    }

    fn unknown(&self, name: &str, parameters: &[Parameter]) -> Result<()> {
        let gradients: Vec<String> = parameters.iter().map(|p| format!("{GRADIENT}{}", p.name)).collect();
        let known = ["ids", "mask", LOSS, LOGITS].into_iter().chain(gradients.iter().map(String::as_str));
        let hint = nearest(name, known).map(|nearest| format!("; did you mean `{nearest}`?")).unwrap_or_default();
        self.refuse(format!("it has a tensor `{name}`, which neither the format nor the model has{hint}"))
    }

    /// Finds the largest of the compared entries, and refuses entries that are not finite.
    fn measure(&self, tensor: &mut Expected) -> Result<()> {
        let (mut largest, mut bad) = (0.0_f64, None);
        // Logits of padding are not compared.
        let row = self.length * self.vocab;
        let sequences = self.sequences.iter().enumerate();
        let ranges: Vec<_> = match tensor.name == LOGITS {
            true => sequences.map(|(i, sequence)| i * row..i * row + sequence.len() * self.vocab).collect(),
            false => std::iter::once(0..tensor.len()).collect(),
        };
        for range in ranges {
            let mut index = range.start;
            self.read(tensor, range, |value| {
                match value.is_finite() {
                    true => largest = largest.max(value.abs()),
                    false => bad = bad.or(Some((index, value))),
                }
                index += 1;
            })?;
        }
        if let Some((index, value)) = bad {
            return self.refuse(format!("`{}` holds {value} at index {index} (row-major)", tensor.name));
        }
        tensor.largest = largest;
        Ok(())
    }
}

/// Reads the header and returns the start of the tensors. Checks that the file has the length that its header describes.
fn read_header(path: &Path, file: &mut File, length: u64) -> Result<(u64, Metadata)> {
    let refuse = |reason: String| Error::ModelFile { path: path.to_owned(), reason };
    let io = |e| Error::io("read", path, e);
    let mut prefix = [0; 8];
    if length < prefix.len() as u64 {
        return Err(refuse(format!("it is no safetensors file: it has {length} bytes")));
    }
    file.read_exact(&mut prefix).map_err(io)?;
    let header = u64::from_le_bytes(prefix);
    if header > MAX_HEADER.min(length - 8) {
        return Err(refuse(format!(
            "it is no safetensors file, or it is truncated: its header would have {header} bytes"
        )));
    }
    let mut text = vec![0; header as usize];
    file.read_exact(&mut text).map_err(io)?;
    let metadata: Metadata =
        serde_json::from_slice(&text).map_err(|e| refuse(format!("its header is not a safetensors header: {e}")))?;
    let data = 8 + header;
    let described = data + metadata.data_len() as u64;
    let inside = metadata.tensors().values().all(|info| info.data_offsets.1 <= metadata.data_len());
    if described != length || !inside {
        return Err(refuse(format!("its header describes {described} bytes, and it has {length}: it is damaged")));
    }
    Ok((data, metadata))
}

fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::BF16 | Dtype::F16)
}

type Reader = fn(&[u8]) -> f64;

/// Returns the size of a dtype and a function that reads a value. f64 holds all values exactly except integers beyond 2^53, which exceed
/// any token id.
fn reader(dtype: Dtype) -> Option<(usize, Reader)> {
    fn take<const N: usize>(bytes: &[u8]) -> [u8; N] {
        let mut taken = [0; N];
        taken.copy_from_slice(bytes);
        taken
    }
    Some(match dtype {
        Dtype::BOOL | Dtype::U8 => (1, |b| f64::from(b[0])),
        Dtype::I8 => (1, |b| f64::from(i8::from_le_bytes(take(b)))),
        Dtype::U16 => (2, |b| f64::from(u16::from_le_bytes(take(b)))),
        Dtype::I16 => (2, |b| f64::from(i16::from_le_bytes(take(b)))),
        Dtype::U32 => (4, |b| f64::from(u32::from_le_bytes(take(b)))),
        Dtype::I32 => (4, |b| f64::from(i32::from_le_bytes(take(b)))),
        Dtype::U64 => (8, |b| u64::from_le_bytes(take(b)) as f64),
        Dtype::I64 => (8, |b| i64::from_le_bytes(take(b)) as f64),
        Dtype::F16 => (2, |b| half::f16::from_le_bytes(take(b)).to_f64()),
        Dtype::BF16 => (2, |b| half::bf16::from_le_bytes(take(b)).to_f64()),
        Dtype::F32 => (4, |b| f64::from(f32::from_le_bytes(take(b)))),
        Dtype::F64 => (8, |b| f64::from_le_bytes(take(b))),
        _ => return None,
    })
}
