//! Devices of a PJRT client that run programs together, and tensors on them.
//!
//! One device and a mesh of devices are the same: a program runs on all devices of [`Devices`], and a [`DeviceTensor`] has a shard on each.

mod ring_order;
mod tensor;

pub use ring_order::ring_order;
pub use tensor::{Argument, DeviceTensor, Layout, TensorError, device_name};

use crate::compile_options;
use crate::error::{NAME, failed};
use crate::plugins::{self, Kind};
use grpo_core::error::{Error, Result};
use pjrt::{Buffer, Client, CompileOptions, Device, DeviceDescription, Element, LoadedExecutable};
use stablehlo::Mesh;
use std::ops::Range;
use std::sync::Arc;

/// Devices of a client in the order of a mesh; a single device is a mesh of one. Clones share the client.
#[derive(Clone, Debug)]
pub struct Devices {
    kind: Kind,
    client: Client,
    list: Vec<Device>,
}

impl Devices {
    /// Returns the first device of an open client.
    ///
    /// # Errors
    /// [`Error::Backend`] if the client has no device.
    pub fn first(kind: Kind, client: Client) -> Result<Self> {
        let list: Vec<Device> = client.addressable_devices().first().cloned().into_iter().collect();
        match list.is_empty() {
            true => Err(plugins::failed(kind, "the plugin has no device on this machine")),
            false => Ok(Self { kind, client, list }),
        }
    }

    /// Arranges the first devices of the client as a mesh; the chips of a TPU in the order of a ring ([`ring_order`]).
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the mesh has more devices than the client.
    pub fn on_mesh(self, mesh: &Mesh) -> Result<Self> {
        let (wanted, found) = (mesh.devices(), self.client.addressable_devices());
        if wanted > found.len() {
            let axes: Vec<String> = mesh.axes().iter().map(|(axis, size)| format!("{axis} {size}")).collect();
            return Err(Error::Unsupported {
                backend: format!("{NAME}:{}", self.kind.name()),
                what: format!("the mesh {} of {wanted} devices", axes.join(" x ")),
                instead: format!("this process has {}", found.len()),
            });
        }
        let mut list = found[..wanted].to_vec();
        if self.kind == Kind::Tpu {
            let order = ring_order(&descriptions(&list)?);
            list = order.into_iter().map(|i| list[i].clone()).collect();
        }
        Ok(Self { list, ..self })
    }

    /// Returns the kind of the devices.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the client of the devices.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Returns the devices, in the order of the mesh.
    pub fn list(&self) -> &[Device] {
        &self.list
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
        let of_mesh = compile_options::partitioned_over(ids.len());
        let device_assignment = Some(vec![ids]).filter(|ids| ids[0].len() > 1);
        let CompileOptions { overrides, optimization_level, .. } = options;
        Ok(CompileOptions { device_assignment, overrides, optimization_level, ..of_mesh })
    }

    /// Copies to every device its shard of `values`, row-major.
    ///
    /// Starts the copies to all devices before it waits for one. The plugin reads the shards from `values`, which may be a mapped file.
    ///
    /// # Errors
    /// [`TensorError::Split`] if a dimension does not shard evenly, [`TensorError::Device`] if a device fails.
    pub fn upload<T: Element>(&self, values: &[T], layout: Layout) -> Result<DeviceTensor, TensorError> {
        let ranges = layout.ranges(self.list.len())?;
        let failed = |index: usize, cause: pjrt::Error| {
            let part: Vec<usize> = ranges[index].iter().map(Range::len).collect();
            let operation = format!("copying {part:?} to {}", device_name(&self.list[index], self.list.len()));
            let bytes = (part.iter().product::<usize>() * size_of::<T>()) as u64;
            TensorError::Device { operation, upload: Some((index, bytes)), cause: cause.into() }
        };
        let start = |(index, device): (usize, &Device)| {
            let shard = self.client.buffer_from_host_async(values, layout.shape(), &ranges[index], device);
            shard.map_err(|cause| failed(index, cause))
        };
        let shards = self.list.iter().enumerate().map(start).collect::<Result<Vec<_>, _>>()?;
        for (index, shard) in shards.iter().enumerate() {
            shard.wait().map_err(|cause| failed(index, cause))?;
        }
        Ok(DeviceTensor::new(layout.into(), shards))
    }

    /// Launches `executable`, whose results have these layouts, and returns the results before it finishes: if it fails later, reading a
    /// result fails.
    ///
    /// # Errors
    /// The error of the launch.
    pub fn run(
        &self,
        executable: &LoadedExecutable,
        arguments: Vec<Argument<'_>>,
        results: &[Arc<Layout>],
    ) -> pjrt::Result<Vec<DeviceTensor>> {
        let mut lists: Vec<Vec<pjrt::Argument<'_>>> =
            self.list.iter().map(|_| Vec::with_capacity(arguments.len())).collect();
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
        let tensor = |layout: &Arc<Layout>| {
            let shards: Vec<Buffer> = outputs.iter_mut().filter_map(Iterator::next).collect();
            DeviceTensor::new(layout.clone(), shards)
        };
        Ok(results.iter().map(tensor).collect())
    }
}

fn descriptions(devices: &[Device]) -> Result<Vec<DeviceDescription>> {
    devices.iter().map(Device::description).collect::<pjrt::Result<_>>().map_err(failed)
}
