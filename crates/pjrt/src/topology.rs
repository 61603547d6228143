//! Descriptions of devices that need not be present, to compile for them.

use std::sync::Arc;

use crate::compile_options::CompileOptions;
use crate::compiling;
use crate::device::DeviceDescription;
use crate::error::{Error, Result};
use crate::executable::Executable;
use crate::ffi::{self, Args, Owned};
use crate::plugin::Plugin;
use crate::value::{self, Attributes, NamedValue};

/// A set of devices that need not be present. [`Topology::compile`] compiles for them.
pub struct Topology {
    handle: Arc<Owned<ffi::Topology>>,
}

impl Topology {
    pub(crate) fn new(plugin: Plugin, name: &str, options: &[(&str, NamedValue)]) -> Result<Self> {
        let options = value::write(options);
        let mut args = plugin.api().outputs(ffi::TopologyCreate::new(name.into(), options.as_slice().into()))?;
        let handle = args.topology.take(&ffi::Origin::new(plugin.api()));
        let handle = handle.ok_or(Error::Nothing { operation: ffi::TopologyCreate::NAME })?;
        Ok(Topology { handle: Arc::new(handle) })
    }

    /// Returns the kind of device: `cuda`, `tpu`.
    pub fn platform_name(&self) -> Result<String> {
        Ok(self.handle.api().outputs(ffi::TopologyPlatformName::new(self.handle.get()))?.name.text())
    }

    /// Returns the versions of the compiler.
    pub fn platform_version(&self) -> Result<String> {
        Ok(self.handle.api().outputs(ffi::TopologyPlatformVersion::new(self.handle.get()))?.version.text())
    }

    /// Returns descriptions of the devices.
    pub fn devices(&self) -> Result<Vec<DeviceDescription>> {
        let args = self.handle.api().outputs(ffi::TopologyDescriptions::new(self.handle.get()))?;
        args.descriptions.get().iter().map(|&each| DeviceDescription::read(self.handle.api(), each)).collect()
    }

    /// Returns the topology's attributes, such as its bounds.
    pub fn attributes(&self) -> Result<Attributes> {
        let args = self.handle.api().outputs(ffi::TopologyAttributes::new(self.handle.get()))?;
        Ok(value::read(args.attributes.get()))
    }

    /// Compiles StableHLO, as text or as bytecode, for these devices. The result cannot run on this machine. The span `compile` of
    /// [`tracing`] is open during compilation (see the [front page](crate)).
    pub fn compile(&self, program: impl AsRef<[u8]>, options: &CompileOptions) -> Result<Executable> {
        let span = compiling::span(program.as_ref());
        let program = ffi::Program::mlir(program.as_ref());
        let options = options.encode();
        let mut args = ffi::TopologyCompile::new(self.handle.get(), &program, options.as_slice().into());
        self.handle.api().call(&mut args).inspect_err(|_| {
            span.record("failed", true);
        })?;
        drop(span);
        let executable = args.executable.take(self.handle.origin());
        let executable = executable.ok_or(Error::Nothing { operation: ffi::TopologyCompile::NAME })?;
        Ok(Executable::new(executable, Some(Arc::clone(&self.handle))))
    }
}
