//! The backend `pjrt:<platform>`: devices of a client, and the compilation of programs for them.

use crate::aot::Variant;
use crate::compiler::DeviceCompiler;
use crate::devices::Devices;
use crate::error::{NAME, unsupported};
use crate::plan::PjrtPlan;
use crate::plugins::{self, Kind};
use crate::program::{MeshShape, MosaicBlocks, Numerics, Pass, Program, Spec};
use grpo_core::error::Result;
use grpo_core::{Backend, LogitTransform, LossPlan, PlanRequest};
use grpo_pjrt::{Client, CompileCache, OptionValue};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The loss on the devices of a PJRT client. See the [crate documentation](crate) for an example.
#[derive(Clone)]
pub struct PjrtBackend {
    name: String,
    compiler: DeviceCompiler,
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
    /// [`grpo_core::Error::Backend`] if the client has no device.
    pub fn new(kind: Kind, client: Client) -> Result<Self> {
        let name = format!("{NAME}:{}", kind.name());
        let devices = Devices::first(kind, client)?;
        let compiler =
            DeviceCompiler { devices, mesh: MeshShape::default(), cache: None, flags: vec![], recent: Arc::default() };
        Ok(Self { name, compiler, numerics: Numerics::default(), mosaic: None })
    }

    /// Shards tokens and vocabulary over a mesh of the client's first devices, with any number of tokens and any
    /// vocabulary: shards are padded. XLA's partitioner (Shardy) adds the collectives.
    ///
    /// Inputs and gradients are sharded by `data` along the tokens and by `tensor` along the vocabulary. In the loops of
    /// `fused`, every device has all tokens and computes the logits of its part of the vocabulary, which is then sharded
    /// over all devices.
    ///
    /// ```no_run
    /// use grpo_backend_tpu::PjrtBackend;
    /// use grpo_backend_tpu::plugins::{self, Kind};
    /// use grpo_backend_tpu::program::MeshShape;
    ///
    /// // Eight virtual devices of the CPU.
    /// let client = plugins::client(Kind::Cpu, None, &[("cpu_device_count", 8.into())])?;
    /// let backend = PjrtBackend::new(Kind::Cpu, client)?.on_mesh(MeshShape { data: 2, tensor: 4 })?;
    /// # Ok::<(), grpo_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`grpo_core::Error::Config`] for an axis without devices; [`grpo_core::Error::Unsupported`] if the client has too
    /// few devices.
    pub fn on_mesh(mut self, mesh: MeshShape) -> Result<Self> {
        let devices = self.compiler.devices.on_mesh(&mesh.mesh()?)?;
        let processes = devices.processes().processes().len();
        if processes > 1 {
            return Err(grpo_core::Error::Unsupported {
                backend: self.name,
                what: format!("a mesh over the devices of {processes} processes"),
                instead: "a mesh of one process".into(),
            });
        }
        self.compiler.devices = devices;
        self.compiler.mesh = mesh;
        self.compiler.recent = Arc::default();
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
        if self.compiler.devices.kind() != Kind::Tpu {
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
        self.compiler.devices.client()
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
        PjrtPlan::new(&self.compiler, self.variant(request, pass), build)
    }

    /// Returns the program of `request` with the settings of this backend.
    fn variant(&self, request: &PlanRequest, pass: Pass) -> Variant {
        let (&Self { numerics, mosaic, .. }, mesh) = (self, self.compiler.mesh);
        Variant { request: request.clone(), numerics, mosaic, mesh, pass, build: Spec::program }
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
        let DeviceCompiler { devices, mesh, .. } = compiler;
        write!(f, "PjrtBackend({name}, {:?}, {mesh:?}, {numerics:?}, {mosaic:?})", devices.client())
    }
}

impl Backend for PjrtBackend {
    fn name(&self) -> &str {
        &self.name
    }

    fn plan(&self, request: &PlanRequest) -> Result<Box<dyn LossPlan>> {
        Ok(Box::new(self.plan_on_device(request)?))
    }

    /// Builds the program without compiling it.
    fn check(&self, request: &PlanRequest) -> Result<()> {
        self.variant(request, Pass::Gradient).spec()?.program(Pass::Gradient).map(drop)
    }

    fn applies(&self, _: LogitTransform) -> bool {
        true
    }

    fn compiles(&self) -> bool {
        true
    }
}
