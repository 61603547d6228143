//! The shards that each process of a target owns.

use crate::{Result, RunPrograms};
use backend_tpu::devices::{Layout, MeshProcesses, mesh_order};
use backend_tpu::plugins::Kind;
use pjrt::DeviceDescription;
use policy_pjrt::decoder::Parameter;
use serde::{Deserialize, Serialize};

/// The devices of a process in the mesh of training, and the weights on them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessShards {
    /// The process index of the devices.
    pub process_index: i32,
    /// The ids of the devices, in the order of the mesh.
    pub devices: Vec<i32>,
    /// The position of each device along the axes of the mesh, the first axis first.
    pub coordinates: Vec<Vec<usize>>,
    /// The number of weights on the devices; copies count once. The process copies them from the files of a pretrained model.
    pub weights: usize,
}

impl RunPrograms {
    /// Returns the shards of each process of a target with these devices, in the order of the processes; nothing for a run on one device.
    ///
    /// # Errors
    /// [`crate::Error::Policy`] if a parameter does not shard evenly.
    pub fn processes(&self, kind: Kind, devices: &[DeviceDescription]) -> Result<Vec<ProcessShards>> {
        let Some(rules) = self.meshes().map(|meshes| &meshes.training) else { return Ok(vec![]) };
        let mesh = rules.mesh();
        let order = mesh_order(kind, devices, mesh.devices());
        let in_mesh: Vec<DeviceDescription> = order.into_iter().map(|at| devices[at].clone()).collect();
        let processes = MeshProcesses::of_devices(&in_mesh);
        let sizes: Vec<usize> = mesh.axes().iter().map(|(_, size)| *size).collect();
        // The last axis is the innermost.
        let along = |position: usize, axis: usize| position / sizes[axis + 1..].iter().product::<usize>() % sizes[axis];
        let coordinates = |position: usize| (0..sizes.len()).map(|axis| along(position, axis)).collect();
        let of_process = |process_index: i32| {
            let positions = processes.positions(process_index);
            let weights = self.decoder.parameters();
            let layout = |p: &Parameter| Layout::new(&p.shape, rules.sharding(&p.axes).ok().as_ref());
            let weights = weights.iter().map(|p| processes.elements(process_index, &layout(p)));
            Ok(ProcessShards {
                process_index,
                devices: positions.iter().map(|at| in_mesh[*at].id).collect(),
                coordinates: positions.iter().map(|at| coordinates(*at)).collect(),
                weights: weights
                    .collect::<std::result::Result<Vec<_>, _>>()
                    .map_err(|error| policy::Error::from(policy_pjrt::Error::from(error)))?
                    .into_iter()
                    .sum(),
            })
        };
        processes.processes().into_iter().map(of_process).collect()
    }
}
