//! An open set of a plugin's devices.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::buffer::Buffer;
use crate::compile_options::CompileOptions;
use crate::compiling;
use crate::device::Device;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::executable::LoadedExecutable;
use crate::ffi::{self, Args, Child, Owned};
use crate::key_value::KeyValueStore;
use crate::plugin::Plugin;
use crate::value::NamedValue;

/// An open set of a plugin's devices. Clones share it; it closes with the last clone, buffer and executable.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
}

struct Inner {
    handle: Arc<Owned<ffi::Client>>,
    plugin: Plugin,
    platform_name: String,
    platform_version: String,
    devices: Vec<Device>,
    addressable_devices: Vec<Device>,
    launches: Arc<Mutex<()>>,
    #[cfg(feature = "simulated")]
    process: Option<crate::simulated::Process>,
}

impl Client {
    pub(crate) fn new(
        plugin: Plugin,
        options: &[(&str, NamedValue)],
        store: Option<Arc<dyn KeyValueStore>>,
    ) -> Result<Self> {
        let api = plugin.api();
        let handle = Arc::new(ffi::create_client(api, options, store)?);
        let name = handle.ask(ffi::ClientPlatformName::new)?;
        let version = handle.ask(ffi::ClientPlatformVersion::new)?;
        let devices = Child::of(&handle, |client| Ok(api.outputs(ffi::ClientDevices::new(client))?.devices.get()))?;
        let addressable_devices =
            Child::of(&handle, |client| Ok(api.outputs(ffi::ClientAddressableDevices::new(client))?.devices.get()))?;
        let inner = Inner {
            plugin,
            platform_name: name.name.text(),
            platform_version: version.version.text(),
            devices: devices.into_iter().map(Device::new).collect(),
            addressable_devices: addressable_devices.into_iter().map(Device::new).collect(),
            handle,
            launches: Arc::default(),
            #[cfg(feature = "simulated")]
            process: None,
        };
        Ok(Client { inner: Arc::new(inner) })
    }

    /// Returns a client of one simulated process, with these devices of all processes, and its own ones.
    #[cfg(feature = "simulated")]
    pub(crate) fn of_process(&self, devices: [Vec<Device>; 2], process: crate::simulated::Process) -> Self {
        let [devices, addressable_devices] = devices;
        let Inner { handle, plugin, platform_name, platform_version, launches, .. } = &*self.inner;
        let inner = Inner {
            handle: Arc::clone(handle),
            plugin: *plugin,
            platform_name: platform_name.clone(),
            platform_version: platform_version.clone(),
            devices,
            addressable_devices,
            launches: Arc::clone(launches),
            process: Some(process),
        };
        Client { inner: Arc::new(inner) }
    }

    #[cfg(feature = "simulated")]
    pub(crate) fn simulated(&self) -> Option<&crate::simulated::Process> {
        self.inner.process.as_ref()
    }

    /// The default limit of a wait for a device: an hour.
    pub const DEFAULT_WAIT_LIMIT: Duration = ffi::Waits::DEFAULT_LIMIT;

    /// Sets the limit of a wait for the client's devices, for this client and all of its clones.
    ///
    /// A wait beyond the limit returns [`Error::TimedOut`]. From then on, the client sends nothing to its devices:
    /// copies and launches return this error at once, and objects that the devices may still use are never freed.
    ///
    /// A call inside of a plugin has no limit, because the API offers none: opening devices, compiling, and, on XLA's
    /// CPU, programs that run before the launch returns.
    #[must_use]
    pub fn with_wait_limit(self, limit: Duration) -> Self {
        self.handle().origin().waits().set_limit(limit);
        self
    }

    /// Returns the limit of a wait for the client's devices.
    pub fn wait_limit(&self) -> Duration {
        self.handle().origin().waits().limit()
    }

    /// Returns the plugin of the client.
    pub fn plugin(&self) -> Plugin {
        self.inner.plugin
    }

    /// Returns the kind of device: `cpu`, `cuda`, `tpu`.
    pub fn platform_name(&self) -> &str {
        &self.inner.platform_name
    }

    /// Returns the versions of the compiler and the runtime.
    pub fn platform_version(&self) -> &str {
        &self.inner.platform_version
    }

    /// Returns all devices of the system, including devices of other processes.
    pub fn devices(&self) -> &[Device] {
        &self.inner.devices
    }

    /// Returns the devices that this process can use.
    pub fn addressable_devices(&self) -> &[Device] {
        &self.inner.addressable_devices
    }

    /// Compiles a StableHLO program, as text or as bytecode. The span `compile` of [`tracing`] is open during compilation (see the
    /// [front page](crate)).
    pub fn compile(&self, program: impl AsRef<[u8]>, options: &CompileOptions) -> Result<LoadedExecutable> {
        let span = compiling::span(program.as_ref());
        let program = ffi::Program::mlir(program.as_ref());
        let options = options.encode();
        let mut args = ffi::ClientCompile::new(self.handle().get(), &program, options.as_slice().into());
        self.api().call(&mut args).inspect_err(|_| {
            span.record("failed", true);
        })?;
        drop(span);
        let loaded = args.executable.given(self.handle().origin(), ffi::ClientCompile::NAME)?;
        LoadedExecutable::new(self.clone(), loaded)
    }

    /// Loads a result of [`Executable::serialize`](crate::Executable::serialize) from the same platform and version.
    pub fn load(&self, serialized: &[u8]) -> Result<LoadedExecutable> {
        let mut args = self.api().outputs(ffi::DeserializeAndLoad::new(self.handle().get(), serialized.into()))?;
        let loaded = args.executable.given(self.handle().origin(), ffi::DeserializeAndLoad::NAME)?;
        LoadedExecutable::new(self.clone(), loaded)
    }

    /// Copies `data`, row-major of shape `dims` (empty for a scalar), to `device`.
    ///
    /// When the call returns, the plugin no longer reads the slice, and the device has the elements.
    ///
    /// # Errors
    ///
    /// [`Error::Size`] if `dims` and `data` disagree; [`Error::Foreign`] if the device belongs to another client or process;
    /// [`Error::TimedOut`] after [`Client::wait_limit`].
    pub fn buffer_from_host<T: Element>(&self, data: &[T], dims: &[usize], device: &Device) -> Result<Buffer> {
        let whole: Vec<_> = dims.iter().map(|&dim| 0..dim).collect();
        let buffer = self.buffer_from_host_async(data, dims, &whole, device)?;
        buffer.wait()?;
        Ok(buffer)
    }

    /// Starts to copy a part of `data`, row-major of shape `dims`, to `device`: `part` has the range along each
    /// dimension. [`Buffer::wait`] waits for the copy.
    ///
    /// When the call returns, the plugin no longer reads the slice. It gathers the elements of the part itself; only if
    /// it does not support strides, they are gathered in a vector during the call.
    ///
    /// ```no_run
    /// # fn main() -> grpo_pjrt::Result<()> {
    /// # let client = grpo_pjrt::Plugin::load("xla_cpu_pjrt.so")?.client(&[("cpu_device_count", 2.into())])?;
    /// // Each of two devices gets a column. Both copies start before one is waited for.
    /// let data = [1.0f32, 2.0, 3.0, 4.0];
    /// let devices = client.addressable_devices().iter().enumerate();
    /// let columns = devices.map(|(i, device)| client.buffer_from_host_async(&data, &[2, 2], &[0..2, i..i + 1], device));
    /// let columns = columns.collect::<grpo_pjrt::Result<Vec<_>>>()?;
    /// columns.iter().try_for_each(|column| column.wait())?;
    /// assert_eq!(columns[1].to_vec::<f32>()?, [2.0, 4.0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Size`] if `dims` and `data` disagree; [`Error::Part`] if `part` is not within `dims`; [`Error::Foreign`]
    /// if the device belongs to another client or process.
    pub fn buffer_from_host_async<T: Element>(
        &self,
        data: &[T],
        dims: &[usize],
        part: &[Range<usize>],
        device: &Device,
    ) -> Result<Buffer> {
        if !self.addressable_devices().contains(device) {
            return Err(Error::Foreign { operation: "buffer_from_host", what: "device" });
        }
        let (type_code, element_size) = (T::DTYPE.to_raw(), T::DTYPE.size());
        let array = ffi::HostArray { data: bytemuck::cast_slice(data), type_code, element_size, dims };
        let buffer = ffi::copy_from_host(self.handle(), device.handle(), array, part)?;
        Buffer::new(self.clone(), buffer)
    }

    pub(crate) fn handle(&self) -> &Owned<ffi::Client> {
        &self.inner.handle
    }

    /// Locks launches on several devices, so that all devices run such programs in the same order. Otherwise two
    /// programs could deadlock in their collectives.
    pub(crate) fn launch_in_order(&self) -> MutexGuard<'_, ()> {
        self.inner.launches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is(&self, other: &Client) -> bool {
        Arc::ptr_eq(&self.inner.handle, &other.inner.handle)
    }

    pub(crate) fn api(&self) -> &'static ffi::Api {
        self.inner.plugin.api()
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Client({}, {} devices)", self.platform_name(), self.devices().len())
    }
}
