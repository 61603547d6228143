//! Devices, and descriptions of devices that need not be present.

use crate::error::{Error, Result};
use crate::ffi::{self, Api, Args, Child, Ref};
use crate::value::{self, Attributes};

/// A description of a device; reading it does not access the device.
#[derive(Clone, Debug)]
pub struct DeviceDescription {
    /// The id, unique among all devices of all processes, for device assignments.
    pub id: i32,
    /// The process that owns the device.
    pub process_index: i32,
    /// The model, such as `TPU v6 lite` or `cpu`.
    pub kind: String,
    /// The plugin's long description.
    pub debug_string: String,
    /// Further properties, such as coordinates.
    pub attributes: Attributes,
}

impl DeviceDescription {
    pub(crate) fn read(api: &Api, description: Ref<'_, ffi::DeviceDescription>) -> Result<Self> {
        Ok(DeviceDescription {
            id: api.outputs(ffi::DescriptionId::new(description))?.id,
            process_index: api.outputs(ffi::DescriptionProcessIndex::new(description))?.process_index,
            kind: api.outputs(ffi::DescriptionKind::new(description))?.kind.text(),
            debug_string: api.outputs(ffi::DescriptionDebugString::new(description))?.text.text(),
            attributes: value::read(api.outputs(ffi::DescriptionAttributes::new(description))?.attributes.get()),
        })
    }
}

/// A device of a client.
#[derive(Clone)]
pub struct Device {
    handle: Child<ffi::Device, ffi::Client>,
    /// The process to which a simulation assigns the device.
    #[cfg(feature = "simulated")]
    process: Option<i32>,
}

/// The statistics of a device's allocator, in bytes unless stated otherwise; `None` if the plugin does not report the
/// number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct DeviceMemoryStats {
    pub bytes_in_use: i64,
    pub peak_bytes_in_use: Option<i64>,
    /// The number of allocations so far.
    pub num_allocs: Option<i64>,
    pub largest_alloc_size: Option<i64>,
    pub bytes_limit: Option<i64>,
    pub bytes_reserved: Option<i64>,
    pub peak_bytes_reserved: Option<i64>,
    pub bytes_reservable_limit: Option<i64>,
    pub largest_free_block_bytes: Option<i64>,
    pub pool_bytes: Option<i64>,
    pub peak_pool_bytes: Option<i64>,
}

impl Device {
    pub(crate) fn new(handle: Child<ffi::Device, ffi::Client>) -> Self {
        Device {
            handle,
            #[cfg(feature = "simulated")]
            process: None,
        }
    }

    /// Returns the same device, described as one of a simulated process.
    #[cfg(feature = "simulated")]
    pub(crate) fn of_process(self, process: i32) -> Self {
        Device { process: Some(process), ..self }
    }

    /// Returns a description of the device, without accessing the device.
    pub fn description(&self) -> Result<DeviceDescription> {
        let args = self.api().outputs(ffi::DeviceGetDescription::new(self.handle()))?;
        let description = args.description.ok_or(Error::Nothing { operation: ffi::DeviceGetDescription::NAME })?;
        let description = DeviceDescription::read(self.api(), description)?;
        #[cfg(feature = "simulated")]
        let description =
            DeviceDescription { process_index: self.process.unwrap_or(description.process_index), ..description };
        Ok(description)
    }

    /// Returns the statistics of the device's allocator. The CPU plugin has none: the error satisfies
    /// [`Error::is_unsupported`].
    pub fn memory_stats(&self) -> Result<DeviceMemoryStats> {
        let args = self.api().outputs(ffi::DeviceMemoryStats::new(self.handle()))?;
        Ok(DeviceMemoryStats {
            bytes_in_use: args.bytes_in_use,
            peak_bytes_in_use: args.peak_bytes_in_use.get(),
            num_allocs: args.num_allocs.get(),
            largest_alloc_size: args.largest_alloc_size.get(),
            bytes_limit: args.bytes_limit.get(),
            bytes_reserved: args.bytes_reserved.get(),
            peak_bytes_reserved: args.peak_bytes_reserved.get(),
            bytes_reservable_limit: args.bytes_reservable_limit.get(),
            largest_free_block_bytes: args.largest_free_block_bytes.get(),
            pool_bytes: args.pool_bytes.get(),
            peak_pool_bytes: args.peak_pool_bytes.get(),
        })
    }

    pub(crate) fn handle(&self) -> Ref<'_, ffi::Device> {
        self.handle.get()
    }

    fn api(&self) -> &'static Api {
        self.handle.parent().api()
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.handle().is(other.handle())
    }
}

impl Eq for Device {}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.description() {
            Ok(description) => f.write_str(&description.debug_string),
            Err(_) => f.write_str("Device"),
        }
    }
}
