//! Descriptions of devices that need not be present, to compile for them.

use std::sync::Arc;

use crate::compile_options::CompileOptions;
use crate::compiling;
use crate::device::DeviceDescription;
use crate::error::Result;
use crate::executable::Executable;
use crate::ffi::{self, Args, Owned};
use crate::plugin::Plugin;
use crate::value::{self, NamedValue};

/// A set of devices that need not be present. [`Topology::compile`] compiles for them.
pub struct Topology {
    handle: Arc<Owned<ffi::Topology>>,
}

impl Topology {
    pub(crate) fn new(plugin: Plugin, name: &str, options: &[(&str, NamedValue)]) -> Result<Self> {
        let options = value::write(options);
        let mut args = plugin.api().outputs(ffi::TopologyCreate::new(name.into(), options.as_slice().into()))?;
        let handle = args.topology.given(&ffi::Origin::new(plugin.api()), ffi::TopologyCreate::NAME)?;
        Ok(Topology { handle: Arc::new(handle) })
    }

    /// Returns the kind of device: `cuda`, `tpu`.
    pub fn platform_name(&self) -> Result<String> {
        Ok(self.handle.ask(ffi::TopologyPlatformName::new)?.name.text())
    }

    /// Returns the versions of the compiler.
    pub fn platform_version(&self) -> Result<String> {
        Ok(self.handle.ask(ffi::TopologyPlatformVersion::new)?.version.text())
    }

    /// Returns descriptions of the devices.
    pub fn devices(&self) -> Result<Vec<DeviceDescription>> {
        let args = self.handle.ask(ffi::TopologyDescriptions::new)?;
        args.descriptions.get().iter().map(|&each| DeviceDescription::read(self.handle.api(), each)).collect()
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
        let executable = args.executable.given(self.handle.origin(), ffi::TopologyCompile::NAME)?;
        Ok(Executable::new(executable, Some(Arc::clone(&self.handle))))
    }
}
