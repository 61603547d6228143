//! Compiled executables.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::buffer::Buffer;
use crate::client::Client;
use crate::device::Device;
use crate::dtype::{ArrayType, DType};
use crate::error::{Error, Result};
use crate::ffi::{self, Launcher, Owned};
use crate::hlo::Collective;
use crate::value::{self, NamedValue};

/// A compiled executable, for devices that need not be present.
pub struct Executable {
    // Declared before `_topology`, because fields are dropped in order.
    handle: Owned<ffi::Executable>,
    _topology: Option<Arc<Owned<ffi::Topology>>>,
}

/// The memory of an executable on each device, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompiledMemoryStats {
    /// The bytes of code.
    pub generated_code: i64,
    /// The bytes of all arguments.
    pub argument: i64,
    /// The bytes of all outputs.
    pub output: i64,
    /// The bytes of outputs that reuse an argument's memory; included in both numbers above.
    pub alias: i64,
    /// The bytes of all other allocations of a run.
    pub temp: i64,
    /// The compiler's own peak, which may be defined differently; 0 if the plugin reports none.
    pub peak: i64,
    /// The same numbers for host memory: code, arguments, outputs, aliases and temporaries.
    pub host: [i64; 5],
}

/// A program in the compiler's own format, after optimisation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OptimizedProgram {
    /// `hlo` for a serialized `HloModuleProto`, `hlo_with_config` for a `HloModuleProtoWithConfig`, `mlir` for MLIR.
    pub format: String,
    /// The program in that format.
    pub code: Vec<u8>,
}

impl Executable {
    pub(crate) fn new(handle: Owned<ffi::Executable>, topology: Option<Arc<Owned<ffi::Topology>>>) -> Self {
        Executable { handle, _topology: topology }
    }

    /// Returns the name of the compiled module.
    pub fn name(&self) -> Result<String> {
        Ok(self.handle.ask(ffi::ExecutableName::new)?.name.text())
    }

    /// Returns the number of replicas.
    pub fn num_replicas(&self) -> Result<usize> {
        Ok(self.handle.ask(ffi::ExecutableNumReplicas::new)?.count)
    }

    /// Returns the number of partitions of each replica.
    pub fn num_partitions(&self) -> Result<usize> {
        Ok(self.handle.ask(ffi::ExecutableNumPartitions::new)?.count)
    }

    /// Returns the element type and shape of every parameter after compilation; for a partitioned program, of the
    /// shards. Returns `None` if the plugin's format does not contain them.
    pub fn parameters(&self) -> Result<Option<Vec<ArrayType>>> {
        Ok(self.optimized_program()?.module().and_then(|module| module.parameters()))
    }

    /// Returns the collectives after compilation. A collective in a loop is listed once. Returns `None` if the plugin's
    /// format does not contain them.
    pub fn collectives(&self) -> Result<Option<Vec<Collective>>> {
        Ok(self.optimized_program()?.module().map(|module| module.collectives()))
    }

    /// Returns the element type and shape of every output.
    pub fn outputs(&self) -> Result<Vec<ArrayType>> {
        let types = self.handle.ask(ffi::ExecutableOutputTypes::new)?;
        let dims = self.handle.ask(ffi::ExecutableOutputDims::new)?;
        let shape = |dims: &[i64]| dims.iter().map(|&dim| usize::try_from(dim).unwrap_or(0)).collect();
        let pairs = types.codes.get().iter().zip(dims.dims.get());
        pairs.map(|(&code, dims)| Ok(ArrayType { dtype: DType::from_raw(code)?, dims: shape(dims) })).collect()
    }

    /// Returns the memory that the executable needs on each device.
    pub fn memory_stats(&self) -> Result<CompiledMemoryStats> {
        let args = self.handle.ask(ffi::ExecutableMemoryStats::new)?;
        Ok(CompiledMemoryStats {
            generated_code: args.generated_code,
            argument: args.argument,
            output: args.output,
            alias: args.alias,
            temp: args.temp,
            peak: args.peak,
            host: [args.host_generated_code, args.host_argument, args.host_output, args.host_alias, args.host_temp],
        })
    }

    /// Returns the compiler's cost estimates by name: `flops`, `bytes accessed` and, for some plugins,
    /// `optimal_seconds`.
    ///
    /// A loop body counts once, for any number of iterations. A plugin without estimates returns an empty map, or an
    /// error that satisfies [`Error::is_unsupported`].
    pub fn cost_analysis(&self) -> Result<BTreeMap<String, f64>> {
        let args = self.handle.ask(ffi::ExecutableGetCostAnalysis::new)?;
        let number = |value| match value {
            NamedValue::Float(float) => Some(f64::from(float)),
            NamedValue::Int(int) => Some(int as f64),
            _ => None,
        };
        let properties = value::read(args.properties.get()).into_iter();
        Ok(properties.filter_map(|(name, value)| Some((name, number(value)?))).collect())
    }

    /// Serializes the executable in the plugin's own format, for [`Client::load`] on the same platform and version.
    pub fn serialize(&self) -> Result<Vec<u8>> {
        ffi::serialize(&self.handle)
    }

    /// Returns the program after optimisation.
    pub fn optimized_program(&self) -> Result<OptimizedProgram> {
        let (code, format) = ffi::optimized_program(&self.handle)?;
        Ok(OptimizedProgram { format, code })
    }
}

/// An argument of a run.
#[derive(Debug)]
pub enum Argument<'a> {
    /// Stays intact: if the program aliases an output to it, the device copies it.
    Borrowed(&'a Buffer),
    /// Is consumed: an output may reuse its memory.
    Donated(Buffer),
}

impl Argument<'_> {
    fn buffer(&self) -> &Buffer {
        match self {
            Argument::Borrowed(buffer) => buffer,
            Argument::Donated(buffer) => buffer,
        }
    }
}

impl<'a> From<&'a Buffer> for Argument<'a> {
    fn from(buffer: &'a Buffer) -> Self {
        Argument::Borrowed(buffer)
    }
}

impl From<Buffer> for Argument<'_> {
    fn from(buffer: Buffer) -> Self {
        Argument::Donated(buffer)
    }
}

/// A compiled executable that is loaded on the devices of a client.
pub struct LoadedExecutable {
    // Declared before `client`, because fields are dropped in order.
    launcher: Launcher,
    executable: Executable,
    client: Client,
    /// The types of the parameters. They are checked here, because plugins compare sizes only.
    parameters: Option<Vec<ArrayType>>,
    /// `true` if it runs on several devices, in this process or in others.
    is_collective: bool,
}

impl LoadedExecutable {
    pub(crate) fn new(client: Client, loaded: Owned<ffi::LoadedExecutable>) -> Result<Self> {
        let (launcher, executable) = Launcher::new(loaded)?;
        let executable = Executable::new(executable, None);
        let parameters = executable.parameters().ok().flatten();
        let is_collective = executable.num_replicas()? * executable.num_partitions()? > 1;
        Ok(LoadedExecutable { launcher, executable, client, parameters, is_collective })
    }

    /// Returns the executable's metadata.
    pub fn executable(&self) -> &Executable {
        &self.executable
    }

    /// Returns the client whose devices run it.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Returns the devices of this process that run it, in the order of the argument lists.
    pub fn devices(&self) -> Result<Vec<Device>> {
        let args = self.launcher.loaded().ask(ffi::LoadedAddressableDevices::new)?;
        let known = self.client.addressable_devices();
        let find = |&device: &ffi::Ref<'_, ffi::Device>| known.iter().find(|each| each.handle().is(device)).cloned();
        Ok(args.devices.get().iter().filter_map(find).collect())
    }

    /// Runs the executable once on every device and returns its outputs, `[devices][outputs]`.
    ///
    /// `arguments` are `[devices][args]`, for [`LoadedExecutable::devices`], and stay intact. If the executable runs on devices of several
    /// processes, every process calls it, in the same order as other such executables. The call returns after the launch: errors of the run appear
    /// when an output is awaited or read (or here, if there are no outputs).
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if an argument's type or shape differs from the parameter's; [`Error::Foreign`] for an
    /// argument of another client; [`Error::Api`] for errors of the plugin, such as a wrong number of arguments or
    /// devices.
    pub fn execute(&self, arguments: &[&[&Buffer]]) -> Result<Vec<Vec<Buffer>>> {
        let borrowed = arguments.iter().map(|list| list.iter().map(|&buffer| Argument::Borrowed(buffer)).collect());
        self.execute_donating(borrowed.collect())
    }

    /// Like [`LoadedExecutable::execute`], but consumes the buffers that are [`Argument::Donated`]. A position must be
    /// donated on every device or on none.
    pub fn execute_donating(&self, arguments: Vec<Vec<Argument<'_>>>) -> Result<Vec<Vec<Buffer>>> {
        let operation = "execute";
        if arguments.iter().flatten().any(|argument| !argument.buffer().client().is(&self.client)) {
            return Err(Error::Foreign { operation, what: "argument" });
        }
        arguments.iter().try_for_each(|list| self.check_types(list))?;
        let not_donated = not_donated(&arguments)?;
        let handles: Vec<Vec<_>> =
            arguments.iter().map(|list| list.iter().map(|argument| argument.buffer().handle()).collect()).collect();
        let outputs = self.launch(&handles, &not_donated)?;
        // Donated buffers are dropped here; the plugin keeps their memory as long as the run needs it.
        drop(arguments);
        let buffers = |list: Vec<_>| list.into_iter().map(|handle| Buffer::new(self.client.clone(), handle)).collect();
        outputs.into_iter().map(buffers).collect()
    }

    fn launch(
        &self,
        arguments: &[Vec<ffi::Ref<'_, ffi::Buffer>>],
        not_donated: &[i64],
    ) -> Result<Vec<Vec<Owned<ffi::Buffer>>>> {
        #[cfg(feature = "simulated")]
        if let Some(process) = self.client.simulated() {
            return process.launch(&self.client, &self.launcher, arguments, not_donated);
        }
        let _in_order = self.is_collective.then(|| self.client.launch_in_order());
        self.launcher.launch(arguments, not_donated)
    }

    /// Plugins compare sizes at most: they would accept an `i32` for an `f32`. A wrong number of arguments is left to
    /// the plugin.
    fn check_types(&self, arguments: &[Argument<'_>]) -> Result<()> {
        let parameters = self.parameters.iter().filter(|parameters| parameters.len() == arguments.len()).flatten();
        for (index, (expected, argument)) in parameters.zip(arguments).enumerate() {
            let found = argument.buffer().array_type();
            if found != expected {
                return Err(Error::Argument { index, expected: expected.clone(), found: found.clone() });
            }
        }
        Ok(())
    }
}

/// Returns the positions of the arguments that stay intact.
fn not_donated(arguments: &[Vec<Argument<'_>>]) -> Result<Vec<i64>> {
    let Some((first, rest)) = arguments.split_first() else { return Ok(Vec::new()) };
    let donated = |argument: &Argument<'_>| matches!(argument, Argument::Donated(_));
    for list in rest {
        if let Some(index) = first.iter().zip(list).position(|(a, b)| donated(a) != donated(b)) {
            return Err(Error::MixedDonation { index });
        }
    }
    Ok(first.iter().enumerate().filter(|(_, argument)| !donated(argument)).map(|(index, _)| index as i64).collect())
}
