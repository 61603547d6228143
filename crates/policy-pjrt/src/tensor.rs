//! Tensors on the devices of a runtime.

use crate::error::{Error, Result};
use crate::mesh_processes::distinct;
use pjrt::{Buffer, Device, Element, runs};
use stablehlo::{Dtype, Sharding, TensorType};
use std::ops::Range;
use std::sync::Arc;

/// A tensor on all devices of a [`Runtime`](crate::Runtime): one buffer per device of this process, in the order of its mesh.
#[derive(Debug)]
pub struct DeviceTensor {
    layout: Arc<Layout>,
    devices: Arc<OwnDevices>,
    shards: Vec<Buffer>,
}

/// The devices of a mesh that this process can use.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct OwnDevices {
    /// The number of devices of the mesh, including devices of other processes.
    pub(crate) of_mesh: usize,
    /// The positions in the mesh of the devices of this process.
    pub(crate) positions: Vec<usize>,
}

/// The shape of a tensor and the part of it that each device holds.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Layout {
    shape: Vec<usize>,
    /// `None` if every device holds the whole tensor.
    sharding: Option<Sharding>,
}

impl Layout {
    pub(crate) fn new(shape: &[usize], sharding: Option<&Sharding>) -> Self {
        Self { shape: shape.to_vec(), sharding: sharding.cloned() }
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the range of a device's shard along each dimension.
    fn range(&self, device: usize) -> stablehlo::Result<Vec<Range<usize>>> {
        match &self.sharding {
            // Ranges do not depend on the dtype.
            Some(sharding) => sharding.range(&TensorType::new(Dtype::F32, &self.shape[..]), device),
            None => Ok(self.shape.iter().map(|size| 0..*size).collect()),
        }
    }

    pub(crate) fn sharding(&self) -> Option<&Sharding> {
        self.sharding.as_ref()
    }

    /// Returns the ranges of the shards of all devices.
    ///
    /// # Errors
    /// [`Error::Split`] if a dimension does not shard evenly.
    pub(crate) fn ranges(&self, devices: usize) -> Result<Vec<Vec<Range<usize>>>> {
        let ranges = (0..devices).map(|device| self.range(device)).collect::<stablehlo::Result<_>>();
        ranges.map_err(|source| Error::Split { what: format!("a tensor of shape {:?}", self.shape), source })
    }

    /// Returns `true` if every device holds the same part with both layouts, whose meshes may differ.
    pub(crate) fn is(&self, other: &Self, devices: usize) -> bool {
        // The comparison of ranges is for layouts of two meshes: a weight in every call of a program has one.
        let same_parts = || (0..devices).all(|device| self.range(device).ok() == other.range(device).ok());
        self.shape == other.shape && (self.sharding == other.sharding || same_parts())
    }
}

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.sharding {
            Some(sharding) => write!(f, "{:?} sharded by {sharding}", self.shape),
            None => write!(f, "{:?}", self.shape),
        }
    }
}

impl DeviceTensor {
    pub(crate) fn new(layout: Arc<Layout>, devices: &Arc<OwnDevices>, shards: Vec<Buffer>) -> Self {
        Self { layout, devices: Arc::clone(devices), shards }
    }

    /// Returns the shape of the whole tensor.
    pub fn shape(&self) -> &[usize] {
        &self.layout.shape
    }

    /// Returns the shards, one per device of this process; for a single device, the whole tensor.
    pub fn shards(&self) -> &[Buffer] {
        &self.shards
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn into_shards(self) -> Vec<Buffer> {
        self.shards
    }

    /// Waits until all devices have computed or received their shards.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::TimedOut`], [`Error::Device`] with the device.
    pub(crate) fn wait(&self, operation: &str) -> Result<()> {
        let wait = |shard: &Buffer| match self.devices.of_mesh {
            1 => shard.wait().map_err(Error::device(operation)),
            _ => shard.wait().map_err(Error::device(format!("{operation} on {}", self.device_of(shard)))),
        };
        self.shards.iter().try_for_each(wait)
    }

    /// Copies the whole tensor to the host, row-major; errors name it `what`.
    ///
    /// Half of the shards are copied at a time, and their copies start before the first is waited for: the host holds at most 1.5 times the
    /// bytes of the tensor.
    ///
    /// # Errors
    /// [`Error::NotAddressable`] if the devices of this process do not have the whole tensor, see [`Runtime::read`](crate::Runtime::read);
    /// [`Error::TimedOut`], [`Error::Device`] with the device.
    pub fn read<T: Element>(&self, what: &str) -> Result<Vec<T>> {
        let failed = |shard| Error::device(format!("reading {what} from {}", self.device_of(shard)));
        let ranges = self.layout.ranges(self.devices.of_mesh)?;
        let ranges: Vec<&[Range<usize>]> = self.devices.positions.iter().map(|at| &*ranges[*at]).collect();
        let [first, ..] = &self.shards[..] else { return Ok(vec![]) };
        let elements: usize = self.layout.shape.iter().product();
        if first.num_elements() == elements {
            return first.to_vec::<T>().map_err(failed(first));
        }
        let distinct = distinct(&ranges);
        let found = distinct.iter().map(|i| self.shards[*i].num_elements()).sum();
        if found != elements {
            return Err(Error::NotAddressable { what: what.to_owned(), elements, found });
        }
        let mut whole = vec![T::zeroed(); elements];
        for round in distinct.chunks(distinct.len().div_ceil(2)) {
            let start = |&i: &usize| self.shards[i].to_vec_async::<T>().map_err(failed(&self.shards[i]));
            let copies = round.iter().map(start).collect::<Result<Vec<_>>>()?;
            for (&i, copy) in round.iter().zip(copies) {
                let (values, mut begin) = (copy.wait().map_err(failed(&self.shards[i]))?, 0);
                for run in runs(&self.layout.shape, ranges[i]) {
                    let end = begin + run.len();
                    whole[run].copy_from_slice(&values[begin..end]);
                    begin = end;
                }
            }
        }
        Ok(whole)
    }

    /// Returns the name in messages of the device that holds a shard.
    fn device_of(&self, shard: &Buffer) -> String {
        shard.device().map_or("a device".into(), |device| device_name(&device, self.devices.of_mesh))
    }
}

/// Returns the name in messages of one of several devices.
pub(crate) fn device_name(device: &Device, devices: usize) -> String {
    match device.description() {
        Ok(description) if devices > 1 => format!("device {}", description.id),
        _ => "the device".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stablehlo::Mesh;

    #[test]
    fn layouts_are_equal_if_every_device_holds_the_same_part() {
        let (four, two) =
            (Mesh::new("mesh", [("fsdp", 4)]).unwrap(), Mesh::new("mesh", [("data", 2), ("tensor", 2)]).unwrap());
        let of = |mesh: &Mesh, axes: &[&[&str]]| Layout::new(&[8, 4], Some(&mesh.sharding(axes).unwrap()));
        let rows = of(&four, &[&["fsdp"], &[]]);
        assert!(rows.is(&of(&two, &[&["data", "tensor"], &[]]), 4));
        assert!(!rows.is(&of(&two, &[&["tensor", "data"], &[]]), 4));
        assert!(!rows.is(&of(&two, &[&["data"], &["tensor"]]), 4));
        assert!(of(&two, &[&[], &[]]).is(&Layout::new(&[8, 4], None), 4));
        assert!(!rows.is(&Layout::new(&[4, 8], None), 4));
    }
}
