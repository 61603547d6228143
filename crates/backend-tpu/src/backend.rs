//! The backend `pjrt:<platform>`: a client, a mesh of its devices, and the compilation of programs for them.

use crate::aot::Variant;
use crate::devices::{Devices, MeshCompiler};
use crate::error::{NAME, unsupported};
use crate::plan::PjrtPlan;
use crate::plugins::{self, Kind};
use crate::program::{Mesh, MosaicBlocks, Numerics, Pass, Program, Spec};
use grpo_core::error::Result;
use grpo_core::{Backend, LossPlan, PlanRequest};
use pjrt::{Client, CompileCache, OptionValue};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The loss on the devices of a PJRT client. See the [crate documentation](crate) for an example.
#[derive(Clone)]
pub struct PjrtBackend {
    name: String,
    compiler: MeshCompiler,
    numerics: Numerics,
    mosaic: Option<MosaicBlocks>,
}

impl PjrtBackend {
    /// Opens the devices of `kind` with the plugin at `path`, or the one that [`plugins::find`] finds, and runs on the
    /// first device.
    ///
    /// # Errors
    /// [`grpo_core::Error::Backend`] if there is no plugin (with the command that installs it), or no device.
    pub fn open(kind: Kind, path: Option<&Path>) -> Result<Self> {
        Self::new(kind, plugins::client(kind, path, &[])?)
    }

    /// Runs on the client's first device.
    ///
    /// # Errors
    /// [`grpo_core::Error::Unsupported`] if the client has no device.
    pub fn new(kind: Kind, client: Client) -> Result<Self> {
        let name = format!("{NAME}:{}", kind.name());
        let (devices, mesh) = (Devices { list: vec![], client }, Mesh::default());
        let compiler = MeshCompiler { kind, devices, mesh, cache: None, flags: vec![], recent: Arc::default() };
        Self { name, compiler, numerics: Numerics::default(), mosaic: None }.with_mesh(mesh)
    }

    /// Shards tokens and vocabulary over the client's first devices.
    ///
    /// # Errors
    /// [`grpo_core::Error::Unsupported`] if the client has too few devices.
    pub fn with_mesh(mut self, mesh: Mesh) -> Result<Self> {
        let there = self.compiler.devices.client.addressable_devices();
        if mesh.devices() == 0 || mesh.devices() > there.len() {
            return Err(unsupported(
                &format!("a mesh of {} x {} devices", mesh.data, mesh.vocab),
                &format!("{} are here", there.len()),
            ));
        }
        self.compiler.devices.list = there[..mesh.devices()].to_vec();
        self.compiler.mesh = mesh;
        Ok(self)
    }

    /// Sets the roundings; by default, nothing is rounded.
    pub fn with_numerics(mut self, numerics: Numerics) -> Self {
        self.numerics = numerics;
        self
    }

    /// Runs `logits` with the Mosaic TPU kernels.
    ///
    /// # Errors
    /// [`grpo_core::Error::Unsupported`] on devices other than TPUs.
    pub fn with_mosaic(mut self, blocks: MosaicBlocks) -> Result<Self> {
        if self.compiler.kind != Kind::Tpu {
            let what = format!("TPU kernels on `{}`", self.name);
            return Err(unsupported(&what, "leave `mosaic` out: the plain program gives the same numbers"));
        }
        self.mosaic = Some(blocks);
        Ok(self)
    }

    /// Caches executables in `directory`, for this and later processes.
    pub fn with_compile_cache(mut self, directory: impl Into<PathBuf>) -> Self {
        self.compiler.cache = Some(CompileCache::new(directory));
        self
    }

    /// Returns the client, to run other programs on its devices.
    pub fn client(&self) -> &Client {
        &self.compiler.devices.client
    }

    /// Like [`Backend::plan`], but returns the concrete type, whose tensors can stay on the devices.
    ///
    /// # Errors
    /// As [`Backend::plan`].
    pub fn plan_on_device(&self, request: &PlanRequest) -> Result<PjrtPlan> {
        self.plan_program(request, Pass::Gradient, |spec| spec.program(Pass::Gradient))
    }

    /// Like [`PjrtBackend::plan_on_device`], for a plan whose pass `pass` runs the program that `build` returns for a
    /// blocking; tiles shrink until it fits the budget. The program has the arguments of the pass; its results that are
    /// not results of the pass are dropped.
    ///
    /// # Errors
    /// As [`Backend::plan`]; the errors of `build`.
    pub fn plan_program(
        &self,
        request: &PlanRequest,
        pass: Pass,
        build: impl Fn(&Spec) -> Result<Program>,
    ) -> Result<PjrtPlan> {
        let (&Self { numerics, mosaic, .. }, mesh) = (self, self.compiler.mesh);
        let variant = Variant { request: request.clone(), numerics, mosaic, mesh, pass, build: Spec::program };
        PjrtPlan::new(&self.compiler, variant, build)
    }

    /// Sets a compiler flag by its name, without dashes.
    pub fn with_compile_flag(mut self, flag: &str, value: impl Into<OptionValue>) -> Self {
        self.compiler.flags.push((flag.into(), value.into()));
        self.compiler.recent = Arc::default();
        self
    }
}

impl std::fmt::Debug for PjrtBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, compiler, numerics, mosaic } = self;
        let MeshCompiler { devices, mesh, .. } = compiler;
        write!(f, "PjrtBackend({name}, {:?}, {mesh:?}, {numerics:?}, {mosaic:?})", devices.client)
    }
}

impl Backend for PjrtBackend {
    fn name(&self) -> &str {
        &self.name
    }

    fn plan(&self, request: &PlanRequest) -> Result<Box<dyn LossPlan>> {
        Ok(Box::new(self.plan_on_device(request)?))
    }

    fn compiles(&self) -> bool {
        true
    }
}
