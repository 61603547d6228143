//! A device, its compiler, and compiled programs.

use crate::error::{Error, Result};
use backend_tpu::compile_options::options_for_decoder;
use backend_tpu::plugins::{self, Kind};
use models::MemoryTable;
use pjrt::{
    Argument, Buffer, CacheOutcome, Client, CompileCache, CompileOptions, Device, Element, LoadedExecutable,
    NamedValue, OptionValue,
};
use stablehlo::{Builder, Module, Value};
use std::collections::HashMap;
use std::hash::Hash;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A device of a PJRT plugin and the plugin's compiler. Clones share the client.
#[derive(Clone, Debug)]
pub struct Runtime {
    kind: Kind,
    client: Client,
    device: Device,
    options: CompileOptions,
    cache: Option<CompileCache>,
}

impl Runtime {
    /// Opens the first device of `kind` with the plugin at `path`; without a path, with the plugin that [`plugins::find`] finds.
    ///
    /// # Errors
    /// [`Error::Loss`] if there is no plugin (with the command that installs it), or if it opens no device.
    pub fn open(kind: Kind, path: Option<&Path>) -> Result<Self> {
        Self::new(kind, plugins::client(kind, path, &[])?)
    }

    /// Uses the first device of an open client.
    ///
    /// # Errors
    /// [`Error::Loss`] if the client has no device.
    pub fn new(kind: Kind, client: Client) -> Result<Self> {
        let device = client.addressable_devices().first().cloned().ok_or_else(|| grpo_core::Error::Backend {
            backend: format!("pjrt:{}", kind.name()),
            message: "the plugin has no device on this machine".into(),
        })?;
        Ok(Self { kind, client, device, options: options_for_decoder(kind), cache: None })
    }

    /// Caches compiled programs in `directory`, for this and later processes.
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

    /// Returns the kind of the device.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the client of the device.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Returns the device's name in messages and configurations.
    fn name(&self) -> String {
        format!("pjrt:{}", self.kind.name())
    }

    /// Returns the free bytes on the device; for XLA's CPU plugin, the free memory of this machine. `None` if the plugin does not report
    /// it.
    pub fn available_memory(&self) -> Option<u64> {
        if self.kind == Kind::Cpu {
            return models::available_memory();
        }
        let stats = self.device.memory_stats().ok()?;
        u64::try_from(stats.bytes_limit?.saturating_sub(stats.bytes_in_use)).ok()
    }

    /// Checks that `table` fits into the free memory of the device. If the plugin does not report free memory, only a later allocation can
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
                // The compiler reports its own memory limit, which differs from the free memory.
                Err(Error::out_of_memory(format!("compiling `{name}`"), [None; 2], Some(&name), cause))
            }
            Err(cause @ (pjrt::Error::Api { .. } | pjrt::Error::MissingFunction { .. })) => {
                Err(Error::Compile { program: name, device: self.name(), plugin: self.versions(), cause: cause.into() })
            }
            Err(cause) => {
                Err(Error::Device { operation: format!("compiling `{name}` for {}", self.name()), cause: cause.into() })
            }
        }
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

    /// Copies `values`, row-major with `shape`, to the device.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::TimedOut`], [`Error::Device`].
    pub fn upload<T: Element>(&self, values: &[T], shape: &[usize]) -> Result<Buffer> {
        let upload = self.client.buffer_from_host(values, shape, &self.device);
        upload.map_err(|cause| match cause.is_out_of_memory() {
            true => {
                let bytes = [Some(size_of_val(values) as u64), self.available_memory()];
                Error::out_of_memory(format!("copying {shape:?} to the device"), bytes, None, cause)
            }
            false => Error::device(format!("copying {shape:?} to the device"))(cause),
        })
    }
}

/// A compiled program and its runtime.
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
    /// Launches the program and returns its results before it finishes: if it fails later, reading a result fails.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::TimedOut`] if an earlier wait for the device timed out, [`Error::Device`].
    pub fn run(&self, arguments: Vec<Argument<'_>>) -> Result<Vec<Buffer>> {
        let outputs = self.executable.execute_donating(vec![arguments]);
        let mut outputs = outputs.map_err(|cause| self.failed(cause))?;
        Ok(outputs.pop().unwrap_or_default())
    }

    /// Converts an error of a run.
    fn failed(&self, cause: pjrt::Error) -> Error {
        let operation = format!("running `{}`", self.name);
        if !cause.is_out_of_memory() {
            return Error::device(operation)(cause);
        }
        let stats = self.executable.executable().memory_stats();
        let bytes = stats.map(|stats| stats.argument + stats.output + stats.temp - stats.alias);
        let needed = bytes.ok().and_then(|bytes| u64::try_from(bytes).ok());
        Error::out_of_memory(operation, [needed, self.runtime.available_memory()], Some(&self.name), cause)
    }

    /// Runs a program that has one result.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn run_one(&self, arguments: Vec<Argument<'_>>) -> Result<Buffer> {
        let nothing = pjrt::Error::Nothing { operation: "PJRT_LoadedExecutable_Execute" };
        self.run(arguments)?.pop().ok_or(nothing).map_err(Error::device(format!("running `{}`", self.name)))
    }
}

/// Copies a buffer to the host.
pub(crate) fn read<T: Element>(buffer: &Buffer, what: &str) -> Result<Vec<T>> {
    buffer.to_vec().map_err(Error::device(format!("reading {what} from the device")))
}

/// Compiled programs by key, compiled on first use.
#[derive(Debug)]
pub(crate) struct Programs<K> {
    compiled: HashMap<K, Arc<Program>>,
}

impl<K: Hash + Eq> Programs<K> {
    pub(crate) fn new() -> Self {
        Self { compiled: HashMap::new() }
    }

    /// Returns the program of `key`; `build` creates its module.
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

/// Finishes the module of `builder`.
pub(crate) fn finish<'a>(
    builder: Builder,
    name: &str,
    results: impl IntoIterator<Item = (&'a str, &'a Value)>,
) -> Result<Module> {
    let results: Vec<(&str, &Value)> = results.into_iter().collect();
    builder.finish(name, &results).map_err(program_error(name))
}

/// Returns results of a program without names.
pub(crate) fn unnamed<'a>(values: impl IntoIterator<Item = &'a Value>) -> impl Iterator<Item = (&'a str, &'a Value)> {
    values.into_iter().map(|value| ("", value))
}

/// Returns the error of a program that cannot be built.
pub(crate) fn program_error(program: &str) -> impl Fn(stablehlo::Error) -> Error {
    move |source| Error::Program { program: program.into(), source }
}
