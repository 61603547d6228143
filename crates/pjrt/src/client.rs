//! A client: a plugin's devices, opened.

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
use crate::plugin::Plugin;
use crate::value::{self, NamedValue};

/// A plugin's devices, opened. Clones share it; it closes when the last clone, buffer and executable is gone.
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
    launches: Mutex<()>,
}

impl Client {
    pub(crate) fn new(plugin: Plugin, options: &[(&str, NamedValue)]) -> Result<Self> {
        let api = plugin.api();
        let options = value::write(options);
        let mut create = ffi::ClientCreate::new(options.as_slice().into());
        api.call(&mut create)?;
        let client =
            create.client.take(&ffi::Origin::new(api)).ok_or(Error::Nothing { operation: ffi::ClientCreate::NAME })?;
        let handle = Arc::new(client);
        let mut name = ffi::ClientPlatformName::new(handle.get());
        api.call(&mut name)?;
        let mut version = ffi::ClientPlatformVersion::new(handle.get());
        api.call(&mut version)?;
        let devices = Child::of(&handle, |client| {
            let mut args = ffi::ClientDevices::new(client);
            api.call(&mut args)?;
            Ok(args.devices.get())
        })?;
        let addressable_devices = Child::of(&handle, |client| {
            let mut args = ffi::ClientAddressableDevices::new(client);
            api.call(&mut args)?;
            Ok(args.devices.get())
        })?;
        let inner = Inner {
            plugin,
            platform_name: name.name.text(),
            platform_version: version.version.text(),
            devices: devices.into_iter().map(Device::new).collect(),
            addressable_devices: addressable_devices.into_iter().map(Device::new).collect(),
            handle,
            launches: Mutex::default(),
        };
        Ok(Client { inner: Arc::new(inner) })
    }

    /// The longest wait for a device that a client allows unless it is told another: an hour.
    pub const DEFAULT_WAIT_LIMIT: Duration = ffi::Waits::DEFAULT_LIMIT;

    /// Sets how long a wait for the client's devices takes at most, for this client and all of its clones.
    ///
    /// A wait that takes longer is [`Error::TimedOut`], and from then on the client asks nothing more of its devices: copies
    /// and launches are that error at once, and what the devices may still use is never freed, nor destroyed at the end.
    ///
    /// What plugins do inside of a call has no limit, because the API has none for it: opening devices, compiling, and on
    /// XLA's CPU also programs that it computes before the launch returns.
    #[must_use]
    pub fn with_wait_limit(self, limit: Duration) -> Self {
        self.handle().origin().waits().set_limit(limit);
        self
    }

    /// How long a wait for the client's devices takes at most.
    pub fn wait_limit(&self) -> Duration {
        self.handle().origin().waits().limit()
    }

    /// The plugin behind the client.
    pub fn plugin(&self) -> Plugin {
        self.inner.plugin
    }

    /// The kind of device: `cpu`, `cuda`, `tpu`.
    pub fn platform_name(&self) -> &str {
        &self.inner.platform_name
    }

    /// The versions of what compiles and runs programs.
    pub fn platform_version(&self) -> &str {
        &self.inner.platform_version
    }

    /// Every device of the system, also those of other processes.
    pub fn devices(&self) -> &[Device] {
        &self.inner.devices
    }

    /// The devices that this process can use.
    pub fn addressable_devices(&self) -> &[Device] {
        &self.inner.addressable_devices
    }

    /// Compiles StableHLO, as text or as bytecode. While the compiler works, the span `compile` of [`tracing`] is open (see the
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
        let loaded = args.executable.take(self.handle().origin());
        let loaded = loaded.ok_or(Error::Nothing { operation: ffi::ClientCompile::NAME })?;
        LoadedExecutable::new(self.clone(), loaded)
    }

    /// Loads what [`Executable::serialize`](crate::Executable::serialize) gave on the same platform and version.
    pub fn load(&self, serialized: &[u8]) -> Result<LoadedExecutable> {
        let mut args = ffi::DeserializeAndLoad::new(self.handle().get(), serialized.into());
        self.api().call(&mut args)?;
        let operation = ffi::DeserializeAndLoad::NAME;
        let loaded = args.executable.take(self.handle().origin()).ok_or(Error::Nothing { operation })?;
        LoadedExecutable::new(self.clone(), loaded)
    }

    /// Copies `data`, row-major of shape `dims` (none: a scalar), to `device`.
    ///
    /// The plugin has read the slice, and the device has the elements, when the call returns.
    ///
    /// # Errors
    ///
    /// [`Error::Size`] if `dims` and `data` disagree, [`Error::Foreign`] if the device is not of this client,
    /// [`Error::TimedOut`] after [`Client::wait_limit`].
    pub fn buffer_from_host<T: Element>(&self, data: &[T], dims: &[usize], device: &Device) -> Result<Buffer> {
        if !device.belongs_to(self.handle()) {
            return Err(Error::Foreign { operation: "buffer_from_host", what: "device" });
        }
        let dims: Vec<i64> = dims.iter().map(|&dim| i64::try_from(dim).unwrap_or(i64::MAX)).collect();
        let element = (T::DTYPE.to_raw(), T::DTYPE.size());
        let buffer = ffi::copy_from_host(self.handle(), device.handle(), bytemuck::cast_slice(data), element, &dims)?;
        Buffer::new(self.clone(), buffer)
    }

    pub(crate) fn handle(&self) -> &Owned<ffi::Client> {
        &self.inner.handle
    }

    /// Held while a program is launched on several devices, so that all of them meet such programs in one order: in two,
    /// each would wait in its collectives for the other.
    pub(crate) fn launch_in_order(&self) -> MutexGuard<'_, ()> {
        self.inner.launches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is(&self, other: &Client) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
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
