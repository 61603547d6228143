//! The processes of a mesh, and the shards that each of them owns.

use crate::decoder::{AxisRules, Parameter};
use crate::error::Result;
use crate::tensor::Layout;
use pjrt::DeviceDescription;
use std::collections::BTreeSet;
use std::ops::Range;

/// The process of every device of a mesh. A process uploads the shards of its own devices, and reads no others.
///
/// ```
/// use policy_pjrt::MeshProcesses;
///
/// // Two processes with two devices each.
/// let processes = MeshProcesses::new([0, 0, 1, 1]);
/// assert_eq!(processes.positions(1), [2, 3]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeshProcesses {
    /// The process index of each device, in the order of the mesh.
    of_device: Vec<i32>,
}

impl MeshProcesses {
    /// Creates the table from the process index of each device, in the order of the mesh.
    pub fn new(of_device: impl IntoIterator<Item = i32>) -> Self {
        Self { of_device: of_device.into_iter().collect() }
    }

    /// Creates the table from the devices in the order of the mesh.
    pub fn of_devices(devices: &[DeviceDescription]) -> Self {
        Self::new(devices.iter().map(|device| device.process_index))
    }

    /// Returns the number of devices of the mesh.
    pub fn devices(&self) -> usize {
        self.of_device.len()
    }

    /// Returns the process indices, sorted.
    pub fn processes(&self) -> BTreeSet<i32> {
        self.of_device.iter().copied().collect()
    }

    /// Returns the positions in the mesh of the devices of a process.
    pub fn positions(&self, process: i32) -> Vec<usize> {
        (0..self.devices()).filter(|device| self.of_device[*device] == process).collect()
    }

    /// Returns the number of elements of a parameter on the devices of a process; copies of a shard count once. The process copies these
    /// elements from the files of a model.
    ///
    /// # Errors
    /// [`crate::Error::Split`] if a dimension does not shard evenly.
    pub fn elements(&self, process: i32, parameter: &Parameter, rules: &AxisRules) -> Result<usize> {
        let layout = Layout::new(&parameter.shape, rules.sharding(&parameter.axes).ok().as_ref());
        self.elements_of(process, &layout)
    }

    /// Returns `true` if the devices of every process hold the whole tensor.
    ///
    /// # Errors
    /// [`crate::Error::Split`] if a dimension does not shard evenly.
    pub(crate) fn have_whole(&self, layout: &Layout) -> Result<bool> {
        let elements: usize = layout.shape().iter().product();
        let processes = self.processes();
        if processes.len() <= 1 {
            return Ok(true);
        }
        let of_each = processes.into_iter().map(|process| self.elements_of(process, layout));
        Ok(of_each.collect::<Result<Vec<_>>>()?.into_iter().all(|of_process| of_process == elements))
    }

    fn elements_of(&self, process: i32, layout: &Layout) -> Result<usize> {
        let ranges = layout.ranges(self.devices())?;
        let own: Vec<&[Range<usize>]> = self.positions(process).into_iter().map(|at| &*ranges[at]).collect();
        Ok(distinct(&own).into_iter().map(|at| own[at].iter().map(Range::len).product::<usize>()).sum())
    }
}

/// Returns the indices of the first of equal shards. Different shards of a tensor have no element in common.
pub(crate) fn distinct(shards: &[&[Range<usize>]]) -> Vec<usize> {
    (0..shards.len()).filter(|at| !shards[..*at].contains(&shards[*at])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::{Axis, parameters};
    use models::ModelConfig;
    use stablehlo::Mesh;

    fn rules(axes: &[(&str, usize)]) -> AxisRules {
        AxisRules::new(&Mesh::new("mesh", axes.iter().copied()).unwrap())
    }

    fn layout(shape: &[usize], axes: &[Axis], rules: &AxisRules) -> Layout {
        Layout::new(shape, Some(&rules.sharding(axes).unwrap()))
    }

    #[test]
    fn a_process_owns_the_distinct_shards_of_its_devices() {
        let rules = rules(&[("data", 2), ("fsdp", 2), ("tensor", 2)]);
        let matrix = layout(&[8, 16], &[Axis::Embed, Axis::Mlp], &rules);
        // The rows are sharded over fsdp, the columns over tensor; data copies both.
        for (of_device, expected) in [
            // A process per copy, per shard of rows, and per shard of columns.
            ([0, 0, 0, 0, 1, 1, 1, 1], [128, 128]),
            ([0, 0, 1, 1, 0, 0, 1, 1], [64, 64]),
            ([0, 1, 0, 1, 0, 1, 0, 1], [64, 64]),
            // One process has a device of each shard, the other one has two devices.
            ([0, 0, 0, 0, 0, 0, 1, 1], [128, 64]),
            ([0, 1, 1, 0, 1, 0, 0, 1], [128, 128]),
        ] {
            let processes = MeshProcesses::new(of_device);
            let found = [0, 1].map(|process| processes.elements_of(process, &matrix).unwrap());
            assert_eq!(found, expected, "{of_device:?}");
            assert_eq!(processes.have_whole(&matrix).unwrap(), expected == [128, 128], "{of_device:?}");
            assert!(processes.have_whole(&Layout::new(&[8, 16], None)).unwrap());
        }
        assert!(MeshProcesses::new([3; 8]).have_whole(&matrix).unwrap(), "one process has all shards");
        assert_eq!(MeshProcesses::new([0, 0]).elements_of(7, &Layout::new(&[8], None)).unwrap(), 0);
    }

    #[test]
    fn processes_of_an_fsdp_mesh_own_equal_parts_of_the_weights() {
        let rules = rules(&[("fsdp", 8)]);
        let config = ModelConfig { vocab_size: 64, hidden_size: 32, intermediate_size: 64, ..ModelConfig::default() };
        let table = parameters(&config);
        let all: usize = table.iter().map(Parameter::count).sum();
        // The devices of a slice are not in the order of processes.
        let processes = MeshProcesses::new([0, 1, 0, 1, 3, 2, 3, 2]);
        assert_eq!(processes.processes().into_iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert_eq!(processes.positions(2), [5, 7]);
        let mut total = 0;
        for process in processes.processes() {
            for parameter in &table {
                let own = processes.elements(process, parameter, &rules).unwrap();
                let part = rules.elements(parameter);
                assert!(own == part * 2 || own == part && part == parameter.count(), "{}: {own}", parameter.name());
                total += own;
            }
        }
        assert!(total >= all && total < all + all / 10, "{total} {all}");
    }
}
