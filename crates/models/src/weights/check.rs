//! Checks that weights match a configuration.

use super::{Dtype, WeightTensor, Weights};
use crate::config::ModelConfig;
use crate::error::{Error, Result, nearest};
use crate::names::{EMBEDDING, HEAD};
use crate::parameters::Parameter;
use std::collections::BTreeMap;

/// The number of values that are converted at a time when tensors are compared.
const BLOCK: usize = 1 << 14;

impl Weights {
    /// Checks that the tensors match `config`: names, shapes and dtypes. Values are not read, except that the head of a tied model, if it is
    /// stored, must equal the embedding matrix.
    ///
    /// `rotary_emb.inv_freq` of old Llama checkpoints is ignored; it is computed from the configuration.
    ///
    /// # Errors
    /// [`Error::UnknownTensor`] with the nearest name; [`Error::MissingTensors`]; [`Error::TensorShape`]; [`Error::TensorDtype`];
    /// [`Error::Weights`] if a stored tied head differs.
    pub fn check(&self, config: &ModelConfig) -> Result<()> {
        let tied = config.tie_word_embeddings;
        let passed_over = |name: &str| (tied && name == HEAD) || name.ends_with(".rotary_emb.inv_freq");
        self.check_parameters(&config.parameters(), passed_over)?;
        if tied && self.contains(HEAD) { self.check_tied() } else { Ok(()) }
    }

    /// Checks that the tensors are `parameters`, except those for which `passed_over` returns `true`.
    pub(crate) fn check_parameters(&self, parameters: &[Parameter], passed_over: impl Fn(&str) -> bool) -> Result<()> {
        let wanted: BTreeMap<&str, &[usize]> =
            parameters.iter().map(|p| (p.name.as_str(), p.shape.as_slice())).collect();
        for name in self.names() {
            if !wanted.contains_key(name) && !passed_over(name) {
                return Err(Error::UnknownTensor {
                    path: self.path().to_owned(),
                    what: "a tensor that its configuration does not ask for:",
                    name: name.to_owned(),
                    nearest: nearest(name, wanted.keys().copied().filter(|wanted| !self.contains(wanted))),
                });
            }
        }
        let missing: Vec<&str> =
            parameters.iter().map(|p| p.name.as_str()).filter(|name| !self.contains(name)).collect();
        if !missing.is_empty() {
            return Err(Error::missing(self.path(), &missing));
        }
        for parameter in parameters {
            let tensor = self.tensor(&parameter.name)?;
            if tensor.shape() != parameter.shape {
                return Err(Error::TensorShape {
                    path: tensor.shard.path.clone(),
                    name: parameter.name.clone(),
                    expected: parameter.shape.clone(),
                    found: tensor.shape().to_vec(),
                });
            }
        }
        Ok(())
    }

    /// Checks that a stored head of a tied model equals the embedding.
    fn check_tied(&self) -> Result<()> {
        let (embedding, head) = (self.tensor(EMBEDDING)?, self.tensor(HEAD)?);
        if embedding.shape() != head.shape() || first_difference(&embedding, &head)?.is_some() {
            return Err(Error::weights(
                self.path(),
                format!(
                    "config.json has tie_word_embeddings: true, but {HEAD} differs from {EMBEDDING}; say \
                     tie_word_embeddings: false if the model has a head of its own, or remove {HEAD}"
                ),
            ));
        }
        Ok(())
    }

    /// Checks that every value of every tensor is finite. Reads all weights once.
    ///
    /// # Errors
    /// [`Error::NotFinite`] with the tensor, the first index and the value; [`Error::TensorDtype`].
    pub fn check_finite(&self) -> Result<()> {
        self.names().try_for_each(|name| self.tensor(name)?.check_finite())
    }
}

impl WeightTensor<'_> {
    /// Checks that every value is finite.
    ///
    /// # Errors
    /// [`Error::NotFinite`] with the first index and the value.
    pub fn check_finite(&self) -> Result<()> {
        // A value is NaN or infinite if all its exponent bits are set.
        let found = match self.dtype() {
            Dtype::F32 => first(self.bytes().as_chunks().0, |b| u32::from_le_bytes(b) & 0x7f80_0000 == 0x7f80_0000),
            Dtype::Bf16 => first(self.bytes().as_chunks().0, |b| u16::from_le_bytes(b) & 0x7f80 == 0x7f80),
            Dtype::F16 => first(self.bytes().as_chunks().0, |b| u16::from_le_bytes(b) & 0x7c00 == 0x7c00),
        };
        let Some(index) = found else { return Ok(()) };
        let mut value = [0.0];
        self.read(index, &mut value)?;
        Err(Error::NotFinite { path: self.shard.path.clone(), name: self.name().to_owned(), index, value: value[0] })
    }
}

/// Returns the first index at which `hit` holds. Whole blocks are tested without a branch per value.
fn first<const SIZE: usize>(values: &[[u8; SIZE]], hit: impl Fn([u8; SIZE]) -> bool) -> Option<usize> {
    let mut start = 0;
    for block in values.chunks(BLOCK) {
        if block.iter().fold(false, |any, &value| any | hit(value)) {
            return block.iter().position(|&value| hit(value)).map(|index| start + index);
        }
        start += block.len();
    }
    None
}

/// Returns the first flat index at which two tensors of the same shape differ.
pub(crate) fn first_difference(a: &WeightTensor<'_>, b: &WeightTensor<'_>) -> Result<Option<usize>> {
    if a.dtype() == b.dtype() && a.bytes() == b.bytes() {
        return Ok(None);
    }
    let (mut left, mut right) = (vec![0.0; BLOCK], vec![0.0; BLOCK]);
    for start in (0..a.len()).step_by(BLOCK) {
        let length = BLOCK.min(a.len() - start);
        a.read(start, &mut left[..length])?;
        b.read(start, &mut right[..length])?;
        if let Some(index) = left[..length].iter().zip(&right[..length]).position(|(a, b)| a != b) {
            return Ok(Some(start + index));
        }
    }
    Ok(None)
}
