//! Shardings of tensors over devices, for Shardy's partitioner and for manual computations.

mod check;
mod manual;
mod mesh;

pub(crate) use check::check;
pub use manual::Manual;
pub use mesh::Mesh;

use crate::error::{Error, Result};
use crate::types::TensorType;
use std::ops::Range;

/// The sharding of a tensor over the devices of a [`Mesh`], an `sdy.sharding`. [`Mesh::sharding`] makes it.
///
/// A dimension is divided evenly over the axes that it names. The tensor is replicated along axes that no dimension
/// names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharding {
    mesh: Mesh,
    /// For each dimension the indices of its axes; the first one splits the dimension into the largest parts.
    dimensions: Vec<Vec<usize>>,
    /// Axes that the text names as replicated, as manual computations require it.
    replicated: Vec<usize>,
}

impl Sharding {
    /// Returns the mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Returns the rank of tensors with this sharding.
    pub fn rank(&self) -> usize {
        self.dimensions.len()
    }

    /// Returns the axes that shard a dimension; empty beyond the last dimension.
    pub fn axes(&self, dimension: usize) -> Vec<&str> {
        let axes = self.dimensions.get(dimension).map_or(&[][..], Vec::as_slice);
        axes.iter().map(|axis| self.mesh.axis(*axis)).collect()
    }

    pub(crate) fn dimensions(&self) -> &[Vec<usize>] {
        &self.dimensions
    }

    pub(crate) fn replicated(&self) -> &[usize] {
        &self.replicated
    }

    /// Returns this sharding with all other axes named as replicated.
    fn with_all_axes(mut self) -> Self {
        let all = 0..self.mesh.axes().len();
        self.replicated = all.filter(|axis| !self.dimensions.iter().any(|d| d.contains(axis))).collect();
        self
    }

    /// Returns the number of shards along a dimension; 1 beyond the last dimension.
    pub fn parts(&self, dimension: usize) -> usize {
        self.dimensions.get(dimension).map_or(1, |axes| axes.iter().map(|axis| self.mesh.length(*axis)).product())
    }

    /// Returns the type of each device's shard of a tensor.
    ///
    /// # Errors
    /// [`Error::Split`] if the rank differs, or a dimension cannot be divided evenly.
    pub fn part(&self, ty: &TensorType) -> Result<TensorType> {
        let refuse = |reason| Error::Split { ty: ty.to_string(), sharding: self.to_string(), reason };
        if ty.rank() != self.rank() {
            return Err(refuse(format!("{} dimensions expected, got {}", self.rank(), ty.rank())));
        }
        let mut part = ty.clone();
        for (d, size) in part.shape.iter_mut().enumerate() {
            let parts = self.parts(d);
            if !size.is_multiple_of(parts) {
                return Err(refuse(format!("dimension {d} of size {size} does not split into {parts} parts")));
            }
            *size /= parts;
        }
        Ok(part)
    }

    /// Returns the range of a device's shard along each dimension of a tensor. `device` is the number of the device's
    /// partition.
    ///
    /// ```
    /// use grpo_stablehlo::{Dtype, Mesh, TensorType};
    ///
    /// let mesh = Mesh::new("mesh", [("data", 2), ("tensor", 2)])?;
    /// let sharding = mesh.sharding(&[&["data"], &["tensor"]])?;
    /// let ty = TensorType::new(Dtype::F32, [8, 6]);
    /// assert_eq!(sharding.range(&ty, 2)?, [4..8, 0..3]);
    /// # Ok::<(), grpo_stablehlo::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Sharding::part`]; [`Error::Mesh`] for a device that the mesh does not have.
    pub fn range(&self, ty: &TensorType, device: usize) -> Result<Vec<Range<usize>>> {
        let devices = self.mesh.devices();
        if device >= devices {
            let reason = format!("a device below {devices} expected, got {device}");
            return Err(Error::Mesh { mesh: self.mesh.name().into(), reason });
        }
        Ok(self.range_of(&self.part(ty)?, device))
    }

    /// Returns the type of the tensor whose shards have type `part`.
    pub(crate) fn whole(&self, part: &TensorType) -> Result<TensorType> {
        let refuse = |reason| Error::Split { ty: part.to_string(), sharding: self.to_string(), reason };
        if part.rank() != self.rank() {
            return Err(refuse(format!("a part with {} dimensions expected, got {}", self.rank(), part.rank())));
        }
        let mut whole = part.clone();
        for (d, size) in whole.shape.iter_mut().enumerate() {
            let all = size.checked_mul(self.parts(d));
            *size = all.ok_or_else(|| refuse(format!("dimension {d} of all parts overflows")))?;
        }
        Ok(whole)
    }

    /// Returns the range of a device's shard, of type `part`, along each dimension.
    pub(crate) fn range_of(&self, part: &TensorType, device: usize) -> Vec<Range<usize>> {
        let coordinates = self.mesh.coordinates(device);
        let range = |(axes, size): (&Vec<usize>, &usize)| {
            let index = axes.iter().fold(0, |index, axis| index * self.mesh.length(*axis) + coordinates[*axis]);
            index * size..(index + 1) * size
        };
        self.dimensions.iter().zip(&part.shape).map(range).collect()
    }
}
