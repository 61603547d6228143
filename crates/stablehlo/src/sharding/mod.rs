//! Shardings of tensors over devices, for Shardy's partitioner and for manual computations.

mod check;
mod manual;
mod mesh;

pub(crate) use check::check;
pub use manual::Manual;
pub use mesh::{Groups, Mesh, MeshAxes};

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
    dimensions: Vec<Dimension>,
    /// Axes that the partitioner may not use for open dimensions.
    replicated: Vec<usize>,
}

/// The sharding of a dimension.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Dimension {
    /// Indices of axes; the first one splits the dimension into the largest parts.
    pub(crate) axes: Vec<usize>,
    /// `true` if the partitioner may split the dimension further.
    pub(crate) open: bool,
}

impl Sharding {
    /// Replicates the tensor along an axis; the partitioner may not use it for open dimensions.
    fn replicate(&mut self, axis: usize) {
        self.replicated.push(axis);
        self.replicated.sort_unstable();
    }

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
        let axes = self.dimensions.get(dimension).map_or(&[][..], |d| &d.axes);
        axes.iter().map(|axis| self.mesh.axis(*axis)).collect()
    }

    pub(crate) fn dimensions(&self) -> &[Dimension] {
        &self.dimensions
    }

    pub(crate) fn replicated(&self) -> &[usize] {
        &self.replicated
    }

    /// Returns `true` if the sharding names the axis.
    fn uses(&self, axis: usize) -> bool {
        self.splits_over(axis) || self.replicated.contains(&axis)
    }

    /// Returns `true` if the axis shards a dimension.
    pub(crate) fn splits_over(&self, axis: usize) -> bool {
        self.dimensions.iter().any(|d| d.axes.contains(&axis))
    }

    /// Returns the type of each device's shard of a tensor.
    ///
    /// # Errors
    /// [`Error::Split`] if the rank differs, or a dimension cannot be divided evenly.
    pub fn part(&self, ty: &TensorType) -> Result<TensorType> {
        self.part_over(ty, &(0..self.mesh.axes().len()).collect::<Vec<_>>())
    }

    /// Returns the range of a device's shard along each dimension of a tensor. `device` is the number of the device's
    /// partition.
    ///
    /// ```
    /// use stablehlo::{Dtype, Mesh, TensorType};
    ///
    /// let mesh = Mesh::new("mesh", [("data", 2), ("tensor", 2)])?;
    /// let sharding = mesh.sharding(&[&["data"], &["tensor"]])?;
    /// let ty = TensorType::new(Dtype::F32, [8, 6]);
    /// assert_eq!(sharding.range(&ty, 2)?, [4..8, 0..3]);
    /// # Ok::<(), stablehlo::Error>(())
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
        let all: Vec<usize> = (0..self.mesh.axes().len()).collect();
        let coordinates = MeshAxes::of(&self.mesh, all.clone()).coordinates(device);
        let part = self.part_over(ty, &all)?;
        Ok(self.range_over(&part, &coordinates, &all))
    }

    /// Like [`Sharding::part`], for some of the axes.
    pub(crate) fn part_over(&self, ty: &TensorType, axes: &[usize]) -> Result<TensorType> {
        let refuse = |reason| Error::Split { ty: ty.to_string(), sharding: self.to_string(), reason };
        if ty.rank() != self.rank() {
            return Err(refuse(format!("{} dimensions expected, got {}", self.rank(), ty.rank())));
        }
        let mut part = ty.clone();
        for (d, size) in part.shape.iter_mut().enumerate() {
            let parts = self.parts(d, axes);
            if !size.is_multiple_of(parts) {
                return Err(refuse(format!("dimension {d} of size {size} does not split into {parts} parts")));
            }
            *size /= parts;
        }
        Ok(part)
    }

    /// Returns the type of the tensor whose shards have type `part`, for some of the axes.
    pub(crate) fn whole_over(&self, part: &TensorType, axes: &[usize]) -> Result<TensorType> {
        let refuse = |reason| Error::Split { ty: part.to_string(), sharding: self.to_string(), reason };
        if part.rank() != self.rank() {
            return Err(refuse(format!("a part with {} dimensions expected, got {}", self.rank(), part.rank())));
        }
        let mut whole = part.clone();
        for (d, size) in whole.shape.iter_mut().enumerate() {
            let all = size.checked_mul(self.parts(d, axes));
            *size = all.ok_or_else(|| refuse(format!("dimension {d} of all parts overflows")))?;
        }
        Ok(whole)
    }

    /// Like [`Sharding::range`], for some of the axes.
    pub(crate) fn range_over(&self, part: &TensorType, coordinates: &[usize], axes: &[usize]) -> Vec<Range<usize>> {
        let begin = |(d, size): (&Dimension, &usize)| {
            let split = d.axes.iter().filter(|axis| axes.contains(axis));
            let index = split.fold(0, |index, axis| index * self.mesh.length(*axis) + coordinates[*axis]);
            index * size..(index + 1) * size
        };
        self.dimensions.iter().zip(&part.shape).map(begin).collect()
    }

    /// Returns the number of shards along a dimension.
    fn parts(&self, dimension: usize, axes: &[usize]) -> usize {
        let split = self.dimensions[dimension].axes.iter().filter(|axis| axes.contains(axis));
        split.map(|axis| self.mesh.length(*axis)).product()
    }
}
