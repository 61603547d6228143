//! Compiled programs, their arguments and results.

use crate::error::{Error, Result};
use crate::runtime::Runtime;
use grpo_backend_tpu::devices::{Argument, DeviceTensor, Layout, device_name};
use grpo_backend_tpu::plugins::Kind;
use grpo_pjrt::LoadedExecutable;
use grpo_stablehlo::Module;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

/// A compiled program and its runtime.
pub struct Program {
    name: String,
    executable: LoadedExecutable,
    runtime: Runtime,
    arguments: Vec<Layout>,
    results: Vec<Arc<Layout>>,
}

impl std::fmt::Debug for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Program({})", self.name)
    }
}

impl Program {
    pub(crate) fn new(name: String, module: &Module, executable: LoadedExecutable, runtime: &Runtime) -> Self {
        let (arguments, results) = (Layout::of_arguments(module), Layout::of_results(module));
        Self { name, executable, runtime: runtime.clone(), arguments, results }
    }

    /// Launches the program and returns its results before it finishes: if it fails later, reading a result fails.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::TimedOut`] if an earlier wait for the device timed out, [`Error::Layout`] for an argument that is
    /// sharded in another way than the program's parameter, [`Error::Device`].
    pub fn run(&self, arguments: Vec<Argument<'_>>) -> Result<Vec<DeviceTensor>> {
        let devices = self.runtime.devices().len();
        for (index, (expected, argument)) in self.arguments.iter().zip(&arguments).enumerate() {
            let found = argument.tensor().layout();
            if devices > 1 && !found.is(expected, devices) {
                let (expected, found) = (expected.to_string(), found.to_string());
                return Err(Error::Layout { program: self.name.clone(), index, expected, found });
            }
        }
        let results = self.runtime.owner().run(&self.executable, arguments, &self.results);
        results.map_err(|cause| self.failed(cause))
    }

    /// Converts an error of a run.
    fn failed(&self, cause: grpo_pjrt::Error) -> Error {
        let mut operation = format!("running `{}`", self.name);
        let devices = self.runtime.devices().len();
        if devices > 1 {
            operation += &format!(" on {devices} devices");
        }
        if !cause.is_out_of_memory() {
            return Error::device(operation)(cause);
        }
        let least = self.runtime.least_available();
        // Memory of XLA's CPU devices is shared.
        if let Some((_, device)) = least.filter(|_| devices > 1 && self.runtime.kind() != Kind::Cpu) {
            operation += &format!(", of which {} has the least free memory", device_name(device, devices));
        }
        let stats = self.executable.executable().memory_stats();
        let bytes = stats.map(|stats| stats.argument + stats.output + stats.temp - stats.alias);
        let needed = bytes.ok().and_then(|bytes| u64::try_from(bytes).ok());
        Error::out_of_memory(operation, [needed, least.map(|(bytes, _)| bytes)], Some(&self.name), cause)
    }

    /// Runs a program that has one result.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn run_one(&self, arguments: Vec<Argument<'_>>) -> Result<DeviceTensor> {
        let nothing = grpo_pjrt::Error::Nothing { operation: "PJRT_LoadedExecutable_Execute" };
        self.run(arguments)?.pop().ok_or(nothing).map_err(Error::device(format!("running `{}`", self.name)))
    }
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
