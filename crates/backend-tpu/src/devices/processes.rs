//! The processes of a mesh, and the shards that each of them owns.

use super::tensor::{Layout, TensorError};
use grpo_pjrt::DeviceDescription;
use std::collections::BTreeSet;
use std::ops::Range;

/// The process of every device of a mesh. A process uploads the shards of its own devices, and reads no others.
///
/// ```
/// use grpo_backend_tpu::devices::MeshProcesses;
///
/// // Two processes with two devices each.
/// let processes = MeshProcesses::new([0, 0, 1, 1]);
/// assert_eq!(processes.positions(1), [2, 3]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeshProcesses {
    /// The process index of each device, in the order of the mesh.
    process_indices: Vec<i32>,
}

impl MeshProcesses {
    /// Creates the table from the process index of each device, in the order of the mesh.
    pub fn new(process_indices: impl IntoIterator<Item = i32>) -> Self {
        Self { process_indices: process_indices.into_iter().collect() }
    }

    /// Creates the table from the devices in the order of the mesh.
    pub fn of_devices(devices: &[DeviceDescription]) -> Self {
        Self::new(devices.iter().map(|device| device.process_index))
    }

    /// Returns the number of devices of the mesh.
    pub fn devices(&self) -> usize {
        self.process_indices.len()
    }

    /// Returns the process indices, sorted.
    pub fn processes(&self) -> BTreeSet<i32> {
        self.process_indices.iter().copied().collect()
    }

    /// Returns the positions in the mesh of the devices of a process.
    pub fn positions(&self, process: i32) -> Vec<usize> {
        (0..self.devices()).filter(|device| self.process_indices[*device] == process).collect()
    }

    /// Returns `true` if the devices of every process hold the whole tensor.
    ///
    /// # Errors
    /// [`TensorError::Split`] if a dimension does not shard evenly.
    pub fn have_whole(&self, layout: &Layout) -> Result<bool, TensorError> {
        let processes = self.processes();
        if processes.len() <= 1 || layout.sharding().is_none() {
            return Ok(true);
        }
        let (elements, ranges): (usize, _) = (layout.shape().iter().product(), layout.ranges(self.devices())?);
        Ok(processes.into_iter().all(|process| self.elements_in(process, &ranges) == elements))
    }

    /// Returns the number of elements of a tensor on the devices of a process; copies of a shard count once. The process uploads and reads
    /// these elements.
    ///
    /// # Errors
    /// [`TensorError::Split`] if a dimension does not shard evenly.
    pub fn elements(&self, process: i32, layout: &Layout) -> Result<usize, TensorError> {
        Ok(self.elements_in(process, &layout.ranges(self.devices())?))
    }

    fn elements_in(&self, process: i32, ranges: &[Vec<Range<usize>>]) -> usize {
        let own: Vec<&[Range<usize>]> = self.positions(process).into_iter().map(|at| &*ranges[at]).collect();
        distinct(&own).into_iter().map(|at| own[at].iter().map(Range::len).product::<usize>()).sum()
    }
}

/// Returns the indices of the first of equal shards. Different shards of a tensor have no element in common.
pub(super) fn distinct(shards: &[&[Range<usize>]]) -> Vec<usize> {
    (0..shards.len()).filter(|at| !shards[..*at].contains(&shards[*at])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_stablehlo::Mesh;

    fn layout(mesh: &Mesh, shape: &[usize], axes: &[&[&str]]) -> Layout {
        Layout::new(shape, Some(&mesh.sharding(axes).unwrap()))
    }

    #[test]
    fn a_process_owns_the_distinct_shards_of_its_devices() {
        let mesh = Mesh::new("mesh", [("data", 2), ("fsdp", 2), ("tensor", 2)]).unwrap();
        // The rows are sharded over fsdp, the columns over tensor; data copies both.
        let matrix = layout(&mesh, &[8, 16], &[&["fsdp"], &["tensor"]]);
        for (process_indices, expected) in [
            // A process per copy, per shard of rows, and per shard of columns.
            ([0, 0, 0, 0, 1, 1, 1, 1], [128, 128]),
            ([0, 0, 1, 1, 0, 0, 1, 1], [64, 64]),
            ([0, 1, 0, 1, 0, 1, 0, 1], [64, 64]),
            // One process has a device of each shard, the other one has two devices.
            ([0, 0, 0, 0, 0, 0, 1, 1], [128, 64]),
            ([0, 1, 1, 0, 1, 0, 0, 1], [128, 128]),
        ] {
            let processes = MeshProcesses::new(process_indices);
            let found = [0, 1].map(|process| processes.elements(process, &matrix).unwrap());
            assert_eq!(found, expected, "{process_indices:?}");
            assert_eq!(processes.have_whole(&matrix).unwrap(), expected == [128, 128], "{process_indices:?}");
            assert!(processes.have_whole(&Layout::new(&[8, 16], None)).unwrap());
        }
        assert!(MeshProcesses::new([3; 8]).have_whole(&matrix).unwrap(), "one process has all shards");
        assert_eq!(MeshProcesses::new([0, 0]).elements(7, &Layout::new(&[8], None)).unwrap(), 0);
    }

    #[test]
    fn processes_own_equal_shards_if_devices_are_not_in_their_order() {
        let mesh = Mesh::new("mesh", [("fsdp", 8)]).unwrap();
        let processes = MeshProcesses::new([0, 1, 0, 1, 3, 2, 3, 2]);
        assert_eq!(processes.processes().into_iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert_eq!(processes.positions(2), [5, 7]);
        for process in processes.processes() {
            assert_eq!(processes.elements(process, &layout(&mesh, &[16, 3], &[&["fsdp"], &[]])).unwrap(), 12);
        }
        let uneven = layout(&mesh, &[9], &[&["fsdp"]]);
        assert!(matches!(processes.elements(0, &uneven), Err(TensorError::Split { .. })));
    }
}
