//! The shards that each process of a target owns.

use crate::{Error, Result, RunPrograms};
use grpo_backend_tpu::devices::{Layout, MeshProcesses, mesh_order};
use grpo_backend_tpu::plugins::Kind;
use grpo_pjrt::DeviceDescription;
use grpo_policy_pjrt::decoder::Parameter;
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
    /// The number of weights that the process reads from the files of a pretrained model and copies to its devices. A weight that several of
    /// its devices hold counts once, and a weight that several processes hold counts in each.
    pub weights: usize,
}

impl RunPrograms {
    /// Returns the shards of each process of a target with these devices, in the order of the processes; nothing for a run on one device.
    ///
    /// # Errors
    /// [`Error::PartialMesh`] if the devices belong to several processes and the mesh does not have all of them; [`Error::Policy`] if a
    /// parameter does not shard evenly.
    pub fn processes(&self, kind: Kind, devices: &[DeviceDescription]) -> Result<Vec<ProcessShards>> {
        let Some(meshes) = self.meshes() else { return Ok(vec![]) };
        let (mesh, rules) = (meshes.training.mesh(), meshes.training.clone().for_model(&self.shape));
        let processes = MeshProcesses::of_devices(devices).processes().len();
        if processes > 1 && mesh.devices() != devices.len() {
            return Err(Error::PartialMesh { mesh: mesh.to_string(), devices: devices.len(), processes });
        }
        let order = mesh_order(kind, devices, mesh.devices());
        let in_mesh: Vec<DeviceDescription> = order.into_iter().map(|at| devices[at].clone()).collect();
        let processes = MeshProcesses::of_devices(&in_mesh);
        let layout = |p: &Parameter| {
            let sharding =
                rules.parameter(p).map_err(|source| grpo_policy_pjrt::Error::Split { what: p.name().into(), source });
            Ok(Layout::new(&p.shape, Some(&sharding?)))
        };
        let layouts = self.decoder.parameters().iter().map(layout).collect::<grpo_policy_pjrt::Result<Vec<_>>>();
        let layouts = layouts.map_err(grpo_policy::Error::from)?;
        let process_shards = |process_index: i32| {
            let positions = processes.positions(process_index);
            let weights = layouts.iter().map(|layout| processes.elements(process_index, layout));
            let weights = weights.sum::<std::result::Result<usize, _>>().map_err(grpo_policy_pjrt::Error::from);
            Ok(ProcessShards {
                process_index,
                devices: positions.iter().map(|at| in_mesh[*at].id).collect(),
                coordinates: positions.iter().map(|at| mesh.coordinates(*at)).collect(),
                weights: weights.map_err(grpo_policy::Error::from)?,
            })
        };
        processes.processes().into_iter().map(process_shards).collect()
    }
}
