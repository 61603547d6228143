//! Tensors on devices.

use super::processes::distinct;
use crate::error::failed;
use grpo_pjrt::{Buffer, Device, Element, runs};
use grpo_stablehlo::{Dtype, Module, Sharding, TensorType};
use std::ops::Range;
use std::sync::Arc;

/// A tensor on all devices of [`Devices`](super::Devices): one buffer per device of this process, in the order of the mesh.
#[derive(Debug)]
pub struct DeviceTensor {
    layout: Arc<Layout>,
    devices: Arc<OwnDevices>,
    shards: Vec<Buffer>,
}

/// The devices of a mesh that this process can use.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct OwnDevices {
    /// The number of devices of the mesh, including devices of other processes.
    pub(super) mesh_devices: usize,
    /// The positions in the mesh of the devices of this process.
    pub(super) positions: Vec<usize>,
}

/// The shape of a tensor and the part of it that each device holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    shape: Vec<usize>,
    /// `None` if every device holds the whole tensor.
    sharding: Option<Sharding>,
}

/// An argument of a run.
#[derive(Debug)]
pub enum Argument<'a> {
    /// Stays intact.
    Borrowed(&'a DeviceTensor),
    /// Is consumed: a result may reuse its memory.
    Donated(DeviceTensor),
}

impl Argument<'_> {
    /// Returns the tensor.
    pub fn tensor(&self) -> &DeviceTensor {
        match self {
            Self::Borrowed(tensor) => tensor,
            Self::Donated(tensor) => tensor,
        }
    }
}

impl<'a> From<&'a DeviceTensor> for Argument<'a> {
    fn from(tensor: &'a DeviceTensor) -> Self {
        Self::Borrowed(tensor)
    }
}

impl From<DeviceTensor> for Argument<'_> {
    fn from(tensor: DeviceTensor) -> Self {
        Self::Donated(tensor)
    }
}

/// An error of a copy to or from devices, or of a wait for them.
#[derive(Debug)]
#[non_exhaustive]
pub enum TensorError {
    /// A dimension does not shard evenly.
    Split {
        /// The shape of the tensor.
        shape: Vec<usize>,
        /// The error of the sharding.
        source: grpo_stablehlo::Error,
    },
    /// The devices of this process do not have the whole tensor.
    NotAddressable {
        /// The name of the tensor.
        what: String,
        /// The number of elements of the tensor.
        elements: usize,
        /// The number of elements on the devices of this process.
        found: usize,
    },
    /// A device failed.
    Device {
        /// The failed operation, with the device if there are several.
        operation: String,
        /// The position of the device in the mesh and the bytes of the shard, if it is an upload.
        upload: Option<(usize, u64)>,
        /// The plugin's error.
        cause: Box<grpo_pjrt::Error>,
    },
}

impl std::fmt::Display for TensorError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Split { shape, source } => write!(f, "a tensor of shape {shape:?}: {source}"),
            Self::NotAddressable { what, elements, found } => {
                write!(f, "reading {what}: expected {elements} elements on the devices of this process, found {found}")
            }
            Self::Device { operation, cause, .. } => write!(f, "{operation}: {cause}"),
        }
    }
}

impl std::error::Error for TensorError {}

impl From<TensorError> for grpo_core::Error {
    fn from(error: TensorError) -> Self {
        failed(error)
    }
}

impl Layout {
    /// Creates the layout of a tensor; without a sharding, every device holds the whole tensor.
    pub fn new(shape: &[usize], sharding: Option<&Sharding>) -> Self {
        Self { shape: shape.to_vec(), sharding: sharding.cloned() }
    }

    /// Returns the layouts of the arguments of a program.
    pub fn of_arguments(module: &Module) -> Vec<Self> {
        let (main, ids) = (&module.main, &module.main.body().arguments);
        ids.iter()
            .zip(&main.arguments)
            .map(|(id, of)| Self::new(&main.type_of(*id).shape, of.sharding.as_ref()))
            .collect()
    }

    /// Returns the layouts of the results of a program.
    pub fn of_results(module: &Module) -> Vec<Arc<Self>> {
        let (main, ids) = (&module.main, &module.main.body().results);
        ids.iter()
            .zip(&main.results)
            .map(|(id, of)| Self::new(&main.type_of(*id).shape, of.sharding.as_ref()).into())
            .collect()
    }

    /// Returns the shape of the whole tensor.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the sharding; `None` if every device holds the whole tensor.
    pub fn sharding(&self) -> Option<&Sharding> {
        self.sharding.as_ref()
    }

    /// Returns the range of a device's shard along each dimension.
    fn range(&self, device: usize) -> grpo_stablehlo::Result<Vec<Range<usize>>> {
        match &self.sharding {
            // Ranges do not depend on the dtype.
            Some(sharding) => sharding.range(&TensorType::new(Dtype::F32, &self.shape[..]), device),
            None => Ok(self.shape.iter().map(|size| 0..*size).collect()),
        }
    }

    /// Returns the ranges of the shards of all devices.
    ///
    /// # Errors
    /// [`TensorError::Split`] if a dimension does not shard evenly.
    pub(super) fn ranges(&self, devices: usize) -> Result<Vec<Vec<Range<usize>>>, TensorError> {
        let ranges = (0..devices).map(|device| self.range(device)).collect::<grpo_stablehlo::Result<_>>();
        ranges.map_err(|source| TensorError::Split { shape: self.shape.clone(), source })
    }

    /// Returns `true` if every device holds the same part with both layouts, whose meshes may differ.
    pub fn is(&self, other: &Self, devices: usize) -> bool {
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
    pub(super) fn new(layout: Arc<Layout>, devices: &Arc<OwnDevices>, shards: Vec<Buffer>) -> Self {
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

    /// Returns the shape of the tensor and the part of it that each device holds.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Replaces the layout by an equal one, as of [`Layout::is`], for example on another mesh of the same devices. A layout that is not equal
    /// changes nothing.
    #[must_use]
    pub fn with_layout(self, layout: Layout) -> Self {
        match self.layout.is(&layout, self.devices.mesh_devices) {
            true => Self { layout: layout.into(), ..self },
            false => self,
        }
    }

    pub(super) fn into_shards(self) -> Vec<Buffer> {
        self.shards
    }

    /// Waits until all devices have computed or received their shards; errors name the `operation`.
    ///
    /// # Errors
    /// [`TensorError::Device`] with the device.
    pub fn wait(&self, operation: &str) -> Result<(), TensorError> {
        let wait = |shard: &Buffer| match self.devices.mesh_devices {
            1 => shard.wait().map_err(device_failed(operation.into())),
            _ => shard.wait().map_err(device_failed(format!("{operation} on {}", self.device_of(shard)))),
        };
        self.shards.iter().try_for_each(wait)
    }

    /// Copies the whole tensor to the host, row-major; errors name it `what`.
    ///
    /// Half of the shards are copied at a time, and their copies start before the first is waited for: the host holds at most 1.5 times the
    /// bytes of the tensor.
    ///
    /// # Errors
    /// [`TensorError::NotAddressable`] if the devices of this process do not have the whole tensor, [`TensorError::Device`] with the device.
    pub fn read<T: Element>(&self, what: &str) -> Result<Vec<T>, TensorError> {
        let failed = |shard| device_failed(format!("reading {what} from {}", self.device_of(shard)));
        let ranges = self.layout.ranges(self.devices.mesh_devices)?;
        let ranges: Vec<&[Range<usize>]> = self.devices.positions.iter().map(|at| &*ranges[*at]).collect();
        let [first, ..] = &self.shards[..] else { return Ok(vec![]) };
        let elements: usize = self.layout.shape.iter().product();
        if first.num_elements() == elements {
            return first.to_vec::<T>().map_err(failed(first));
        }
        // Devices may hold copies of one shard.
        let distinct = distinct(&ranges);
        let found = distinct.iter().map(|i| self.shards[*i].num_elements()).sum();
        if found != elements {
            return Err(TensorError::NotAddressable { what: what.to_owned(), elements, found });
        }
        let mut whole = vec![T::zeroed(); elements];
        for round in distinct.chunks(distinct.len().div_ceil(2)) {
            let start = |&i: &usize| self.shards[i].to_vec_async::<T>().map_err(failed(&self.shards[i]));
            let copies = round.iter().map(start).collect::<Result<Vec<_>, _>>()?;
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
        shard.device().map_or("a device".into(), |device| device_name(&device, self.devices.mesh_devices))
    }
}

fn device_failed(operation: String) -> impl FnOnce(grpo_pjrt::Error) -> TensorError {
    |cause| TensorError::Device { operation, upload: None, cause: cause.into() }
}

/// Returns the name in messages of one of several devices.
pub fn device_name(device: &Device, devices: usize) -> String {
    match device.description() {
        Ok(description) if devices > 1 => format!("device {}", description.id),
        _ => "the device".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_stablehlo::Mesh;

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
