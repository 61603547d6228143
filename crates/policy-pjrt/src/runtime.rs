//! Devices and their compiler.

use crate::decoder::Axis;
use crate::error::{Error, Result};
use crate::processes::Replicating;
use crate::program::Program;
use crate::sharding::AxisRules;
use grpo_backend_tpu::compile_options::options_for_decoder;
use grpo_backend_tpu::devices::{DeviceTensor, Devices, Layout, MeshProcesses, TensorError, descriptions};
use grpo_backend_tpu::plugins::{self, Kind};
use grpo_distributed::Store;
use grpo_models::{MemoryTable, ModelConfig};
use grpo_pjrt::{
    CacheOutcome, Client, CompileCache, CompileOptions, Device, Element, LoadedExecutable, NamedValue, OptionValue,
};
use grpo_stablehlo::Module;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Devices of a PJRT plugin, the mesh that they form, and the plugin's compiler. Clones share the client.
///
/// All programs of a runtime run on all of its devices. A single device is a mesh of one.
#[derive(Clone, Debug)]
pub struct Runtime {
    devices: Devices,
    /// The connection to the other processes of the devices, if there are any.
    pub(crate) store: Option<Arc<Store>>,
    rules: AxisRules,
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
    /// use grpo_backend_tpu::plugins::Kind;
    /// use grpo_policy_pjrt::{Runtime, decoder::AxisRules};
    /// use grpo_stablehlo::Mesh;
    ///
    /// let mesh = Mesh::new("mesh", [("data", 1), ("fsdp", 4), ("tensor", 2)]).expect("a mesh");
    /// let runtime = Runtime::open_mesh(Kind::Cpu, None, AxisRules::new(&mesh))?;
    /// assert_eq!(runtime.devices().len(), 8);
    /// # Ok::<(), grpo_policy_pjrt::Error>(())
    /// ```
    ///
    /// # Errors
    /// See [`Runtime::open`] and [`Runtime::on_mesh`].
    pub fn open_mesh(kind: Kind, path: Option<&Path>, rules: AxisRules) -> Result<Self> {
        let count = rules.mesh().devices();
        let virtual_devices = [("cpu_device_count", (count as i64).into())];
        let options = if kind == Kind::Cpu && count > 1 { &virtual_devices[..] } else { &[] };
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
        let (devices, rules, options) =
            (Devices::first(kind, client)?, AxisRules::default(), options_for_decoder(kind, 1));
        Ok(Self { devices, store: None, rules, options, cache: None, replicating: Replicating::default() })
    }

    /// Arranges the first devices of the client as the mesh of `rules`, in the order of [`mesh_order`](grpo_backend_tpu::devices::mesh_order).
    /// Policies and rollouts that are created with this runtime are sharded by the rules. With several processes, the mesh has the devices of
    /// all of them.
    ///
    /// # Errors
    /// [`Error::Loss`] if the mesh has more devices than the client; [`Error::Processes`] if it does not have the devices of all processes.
    pub fn on_mesh(mut self, rules: AxisRules) -> Result<Self> {
        let (mesh, found) = (rules.mesh(), self.client().devices().len());
        if let Some(store) = self.store.as_ref().filter(|_| mesh.devices() != found) {
            return Err(Error::Processes {
                device: self.name(),
                expected: format!("a mesh of the {found} devices that all {} processes have", store.num_processes()),
                found: format!("a mesh of {}", mesh.devices()),
            });
        }
        self.devices = self.devices.on_mesh(mesh)?;
        self.options = self.devices.options(self.options)?;
        self.rules = rules;
        self.replicating = Replicating::default();
        Ok(self)
    }

    /// Returns the runtime with the sharding of a model ([`AxisRules::for_model`]).
    pub(crate) fn for_model(&self, config: &ModelConfig) -> Self {
        Self { rules: self.rules.clone().for_model(config), ..self.clone() }
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
        Self { devices: self.devices.with_wait_limit(limit), ..self }
    }

    /// Sets a compiler flag, named without dashes.
    #[must_use]
    pub fn with_compile_flag(mut self, flag: &str, value: impl Into<OptionValue>) -> Self {
        self.options = self.options.with(flag, value);
        self
    }

    /// Returns the kind of the devices.
    pub fn kind(&self) -> Kind {
        self.devices.kind()
    }

    /// Returns the client of the devices.
    pub fn client(&self) -> &Client {
        self.devices.client()
    }

    /// Returns the devices of all processes, in the order of the mesh.
    pub fn devices(&self) -> &[Device] {
        self.devices.list()
    }

    /// Returns the devices as the owner of tensors and runs.
    pub(crate) fn owner(&self) -> &Devices {
        &self.devices
    }

    /// Returns the axis rules of the mesh.
    pub fn axis_rules(&self) -> &AxisRules {
        &self.rules
    }

    /// Returns the devices' name in messages and configurations.
    fn name(&self) -> String {
        format!("pjrt:{}", self.kind().name())
    }

    /// Returns the free bytes of the device of this process with the least free memory. Devices of XLA's CPU plugin share the free memory of
    /// this machine evenly. `None` if the plugin does not report it.
    pub fn available_memory(&self) -> Option<u64> {
        self.least_available().map(|(bytes, _)| bytes)
    }

    /// Returns the device with the least free memory, and its free bytes.
    pub(crate) fn least_available(&self) -> Option<(u64, &Device)> {
        let all = self.devices.own().map(|device| Some((self.available_on(device)?, device)));
        all.collect::<Option<Vec<_>>>()?.into_iter().min_by_key(|(bytes, _)| *bytes)
    }

    /// Returns the free bytes of a device.
    fn available_on(&self, device: &Device) -> Option<u64> {
        if self.kind() == Kind::Cpu {
            return grpo_models::available_memory().map(|bytes| bytes / self.devices.own().count().max(1) as u64);
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
        if let Some(store) = self.store.as_ref().filter(|_| self.devices().len() > 1) {
            let executable = self.compile_together(store, name, &text)?;
            self.check_devices(name, &executable)?;
            return Ok(executable);
        }
        let compiled = match &self.cache {
            Some(cache) => cache.compile(self.client(), &text, &self.options).map(|(executable, outcome)| {
                if outcome == CacheOutcome::Replaced {
                    warn_of_damage(cache, name);
                }
                executable
            }),
            None => self.client().compile(&text, &self.options),
        };
        tracing::debug!(program = name, bytes = text.len(), "compiled");
        compiled.map_err(|cause| self.compile_error(name, cause))
    }

    /// Returns the error of a failed compilation.
    pub(crate) fn compile_error(&self, name: &str, cause: grpo_pjrt::Error) -> Error {
        match cause {
            cause if cause.is_out_of_memory() => {
                // The compiler reports its own memory limit, which differs from the free memory.
                Error::out_of_memory(format!("compiling `{name}`"), [None; 2], Some(name), cause)
            }
            grpo_pjrt::Error::Api { .. } | grpo_pjrt::Error::MissingFunction { .. } => Error::Compile {
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
        if found.iter().eq(self.devices.own()) {
            return Ok(());
        }
        let expected = self.devices.own().collect::<Vec<_>>();
        Err(Error::Processes {
            device: self.name(),
            expected: format!("{expected:?} in this process for `{name}`"),
            found: format!("{found:?}"),
        })
    }

    /// Returns the path of the plugin and the versions that it reports.
    fn versions(&self) -> String {
        let plugin = self.client().plugin();
        let ((major, minor), path) = (plugin.api_version(), plugin.path().display());
        let attributes = plugin.attributes().unwrap_or_default();
        let stablehlo = match attributes.get("stablehlo_current_version") {
            Some(NamedValue::Ints(parts)) => {
                format!(", StableHLO {}", parts.iter().map(i64::to_string).collect::<Vec<_>>().join("."))
            }
            _ => String::new(),
        };
        let platform: Vec<&str> = self.client().platform_version().split_whitespace().collect();
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
        self.upload_with(values, Layout::new(shape, self.rules.sharding(axes).as_ref()))
    }

    fn upload_with<T: Element>(&self, values: &[T], layout: Layout) -> Result<DeviceTensor> {
        self.devices.upload(values, layout).map_err(|error| match error {
            TensorError::Device { operation, upload: Some((device, bytes)), cause } if cause.is_out_of_memory() => {
                let available = self.available_on(&self.devices()[device]);
                Error::out_of_memory(operation, [Some(bytes), available], None, *cause)
            }
            error => error.into(),
        })
    }
}

/// Warns of an entry of the compile cache that cannot be loaded.
pub(crate) fn warn_of_damage(cache: &CompileCache, name: &str) {
    let folder = cache.directory().display();
    tracing::warn!("{folder}: the compiled program `{name}` is damaged, or of another release: it is compiled again");
}
