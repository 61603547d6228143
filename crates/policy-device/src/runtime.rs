//! A device, the compiler of its platform, and the programs that were compiled for it.

use crate::error::{Error, Result};
use crate::memory::{KNOBS, knobs_of};
use backend_tpu::compile_options::options_for_decoder;
use backend_tpu::plugins::{self, Kind};
use models::MemoryTable;
use pjrt::{
    Argument, Buffer, CacheOutcome, Client, CompileCache, CompileOptions, Device, Element, LoadedExecutable,
    NamedValue, OptionValue,
};
use stablehlo::Module;
use std::collections::HashMap;
use std::hash::Hash;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A device of a PJRT plugin, with the compiler for it. Clones share the client.
///
/// ```no_run
/// use backend_tpu::plugins::Kind;
///
/// let runtime = policy_device::Runtime::open(Kind::Cpu, None)?;
/// # Ok::<(), policy_device::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Runtime {
    kind: Kind,
    client: Client,
    device: Device,
    options: CompileOptions,
    cache: Option<CompileCache>,
}

impl Runtime {
    /// Opens the first device of `kind` with the plugin at `path`, or the one that [`plugins::find`] finds.
    ///
    /// # Errors
    /// [`Error::Loss`] when there is no plugin (with the command that installs it), or it opens no device.
    pub fn open(kind: Kind, path: Option<&Path>) -> Result<Self> {
        Self::new(kind, plugins::client(kind, path, &[])?)
    }

    /// The first device of an open client.
    ///
    /// # Errors
    /// [`Error::Loss`] when it has none.
    pub fn new(kind: Kind, client: Client) -> Result<Self> {
        let device = client.addressable_devices().first().cloned().ok_or_else(|| grpo_core::Error::Backend {
            backend: format!("pjrt:{}", kind.name()),
            message: "the plugin has no device here".into(),
        })?;
        Ok(Self { kind, client, device, options: options_for_decoder(kind), cache: None })
    }

    /// Keeps compiled programs in `directory`, for this and later processes.
    #[must_use]
    pub fn with_compile_cache(mut self, directory: impl Into<PathBuf>) -> Self {
        self.cache = Some(CompileCache::new(directory));
        self
    }

    /// Sets how long a wait for the device takes at most, for this runtime and all that share its client; an hour without it. The time is
    /// that of the longest program, such as a step of the optimizer. See [`Client::with_wait_limit`] for what has no limit.
    #[must_use]
    pub fn with_wait_limit(self, limit: Duration) -> Self {
        let client = self.client.with_wait_limit(limit);
        Self { client, ..self }
    }

    /// Sets a flag of the compiler, by its name without dashes.
    #[must_use]
    pub fn with_compile_flag(mut self, flag: &str, value: impl Into<OptionValue>) -> Self {
        self.options = self.options.with(flag, value);
        self
    }

    /// The kind of the device.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The client of the device.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The name of the device in messages and configurations.
    fn name(&self) -> String {
        format!("pjrt:{}", self.kind.name())
    }

    /// The bytes that are left on the device: of XLA's CPU those of this machine; `None` where a plugin does not tell.
    pub fn available_memory(&self) -> Option<u64> {
        if self.kind == Kind::Cpu {
            return models::available_memory();
        }
        let stats = self.device.memory_stats().ok()?;
        u64::try_from(stats.bytes_limit?.saturating_sub(stats.bytes_in_use)).ok()
    }

    /// Checks that the device has room for all parts of `table`. Where its plugin does not tell, an allocation says so later.
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

    /// Compiles `module`, or takes it from the compile cache. An entry of the cache that cannot be used is logged and replaced.
    ///
    /// # Errors
    /// [`Error::Compile`] with what the compiler says, [`Error::OutOfMemory`], [`Error::Device`] for a cache that others may write to.
    pub fn compile(&self, module: &Module) -> Result<Program> {
        let (name, text) = (module.name.clone(), module.to_string());
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
        match compiled {
            Ok(executable) => Ok(Program { name, executable, runtime: self.clone() }),
            Err(cause) if cause.is_out_of_memory() => {
                let (operation, knobs) = (format!("compiling `{name}`"), knobs_of(&name));
                // The compiler says what there is for a program; what others hold of it now is another number.
                Err(Error::out_of_memory(operation, [None; 2], knobs, cause))
            }
            Err(cause @ (pjrt::Error::Api { .. } | pjrt::Error::MissingFunction { .. })) => {
                Err(Error::Compile { program: name, device: self.name(), plugin: self.versions(), cause: cause.into() })
            }
            Err(cause) => {
                Err(Error::Device { operation: format!("compiling `{name}` for {}", self.name()), cause: cause.into() })
            }
        }
    }

    /// The file of the plugin and the versions that it says of itself.
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

    /// Copies `values`, row-major of `shape`, to the device.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::TimedOut`], [`Error::Device`].
    pub fn upload<T: Element>(&self, values: &[T], shape: &[usize]) -> Result<Buffer> {
        let upload = self.client.buffer_from_host(values, shape, &self.device);
        upload.map_err(|cause| match cause.is_out_of_memory() {
            true => {
                let bytes = [Some(size_of_val(values) as u64), self.available_memory()];
                Error::out_of_memory(format!("copying {shape:?} to the device"), bytes, KNOBS, cause)
            }
            false => Error::device(format!("copying {shape:?} to the device"))(cause),
        })
    }
}

/// A compiled program.
pub struct Program {
    name: String,
    executable: LoadedExecutable,
    runtime: Runtime,
}

impl std::fmt::Debug for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Program({})", self.name)
    }
}

impl Program {
    /// Runs the program and returns its results. It returns after the launch: a failure of the run is an error of reading what it
    /// returns.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::TimedOut`] where an earlier wait for the device was given up, [`Error::Device`].
    pub fn run(&self, arguments: Vec<Argument<'_>>) -> Result<Vec<Buffer>> {
        let outputs = self.executable.execute_donating(vec![arguments]);
        let mut outputs = outputs.map_err(|cause| self.failed(cause))?;
        Ok(outputs.pop().unwrap_or_default())
    }

    /// A failure of a run.
    fn failed(&self, cause: pjrt::Error) -> Error {
        let operation = format!("running `{}`", self.name);
        if !cause.is_out_of_memory() {
            return Error::device(operation)(cause);
        }
        let stats = self.executable.executable().memory_stats();
        let bytes = stats.map(|stats| stats.argument + stats.output + stats.temp - stats.alias);
        let needed = bytes.ok().and_then(|bytes| u64::try_from(bytes).ok());
        Error::out_of_memory(operation, [needed, self.runtime.available_memory()], knobs_of(&self.name), cause)
    }

    /// [`Program::run`] of a program with one result.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn run_one(&self, arguments: Vec<Argument<'_>>) -> Result<Buffer> {
        let nothing = pjrt::Error::Nothing { operation: "PJRT_LoadedExecutable_Execute" };
        self.run(arguments)?.pop().ok_or(nothing).map_err(Error::device(format!("running `{}`", self.name)))
    }

    /// Its name in profiles.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// Copies a buffer to the host.
pub(crate) fn read<T: Element>(buffer: &Buffer, what: &str) -> Result<Vec<T>> {
    buffer.to_vec().map_err(Error::device(format!("reading {what} from the device")))
}

/// Programs by what distinguishes them, each compiled when it is first asked for.
#[derive(Debug)]
pub(crate) struct Programs<K> {
    compiled: HashMap<K, Arc<Program>>,
}

impl<K: Hash + Eq> Programs<K> {
    pub(crate) fn new() -> Self {
        Self { compiled: HashMap::new() }
    }

    /// The program of `key`; `build` makes its module.
    pub(crate) fn get(
        &mut self,
        runtime: &Runtime,
        key: K,
        build: impl FnOnce(&K) -> Result<Module>,
    ) -> Result<Arc<Program>> {
        if let Some(program) = self.compiled.get(&key) {
            return Ok(program.clone());
        }
        let program = Arc::new(runtime.compile(&build(&key)?)?);
        self.compiled.insert(key, program.clone());
        Ok(program)
    }
}

/// The module that `builder` has built.
pub(crate) fn finish(builder: stablehlo::Builder, name: &str, results: &[(&str, &stablehlo::Value)]) -> Result<Module> {
    builder.finish(name, results).map_err(|source| Error::Program { program: name.into(), source })
}
