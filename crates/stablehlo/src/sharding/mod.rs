//! How tensors are split over devices: what Shardy's partitioner, or the body of a manual computation, goes by.

mod check;
mod manual;
mod mesh;

pub(crate) use check::check;
pub use manual::Manual;
pub use mesh::{Groups, Mesh, MeshAxes};

use crate::error::{Error, Result};
use crate::types::TensorType;
use std::ops::Range;

/// How a tensor is split over the devices of a [`Mesh`]: an `sdy.sharding`. [`Mesh::sharding`] makes it.
///
/// A dimension is split evenly over the axes that it names; along axes that no dimension names, devices have copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharding {
    mesh: Mesh,
    dimensions: Vec<Dimension>,
    /// Axes that the partitioner may not use for a dimension that is open.
    replicated: Vec<usize>,
}

/// The split of a dimension.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Dimension {
    /// By number; the first takes the largest parts.
    pub(crate) axes: Vec<usize>,
    /// Whether the partitioner may split it further.
    pub(crate) open: bool,
}

impl Sharding {
    fn new(mesh: &Mesh, dimensions: &[&[&str]]) -> Result<Self> {
        let mut used = vec![];
        let mut found = vec![];
        for names in dimensions {
            let (names, open) = match names.split_last() {
                Some((&"?", names)) => (names, true),
                _ => (*names, false),
            };
            let mut axes = vec![];
            for name in names {
                let axis = mesh.index(name)?;
                if used.contains(&axis) {
                    return Err(mesh.twice(axis));
                }
                used.push(axis);
                axes.push(axis);
            }
            found.push(Dimension { axes, open });
        }
        Ok(Self { mesh: mesh.clone(), dimensions: found, replicated: vec![] })
    }

    fn whole(mesh: &Mesh, rank: usize) -> Self {
        Self { mesh: mesh.clone(), dimensions: vec![Dimension::default(); rank], replicated: vec![] }
    }

    /// The same with copies along these axes, also where a dimension is open to the partitioner.
    ///
    /// # Errors
    /// [`Error::Axis`] for an axis that the mesh does not have, or that splits a dimension.
    pub fn replicated_over(mut self, axes: &[&str]) -> Result<Self> {
        for name in axes {
            let axis = self.mesh.index(name)?;
            if self.uses(axis) {
                return Err(self.mesh.twice(axis));
            }
            self.replicate(axis);
        }
        Ok(self)
    }

    fn replicate(&mut self, axis: usize) {
        self.replicated.push(axis);
        self.replicated.sort_unstable();
    }

    /// The mesh over which it splits.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The number of dimensions of the tensors that it splits.
    pub fn rank(&self) -> usize {
        self.dimensions.len()
    }

    /// The axes over which a dimension is split; none beyond the last dimension.
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

    /// Whether an axis is named.
    fn uses(&self, axis: usize) -> bool {
        self.splits_over(axis) || self.replicated.contains(&axis)
    }

    /// Whether an axis splits a dimension.
    pub(crate) fn splits_over(&self, axis: usize) -> bool {
        self.dimensions.iter().any(|d| d.axes.contains(&axis))
    }

    /// The type of the part of a tensor that every device has.
    ///
    /// # Errors
    /// [`Error::Split`] for a tensor of another rank, or with a dimension that does not split evenly.
    pub fn part(&self, ty: &TensorType) -> Result<TensorType> {
        self.part_over(ty, &(0..self.mesh.axes().len()).collect::<Vec<_>>())
    }

    /// Where the part of a device is in a tensor, along each dimension: of the device with this number, which is its partition.
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

    /// [`Sharding::part`] where only some axes split.
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

    /// The whole of which every device has a part of type `part`, where only some axes split.
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

    /// [`Sharding::range`] where only some axes split.
    pub(crate) fn range_over(&self, part: &TensorType, coordinates: &[usize], axes: &[usize]) -> Vec<Range<usize>> {
        let begin = |(d, size): (&Dimension, &usize)| {
            let split = d.axes.iter().filter(|axis| axes.contains(axis));
            let index = split.fold(0, |index, axis| index * self.mesh.length(*axis) + coordinates[*axis]);
            index * size..(index + 1) * size
        };
        self.dimensions.iter().zip(&part.shape).map(begin).collect()
    }

    /// The number of parts of a dimension.
    fn parts(&self, dimension: usize, axes: &[usize]) -> usize {
        let split = self.dimensions[dimension].axes.iter().filter(|axis| axes.contains(axis));
        split.map(|axis| self.mesh.length(*axis)).product()
    }
}
