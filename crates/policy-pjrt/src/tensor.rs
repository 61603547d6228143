//! Tensors on the devices of a runtime.

use crate::error::{Error, Result};
use pjrt::{Buffer, Element};
use stablehlo::{Dtype, Sharding, TensorType};
use std::ops::Range;
use std::sync::Arc;

/// A tensor on all devices of a [`Runtime`](crate::Runtime): one buffer per device, in the order of its mesh.
#[derive(Debug)]
pub struct DeviceTensor {
    layout: Arc<Layout>,
    shards: Vec<Buffer>,
}

/// The shape of a tensor and the part of it that each device holds.
#[derive(Clone, Debug)]
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
        self.shape == other.shape && (0..devices).all(|device| self.range(device).ok() == other.range(device).ok())
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
    pub(crate) fn new(layout: Arc<Layout>, shards: Vec<Buffer>) -> Self {
        Self { layout, shards }
    }

    /// Returns the shape of the whole tensor.
    pub fn shape(&self) -> &[usize] {
        &self.layout.shape
    }

    /// Returns the shards, one per device; for a single device, the whole tensor.
    pub fn shards(&self) -> &[Buffer] {
        &self.shards
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn into_shards(self) -> Vec<Buffer> {
        self.shards
    }

    /// Waits until all devices have computed their shards.
    ///
    /// # Errors
    /// [`Error::TimedOut`], [`Error::Device`].
    pub(crate) fn wait(&self, operation: &str) -> Result<()> {
        self.shards.iter().try_for_each(|shard| shard.wait().map_err(Error::device(operation)))
    }

    /// Copies the whole tensor to the host, row-major; errors name it `what`.
    ///
    /// # Errors
    /// [`Error::TimedOut`], [`Error::Device`].
    pub fn read<T: Element>(&self, what: &str) -> Result<Vec<T>> {
        let read =
            |shard: &Buffer| shard.to_vec::<T>().map_err(Error::device(format!("reading {what} from the device")));
        let ranges = self.layout.ranges(self.shards.len())?;
        let [first, ..] = &self.shards[..] else { return Ok(vec![]) };
        let elements: usize = self.layout.shape.iter().product();
        if first.num_elements() == elements {
            return read(first);
        }
        let mut whole = vec![T::zeroed(); elements];
        for (device, shard) in self.shards.iter().enumerate() {
            // Devices may hold copies of one shard.
            if ranges[..device].contains(&ranges[device]) {
                continue;
            }
            let (values, mut begin) = (read(shard)?, 0);
            for run in runs(&self.layout.shape, &ranges[device]) {
                let end = begin + run.len();
                whole[run].copy_from_slice(&values[begin..end]);
                begin = end;
            }
        }
        Ok(whole)
    }
}

/// Returns the elements of a part of a row-major tensor.
pub(crate) fn part_of<T: Copy>(values: &[T], shape: &[usize], part: &[Range<usize>]) -> Vec<T> {
    runs(shape, part).flat_map(|run| values[run].iter().copied()).collect()
}

/// Returns the contiguous runs of elements of a part of a row-major tensor of this shape, in order.
fn runs(shape: &[usize], part: &[Range<usize>]) -> impl Iterator<Item = Range<usize>> {
    // From dimension `inner` on, the part is contiguous: all later dimensions are whole.
    let whole = |d: &usize| part[*d] == (0..shape[*d]);
    let inner = (0..shape.len()).rev().find(|d| !whole(d)).unwrap_or(0);
    let stride = |d: usize| shape[d + 1..].iter().product::<usize>();
    let (begin, length) = match part.get(inner) {
        Some(range) => (range.start * stride(inner), range.len() * stride(inner)),
        None => (0, 1),
    };
    let outer: Vec<(Range<usize>, usize)> = (0..inner).map(|d| (part[d].clone(), stride(d))).collect();
    let count = outer.iter().map(|(range, _)| range.len()).product::<usize>();
    (0..if length == 0 { 0 } else { count }).map(move |mut index| {
        let mut at = begin;
        for (range, stride) in outer.iter().rev() {
            at += (range.start + index % range.len()) * stride;
            index /= range.len();
        }
        at..at + length
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use stablehlo::Mesh;

    #[test]
    fn parts_of_tensors_have_the_elements_of_their_ranges() {
        let values: Vec<usize> = (0..24).collect();
        let part = |shape: &[usize], part: &[Range<usize>]| part_of(&values, shape, part);
        assert_eq!(part(&[4, 6], &[1..3, 2..5]), [8, 9, 10, 14, 15, 16]);
        assert_eq!(part(&[4, 6], &[2..4, 0..6]), (12..24).collect::<Vec<_>>());
        assert_eq!(part(&[2, 3, 4], &[0..2, 1..2, 0..4]), [4, 5, 6, 7, 16, 17, 18, 19]);
        assert_eq!(part(&[2, 3, 4], &[1..2, 0..3, 3..4]), [15, 19, 23]);
        assert_eq!(part(&[24], std::slice::from_ref(&(5..7))), [5, 6]);
        assert_eq!(part(&[], &[]), [0]);
        assert_eq!(part(&[4, 6], &[1..1, 0..6]), [0; 0]);
        assert!(runs(&[4, 6], &[0..4, 0..6]).eq(std::iter::once(0..24)));
    }

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
