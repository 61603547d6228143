//! Devices of a PJRT client that run programs together, and tensors on them.
//!
//! One device and a mesh of devices are the same: a program runs on all devices of [`Devices`], and a [`DeviceTensor`] has a shard on each.
//! The devices may belong to several processes: each process runs the same programs, and uploads and reads the shards of its own devices.

mod processes;
mod ring_order;
mod tensor;

pub use processes::MeshProcesses;
pub use ring_order::mesh_order;
pub use tensor::{Argument, DeviceTensor, Layout, TensorError, device_name};

use crate::compile_options;
use crate::error::{NAME, failed};
use crate::plugins::{self, Kind};
use grpo_core::error::{Error, Result};
use grpo_pjrt::{Buffer, Client, CompileOptions, Device, DeviceDescription, Element, LoadedExecutable};
use grpo_stablehlo::Mesh;
use std::ops::Range;
use std::sync::Arc;
use tensor::OwnDevices;

/// Devices of a client in the order of a mesh; a single device is a mesh of one. Clones share the client.
#[derive(Clone, Debug)]
pub struct Devices {
    kind: Kind,
    client: Client,
    /// The devices of all processes, in the order of the mesh.
    list: Vec<Device>,
    own: Arc<OwnDevices>,
    processes: MeshProcesses,
}

impl Devices {
    /// Returns the first device of this process.
    ///
    /// # Errors
    /// [`Error::Backend`] if the client has no device.
    pub fn first(kind: Kind, client: Client) -> Result<Self> {
        let Some(device) = client.addressable_devices().first().cloned() else {
            return Err(plugins::failed(kind, "the plugin has no device on this machine"));
        };
        let processes = MeshProcesses::of_devices(&descriptions(std::slice::from_ref(&device))?);
        let own = OwnDevices { mesh_devices: 1, positions: vec![0] }.into();
        Ok(Self { kind, client, list: vec![device], own, processes })
    }

    /// Arranges the first devices of the client as a mesh, in the order of [`mesh_order`]. If the client has devices of several processes, the
    /// mesh may have them, too.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the mesh has more devices than the client, or none of this process.
    pub fn on_mesh(self, mesh: &Mesh) -> Result<Self> {
        let (count, all) = (mesh.devices(), descriptions(self.client.devices())?);
        let axes = || mesh.axes().iter().map(|(axis, size)| format!("{axis} {size}")).collect::<Vec<_>>().join(" x ");
        let unsupported = |instead| Error::Unsupported {
            backend: format!("{NAME}:{}", self.kind.name()),
            what: format!("the mesh {} of {count} devices", axes()),
            instead,
        };
        if count > all.len() {
            let processes = MeshProcesses::of_devices(&all).processes().len();
            let of = if processes > 1 { format!("all {processes} processes have") } else { "this process has".into() };
            return Err(unsupported(format!("{of} {}", all.len())));
        }
        let order = mesh_order(self.kind, &all, count);
        let list: Vec<Device> = order.iter().map(|at| self.client.devices()[*at].clone()).collect();
        let addressable = self.client.addressable_devices();
        let positions: Vec<usize> = (0..count).filter(|at| addressable.contains(&list[*at])).collect();
        if positions.is_empty() {
            return Err(unsupported("a mesh with devices of this process".into()));
        }
        let processes = MeshProcesses::new(order.iter().map(|at| all[*at].process_index));
        Ok(Self { list, own: OwnDevices { mesh_devices: count, positions }.into(), processes, ..self })
    }

    /// Returns the kind of the devices.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the client of the devices.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Returns the devices of all processes, in the order of the mesh.
    pub fn list(&self) -> &[Device] {
        &self.list
    }

    /// Returns the devices of this process, in the order of the mesh.
    pub fn own(&self) -> impl Iterator<Item = &Device> {
        self.own.positions.iter().map(|at| &self.list[*at])
    }

    /// Returns the processes of the devices.
    pub fn processes(&self) -> &MeshProcesses {
        &self.processes
    }

    /// Sets the time limit of every wait for the client's devices; see [`Client::with_wait_limit`].
    #[must_use]
    pub fn with_wait_limit(self, limit: std::time::Duration) -> Self {
        Self { client: self.client.with_wait_limit(limit), ..self }
    }

    /// Returns `options` for programs that run on these devices: partitioned by Shardy if there are several.
    ///
    /// # Errors
    /// [`Error::Backend`] if the plugin fails.
    pub fn options(&self, options: CompileOptions) -> Result<CompileOptions> {
        let ids: Vec<i64> = descriptions(&self.list)?.into_iter().map(|device| device.id.into()).collect();
        let defaults = compile_options::partitioned_over(ids.len());
        let device_assignment = Some(vec![ids]).filter(|ids| ids[0].len() > 1);
        let CompileOptions { overrides, optimization_level, .. } = options;
        Ok(CompileOptions { device_assignment, overrides, optimization_level, ..defaults })
    }

    /// Copies to every device of this process its shard of `values`, row-major.
    ///
    /// Starts the copies to all devices before it waits for one. The plugin reads the shards from `values`, which may be a mapped file.
    ///
    /// # Errors
    /// [`TensorError::Split`] if a dimension does not shard evenly, [`TensorError::Device`] if a device fails.
    pub fn upload<T: Element>(&self, values: &[T], layout: Layout) -> Result<DeviceTensor, TensorError> {
        let ranges = layout.ranges(self.list.len())?;
        let failed = |index: usize, cause: grpo_pjrt::Error| {
            let part: Vec<usize> = ranges[index].iter().map(Range::len).collect();
            let operation = format!("copying {part:?} to {}", device_name(&self.list[index], self.list.len()));
            let bytes = (part.iter().product::<usize>() * size_of::<T>()) as u64;
            TensorError::Device { operation, upload: Some((index, bytes)), cause: cause.into() }
        };
        let start = |&index: &usize| {
            let device = &self.list[index];
            let shard = self.client.buffer_from_host_async(values, layout.shape(), &ranges[index], device);
            shard.map_err(|cause| failed(index, cause))
        };
        let positions = &self.own.positions;
        let shards = positions.iter().map(start).collect::<Result<Vec<_>, _>>()?;
        for (shard, index) in shards.iter().zip(positions) {
            shard.wait().map_err(|cause| failed(*index, cause))?;
        }
        Ok(DeviceTensor::new(layout.into(), &self.own, shards))
    }

    /// Launches `executable`, whose results have these layouts, and returns the results before it finishes: if it fails later, reading a
    /// result fails. `arguments` are in the order of the program's parameters. If the devices belong to several processes, all processes launch
    /// the same programs in the same order.
    ///
    /// # Errors
    /// The error of the launch; [`grpo_pjrt::Error::Nothing`] if the plugin returns too few results.
    pub fn run(
        &self,
        executable: &LoadedExecutable,
        arguments: Vec<Argument<'_>>,
        results: &[Arc<Layout>],
    ) -> grpo_pjrt::Result<Vec<DeviceTensor>> {
        let mut lists: Vec<Vec<grpo_pjrt::Argument<'_>>> =
            self.own().map(|_| Vec::with_capacity(arguments.len())).collect();
        for argument in arguments {
            match argument {
                Argument::Borrowed(tensor) => {
                    lists.iter_mut().zip(tensor.shards()).for_each(|(list, shard)| list.push(shard.into()));
                }
                Argument::Donated(tensor) => {
                    lists.iter_mut().zip(tensor.into_shards()).for_each(|(list, shard)| list.push(shard.into()));
                }
            }
        }
        let mut outputs: Vec<_> = executable.execute_donating(lists)?.into_iter().map(Vec::into_iter).collect();
        let nothing = || grpo_pjrt::Error::Nothing { operation: "PJRT_LoadedExecutable_Execute" };
        let tensor = |layout: &Arc<Layout>| {
            let shards = outputs.iter_mut().map(|list| list.next().ok_or_else(nothing));
            Ok(DeviceTensor::new(layout.clone(), &self.own, shards.collect::<grpo_pjrt::Result<Vec<Buffer>>>()?))
        };
        results.iter().map(tensor).collect()
    }
}

/// Returns the descriptions of devices.
///
/// # Errors
/// [`Error::Backend`] if the plugin fails.
pub fn descriptions(devices: &[Device]) -> Result<Vec<DeviceDescription>> {
    devices.iter().map(Device::description).collect::<grpo_pjrt::Result<_>>().map_err(failed)
}
