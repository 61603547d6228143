//! Devices and their compiler.

use crate::decoder::{Axis, AxisRules, Split};
use crate::error::{Error, Result};
use crate::mesh_processes::MeshProcesses;
use crate::processes::Replicating;
use crate::program::Program;
use crate::ring_order::mesh_order;
use crate::tensor::{DeviceTensor, Layout, OwnDevices, device_name};
use backend_tpu::compile_options::options_for_decoder;
use backend_tpu::plugins::{self, Kind};
use distributed::Store;
use models::MemoryTable;
use pjrt::{
    CacheOutcome, Client, CompileCache, CompileOptions, Device, DeviceDescription, Element, LoadedExecutable,
    NamedValue, OptionValue,
};
use stablehlo::Module;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Devices of a PJRT plugin, the mesh that they form, and the plugin's compiler. Clones share the client.
///
/// All programs of a runtime run on all of its devices. A single device is a mesh of one.
#[derive(Clone, Debug)]
pub struct Runtime {
    kind: Kind,
    pub(crate) client: Client,
    /// The devices of all processes, in the order of the mesh.
    devices: Vec<Device>,
    own: Arc<OwnDevices>,
    pub(crate) processes: MeshProcesses,
    /// The connection to the other processes of the devices, if there are any.
    pub(crate) store: Option<Arc<Store>>,
    split: Split,
    pub(crate) options: CompileOptions,
    pub(crate) cache: Option<CompileCache>,
    pub(crate) replicating: Replicating,
}

impl Runtime {
    /// Opens the first device of `kind` with the plugin at `path`; without a path, with the plugin that [`plugins::find`] finds.
    ///
    /// # Errors
    /// [`Error::Loss`] if there is no plugin (with the command that installs it), or if it opens no device.
    pub fn open(kind: Kind, path: Option<&Path>) -> Result<Self> {
        Self::new(kind, plugins::client(kind, path, &[])?)
    }

    /// Opens the devices of a mesh. XLA's CPU plugin makes as many virtual devices as the mesh has.
    ///
    /// ```no_run
    /// use backend_tpu::plugins::Kind;
    /// use policy_pjrt::{Runtime, decoder::AxisRules};
    /// use stablehlo::Mesh;
    ///
    /// let mesh = Mesh::new("mesh", [("data", 1), ("fsdp", 4), ("tensor", 2)]).expect("a mesh");
    /// let runtime = Runtime::open_mesh(Kind::Cpu, None, AxisRules::new(&mesh))?;
    /// assert_eq!(runtime.devices().len(), 8);
    /// # Ok::<(), policy_pjrt::Error>(())
    /// ```
    ///
    /// # Errors
    /// See [`Runtime::open`] and [`Runtime::on_mesh`].
    pub fn open_mesh(kind: Kind, path: Option<&Path>, rules: AxisRules) -> Result<Self> {
        let virtual_devices = [("cpu_device_count", (rules.mesh().devices() as i64).into())];
        let options = if kind == Kind::Cpu { &virtual_devices[..] } else { &[] };
        Self::new(kind, plugins::client(kind, path, options)?)?.on_mesh(rules)
    }

    /// Uses the first device of an open client.
    ///
    /// # Errors
    /// [`Error::Loss`] if the client has no device; [`Error::Processes`] if it has devices of several processes.
    pub fn new(kind: Kind, client: Client) -> Result<Self> {
        let processes = MeshProcesses::of_devices(&descriptions(client.devices())?).processes();
        if processes.len() > 1 {
            return Err(Error::Processes {
                device: format!("pjrt:{}", kind.name()),
                expected: "devices of one process, or a run with the section distributed".into(),
                found: format!("{} devices of {} processes", client.devices().len(), processes.len()),
            });
        }
        Self::first_device(kind, client)
    }

    /// Uses the first device of this process.
    pub(crate) fn first_device(kind: Kind, client: Client) -> Result<Self> {
        let Some(device) = client.addressable_devices().first().cloned() else {
            return Err(failed(kind, "the plugin has no device on this machine".into()));
        };
        let (devices, split, options) = (vec![device], Split::default(), options_for_decoder(kind));
        let own = OwnDevices { of_mesh: 1, positions: vec![0] }.into();
        let processes = MeshProcesses::of_devices(&descriptions(&devices)?);
        let (store, cache, replicating) = (None, None, Replicating::default());
        Ok(Self { kind, client, devices, own, processes, store, split, options, cache, replicating })
    }

    /// Arranges the first devices of the client as the mesh of `rules`, in the order of [`mesh_order`]. Policies and rollouts that are created
    /// with this runtime are sharded by the rules. With several processes, the mesh has the devices of all of them.
    ///
    /// # Errors
    /// [`Error::Loss`] if the mesh has more devices than the client, or not the devices of all processes.
    pub fn on_mesh(mut self, rules: AxisRules) -> Result<Self> {
        let (mesh, all) = (rules.mesh(), descriptions(self.client.devices())?);
        let (wanted, found) = (mesh.devices(), all.len());
        let refused = match &self.store {
            Some(store) if wanted != found => format!("all {} processes have {found}", store.num_processes()),
            None if wanted > found => format!("this process has {found}"),
            _ => String::new(),
        };
        if !refused.is_empty() {
            return Err(failed(self.kind, format!("the mesh {mesh} has {wanted} devices, and {refused}")));
        }
        let order = mesh_order(self.kind, &all, wanted);
        let all: Vec<DeviceDescription> = order.iter().map(|at| all[*at].clone()).collect();
        self.devices = order.iter().map(|at| self.client.devices()[*at].clone()).collect();
        let own = self.client.addressable_devices();
        let positions = (0..wanted).filter(|at| own.contains(&self.devices[*at])).collect();
        self.own = OwnDevices { of_mesh: wanted, positions }.into();
        self.processes = MeshProcesses::of_devices(&all);
        self.options = options_on(&all, self.options);
        self.split = Split::of(rules);
        self.replicating = Replicating::default();
        Ok(self)
    }

    /// Caches compiled programs in `directory`, for this and later processes. If several processes share a mesh, process 0 reads and writes
    /// the cache for all of them.
    #[must_use]
    pub fn with_compile_cache(mut self, directory: impl Into<PathBuf>) -> Self {
        self.cache = Some(CompileCache::new(directory));
        self
    }

    /// Sets the time limit of every wait for the device, for this runtime and all others with the same client; the default is one hour. It
    /// must exceed the time of the longest program, for example an optimizer step. [`Client::with_wait_limit`] lists operations without a
    /// limit.
    #[must_use]
    pub fn with_wait_limit(self, limit: Duration) -> Self {
        let client = self.client.with_wait_limit(limit);
        Self { client, ..self }
    }

    /// Sets a compiler flag, named without dashes.
    #[must_use]
    pub fn with_compile_flag(mut self, flag: &str, value: impl Into<OptionValue>) -> Self {
        self.options = self.options.with(flag, value);
        self
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
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Returns the devices of the mesh that this process can use.
    pub(crate) fn own_devices(&self) -> &Arc<OwnDevices> {
        &self.own
    }

    fn own(&self) -> impl Iterator<Item = &Device> {
        self.own.positions.iter().map(|at| &self.devices[*at])
    }

    /// Returns the axis rules of the mesh, if there are several devices.
    pub fn axis_rules(&self) -> Option<&AxisRules> {
        self.split.rules()
    }

    /// Returns the sharding of the programs.
    pub(crate) fn split(&self) -> &Split {
        &self.split
    }

    /// Returns the devices' name in messages and configurations.
    fn name(&self) -> String {
        format!("pjrt:{}", self.kind.name())
    }

    /// Returns the free bytes of the device of this process with the least free memory. Devices of XLA's CPU plugin share the free memory of
    /// this machine evenly. `None` if the plugin does not report it.
    pub fn available_memory(&self) -> Option<u64> {
        self.least_available().map(|(bytes, _)| bytes)
    }

    /// Returns the device with the least free memory, and its free bytes.
    pub(crate) fn least_available(&self) -> Option<(u64, &Device)> {
        let all = self.own().map(|device| Some((self.available_on(device)?, device)));
        all.collect::<Option<Vec<_>>>()?.into_iter().min_by_key(|(bytes, _)| *bytes)
    }

    /// Returns the free bytes of a device.
    fn available_on(&self, device: &Device) -> Option<u64> {
        if self.kind == Kind::Cpu {
            return models::available_memory().map(|bytes| bytes / self.own.positions.len().max(1) as u64);
        }
        let stats = device.memory_stats().ok()?;
        u64::try_from(stats.bytes_limit?.saturating_sub(stats.bytes_in_use)).ok()
    }

    /// Checks that `table`, the memory of each device, fits into the free memory of every device. If the plugin does not report free memory, only a later allocation can
    /// fail.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn check_memory(&self, table: MemoryTable) -> Result<()> {
        match self.available_memory() {
            Some(available) if table.total() > available => {
                Err(Error::TooLarge { device: self.name(), table: Box::new(table), available })
            }
            _ => Ok(()),
        }
    }

    /// Compiles `module`, or loads it from the compile cache. An unusable cache entry is logged and replaced.
    ///
    /// # Errors
    /// [`Error::Compile`] with the compiler's error, [`Error::OutOfMemory`], [`Error::Device`] if other users can write to the cache.
    pub fn compile(&self, module: &Module) -> Result<Program> {
        Ok(Program::new(module.name.clone(), module, self.compile_executable(module)?, self))
    }

    pub(crate) fn compile_executable(&self, module: &Module) -> Result<LoadedExecutable> {
        let (name, text) = (&*module.name, module.to_string());
        if let Some(store) = self.store.as_ref().filter(|_| self.devices.len() > 1) {
            let executable = self.compile_together(store, name, &text)?;
            self.check_devices(name, &executable)?;
            return Ok(executable);
        }
        let compiled = match &self.cache {
            Some(cache) => cache.compile(&self.client, &text, &self.options).map(|(executable, outcome)| {
                if outcome == CacheOutcome::Replaced {
                    let folder = cache.directory().display();
                    tracing::warn!(
                        "{folder}: the compiled program `{name}` is damaged, or of another release: it is compiled again"
                    );
                }
                executable
            }),
            None => self.client.compile(&text, &self.options),
        };
        tracing::debug!(program = name, bytes = text.len(), "compiled");
        compiled.map_err(|cause| self.compile_error(name, cause))
    }

    /// Returns the error of a failed compilation.
    pub(crate) fn compile_error(&self, name: &str, cause: pjrt::Error) -> Error {
        match cause {
            cause if cause.is_out_of_memory() => {
                // The compiler reports its own memory limit, which differs from the free memory.
                Error::out_of_memory(format!("compiling `{name}`"), [None; 2], Some(name), cause)
            }
            pjrt::Error::Api { .. } | pjrt::Error::MissingFunction { .. } => Error::Compile {
                program: name.to_owned(),
                device: self.name(),
                plugin: self.versions(),
                cause: cause.into(),
            },
            cause => {
                Error::Device { operation: format!("compiling `{name}` for {}", self.name()), cause: cause.into() }
            }
        }
    }

    /// Checks that an executable takes the arguments of this process in the order of the mesh.
    fn check_devices(&self, name: &str, executable: &LoadedExecutable) -> Result<()> {
        let found = executable.devices().map_err(Error::device(format!("loading `{name}`")))?;
        if found.iter().eq(self.own()) {
            return Ok(());
        }
        let expected = self.own().collect::<Vec<_>>();
        Err(Error::Processes {
            device: self.name(),
            expected: format!("{expected:?} in this process for `{name}`"),
            found: format!("{found:?}"),
        })
    }

    /// Returns the path of the plugin and the versions that it reports.
    fn versions(&self) -> String {
        let plugin = self.client.plugin();
        let ((major, minor), path) = (plugin.api_version(), plugin.path().display());
        let attributes = plugin.attributes().unwrap_or_default();
        let stablehlo = match attributes.get("stablehlo_current_version") {
            Some(NamedValue::Ints(parts)) => {
                format!(", StableHLO {}", parts.iter().map(i64::to_string).collect::<Vec<_>>().join("."))
            }
            _ => String::new(),
        };
        let platform: Vec<&str> = self.client.platform_version().split_whitespace().collect();
        format!("{path} (PJRT API {major}.{minor}{stablehlo}, {})", platform.join(" "))
    }

    /// Copies `values`, row-major with `shape`, to every device.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::TimedOut`], [`Error::Device`].
    pub fn upload<T: Element>(&self, values: &[T], shape: &[usize]) -> Result<DeviceTensor> {
        self.upload_with(values, Layout::new(shape, None))
    }

    /// Copies to every device its shard of `values`, row-major with `shape` and these logical axes.
    ///
    /// # Errors
    /// [`Error::Split`] if a dimension does not shard evenly; see [`Runtime::upload`].
    pub(crate) fn upload_sharded<T: Element, A: Copy + Into<Option<Axis>>>(
        &self,
        values: &[T],
        shape: &[usize],
        axes: &[A],
    ) -> Result<DeviceTensor> {
        self.upload_with(values, Layout::new(shape, self.split.sharding(axes).as_ref()))
    }

    /// Starts the copies to all devices of this process before it waits for one. The plugin reads the shards from `values`, which may be a
    /// mapped file.
    fn upload_with<T: Element>(&self, values: &[T], layout: Layout) -> Result<DeviceTensor> {
        let shape = layout.shape();
        let failed = |device: &Device, part: &[Range<usize>], cause: pjrt::Error| {
            let part: Vec<usize> = part.iter().map(Range::len).collect();
            let operation = format!("copying {part:?} to {}", device_name(device, self.devices.len()));
            if !cause.is_out_of_memory() {
                return Error::device(operation)(cause);
            }
            let bytes = (part.iter().product::<usize>() * size_of::<T>()) as u64;
            Error::out_of_memory(operation, [Some(bytes), self.available_on(device)], None, cause)
        };
        let ranges = layout.ranges(self.devices.len())?;
        let own = || self.own.positions.iter().map(|at| (&self.devices[*at], &ranges[*at]));
        let start = |(device, part): (&Device, &Vec<Range<usize>>)| {
            let shard = self.client.buffer_from_host_async(values, shape, part, device);
            shard.map_err(|cause| failed(device, part, cause))
        };
        let shards = own().map(start).collect::<Result<Vec<_>>>()?;
        for (shard, (device, part)) in shards.iter().zip(own()) {
            shard.wait().map_err(|cause| failed(device, part, cause))?;
        }
        Ok(DeviceTensor::new(layout.into(), &self.own, shards))
    }
}

/// Returns the options of a compilation for these devices.
fn options_on(devices: &[DeviceDescription], options: CompileOptions) -> CompileOptions {
    let ids: Vec<i64> = devices.iter().map(|device| device.id.into()).collect();
    let of_mesh = if ids.len() > 1 { CompileOptions::shardy(ids.len()) } else { CompileOptions::default() };
    let device_assignment = Some(vec![ids]).filter(|ids| ids[0].len() > 1);
    CompileOptions {
        device_assignment,
        overrides: options.overrides,
        optimization_level: options.optimization_level,
        ..of_mesh
    }
}

pub(crate) fn descriptions(devices: &[Device]) -> Result<Vec<DeviceDescription>> {
    let all = devices.iter().map(Device::description).collect::<pjrt::Result<_>>();
    all.map_err(Error::device("reading the descriptions of the devices"))
}

/// Makes an error of the devices of `kind`.
fn failed(kind: Kind, message: String) -> Error {
    grpo_core::Error::Backend { backend: format!("pjrt:{}", kind.name()), message }.into()
}
