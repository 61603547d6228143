//! Tensors that processes share: one file each with only the numbers, row-major, in native byte order.
//!
//! A worker reads such a file directly into memory, in any language.

use crate::error::{Error, Result};
use bytemuck::Pod;
use grpo_core::{Dtype, Tensor};
use half::bf16;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// A tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorFile {
    /// The path of the file.
    pub path: PathBuf,
    /// The dtype of the numbers: `f32`, `bf16`, `i64` or `u32`.
    pub dtype: String,
    /// The shape of the tensor, row-major.
    pub shape: Vec<usize>,
}

impl TensorFile {
    /// Writes `values` to `path`.
    pub(crate) fn write<T: Pod>(path: PathBuf, dtype: &str, shape: Vec<usize>, values: &[T]) -> Result<Self> {
        debug_assert_eq!(shape.iter().product::<usize>(), values.len());
        let written = File::create(&path).and_then(|mut file| file.write_all(bytemuck::cast_slice(values)));
        written.map_err(|source| Error::io("write", &path, source))?;
        Ok(Self { path, dtype: dtype.into(), shape })
    }

    /// Writes `tensor` to `folder`/`name`.`dtype`.
    pub(crate) fn save(folder: &Path, name: &str, shape: Vec<usize>, tensor: &Tensor) -> Result<Self> {
        let path = |dtype: Dtype| folder.join(format!("{name}.{}", dtype.name()));
        match tensor {
            Tensor::F32(values) => Self::write(path(Dtype::F32), Dtype::F32.name(), shape, values),
            Tensor::Bf16(values) => Self::write(path(Dtype::Bf16), Dtype::Bf16.name(), shape, values),
        }
    }

    /// Reads the numbers as `T`s.
    pub(crate) fn read<T: Pod>(&self) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); self.shape.iter().product()];
        let read = File::open(&self.path).and_then(|mut file| file.read_exact(bytemuck::cast_slice_mut(&mut values)));
        read.map_err(|source| Error::io("read", &self.path, source))?;
        Ok(values)
    }

    /// Reads the tensor in its dtype.
    pub(crate) fn load(&self) -> Result<Tensor> {
        match self.dtype.as_str() {
            "f32" => Ok(Tensor::F32(self.read()?)),
            "bf16" => Ok(Tensor::Bf16(self.read::<bf16>()?)),
            other => Err(Error::argument("read a tensor", "f32 or bf16", format!("`{other}`"))),
        }
    }
}
