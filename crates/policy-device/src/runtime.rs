//! A device, the compiler of its platform, and the programs that were compiled for it.

use crate::error::{Error, Result};
use backend_tpu::compile_options::options_for_decoder;
use backend_tpu::plugins::{self, Kind};
use pjrt::{Argument, Buffer, Client, CompileCache, Device, Element, LoadedExecutable};
use stablehlo::Module;
use std::collections::HashMap;
use std::hash::Hash;
use std::path::{Path, PathBuf};
use std::sync::Arc;

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
        Ok(Self { kind, client, device, cache: None })
    }

    /// Keeps compiled programs in `directory`, for this and later processes.
    #[must_use]
    pub fn with_compile_cache(mut self, directory: impl Into<PathBuf>) -> Self {
        self.cache = Some(CompileCache::new(directory));
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

    /// Compiles `module`, or takes it from the compile cache.
    ///
    /// # Errors
    /// [`Error::Device`] with what the compiler says.
    pub fn compile(&self, module: &Module) -> Result<Program> {
        let (name, text) = (module.name.clone(), module.to_string());
        let options = options_for_decoder(self.kind);
        let compiled = match &self.cache {
            Some(cache) => cache.compile(&self.client, &text, &options).map(|(executable, _)| executable),
            None => self.client.compile(&text, &options),
        };
        tracing::debug!(program = name, bytes = text.len(), "compiled");
        let executable = compiled.map_err(Error::device(format!("compiling `{name}` for {}", self.kind.name())))?;
        Ok(Program { name, executable })
    }

    /// Copies `values`, row-major of `shape`, to the device.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn upload<T: Element>(&self, values: &[T], shape: &[usize]) -> Result<Buffer> {
        let upload = self.client.buffer_from_host(values, shape, &self.device);
        upload.map_err(|source| Error::Device { operation: format!("copying {shape:?} to the device"), source })
    }
}

/// A compiled program.
pub struct Program {
    name: String,
    executable: LoadedExecutable,
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
    /// [`Error::Device`].
    pub fn run(&self, arguments: Vec<Argument<'_>>) -> Result<Vec<Buffer>> {
        let outputs = self.executable.execute_donating(vec![arguments]);
        let mut outputs = outputs.map_err(Error::device(format!("running `{}`", self.name)))?;
        Ok(outputs.pop().unwrap_or_default())
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
