//! The backend `pjrt:<platform>`.

use crate::aot::What;
use crate::plan::{Devices, PjrtPlan};
use crate::plugins::{self, Kind};
use crate::program::{Mesh, MosaicBlocks, Numerics};
use crate::{compile_options, failed, unsupported};
use grpo_core::error::Result;
use grpo_core::{Backend, LossPlan, PlanRequest};
use pjrt::{Client, CompileCache, LoadedExecutable, OptionValue};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The loss on the devices of a PJRT client.
#[derive(Clone)]
pub struct PjrtBackend {
    name: String,
    kind: Kind,
    pub(crate) devices: Devices,
    pub(crate) mesh: Mesh,
    pub(crate) numerics: Numerics,
    pub(crate) mosaic: Option<MosaicBlocks>,
    cache: Option<CompileCache>,
    flags: Vec<(String, OptionValue)>,
    recent: Arc<Mutex<VecDeque<Recent>>>,
}

/// A program's text and what was compiled from it.
type Recent = (String, Arc<LoadedExecutable>);

/// Compiled programs that a backend keeps, for plans that come back to the same shapes.
const RECENT: usize = 8;

impl PjrtBackend {
    /// Opens the devices of `kind` with the plugin at `path`, or the one that [`plugins::find`] finds, and runs on the
    /// first of them.
    ///
    /// # Errors
    /// [`grpo_core::Error::Backend`] when there is no plugin (with the command that installs it), or no device.
    pub fn open(kind: Kind, path: Option<&Path>) -> Result<Self> {
        Self::new(kind, plugins::client(kind, path, &[])?)
    }

    /// Runs on the client's first device.
    ///
    /// # Errors
    /// [`grpo_core::Error::Unsupported`] when the client has no device.
    pub fn new(kind: Kind, client: Client) -> Result<Self> {
        let name = format!("{}:{}", crate::NAME, kind.name());
        let devices = Devices { list: vec![], client };
        let (mesh, numerics) = (Mesh::default(), Numerics::default());
        let (flags, recent) = (vec![], Arc::default());
        Self { name, kind, devices, mesh, numerics, mosaic: None, cache: None, flags, recent }.with_mesh(mesh)
    }

    /// Splits tokens and vocabulary over the client's first devices.
    ///
    /// # Errors
    /// [`grpo_core::Error::Unsupported`] when it has too few.
    pub fn with_mesh(mut self, mesh: Mesh) -> Result<Self> {
        let there = self.devices.client.addressable_devices();
        if mesh.devices() == 0 || mesh.devices() > there.len() {
            return Err(unsupported(
                &format!("a mesh of {} x {} devices", mesh.data, mesh.vocab),
                &format!("{} are here", there.len()),
            ));
        }
        self.devices.list = there[..mesh.devices()].to_vec();
        self.mesh = mesh;
        Ok(self)
    }

    /// Rounds as given. The default rounds nothing.
    pub fn with_numerics(mut self, numerics: Numerics) -> Self {
        self.numerics = numerics;
        self
    }

    /// Runs `logits` with our TPU kernels.
    ///
    /// # Errors
    /// [`grpo_core::Error::Unsupported`] on anything but a TPU.
    pub fn with_mosaic(mut self, blocks: MosaicBlocks) -> Result<Self> {
        if self.kind != Kind::Tpu {
            let what = format!("TPU kernels on `{}`", self.name);
            return Err(unsupported(&what, "leave `mosaic` out: the plain program gives the same numbers"));
        }
        self.mosaic = Some(blocks);
        Ok(self)
    }

    /// Keeps compiled programs in `directory`, for this and later processes.
    pub fn with_compile_cache(mut self, directory: impl Into<PathBuf>) -> Self {
        self.cache = Some(CompileCache::new(directory));
        self
    }

    /// The client, for whatever else is to run on its devices.
    pub fn client(&self) -> &Client {
        &self.devices.client
    }

    /// [`Backend::plan`] as the type it is, whose tensors can stay on the devices.
    ///
    /// # Errors
    /// As [`Backend::plan`].
    pub fn plan_on_device(&self, request: &PlanRequest) -> Result<PjrtPlan> {
        self.plan_program(request, What::Gradient)
    }

    /// As [`PjrtBackend::plan_on_device`], with `what` as the program that is compiled and fitted into the budget. A plan of
    /// [`What::Materialised`] or [`What::Bare`] has no other: it is there to be measured.
    ///
    /// # Errors
    /// As [`Backend::plan`].
    pub fn plan_program(&self, request: &PlanRequest, what: What) -> Result<PjrtPlan> {
        PjrtPlan::new(self, request, what)
    }

    /// Sets a flag of the compiler, by its name without dashes.
    pub fn with_compile_flag(mut self, flag: &str, value: impl Into<OptionValue>) -> Self {
        self.flags.push((flag.into(), value.into()));
        self.recent = Arc::default();
        self
    }

    /// Compiles `text`, unless that was done a short while ago.
    pub(crate) fn compile(&self, text: String) -> Result<Arc<LoadedExecutable>> {
        // A panic elsewhere leaves the list whole: it is changed in one step.
        let recent = || self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, executable)) = recent().iter().find(|(known, _)| *known == text) {
            return Ok(executable.clone());
        }
        let mut options = compile_options::options_for(self.kind, self.mesh);
        // Not the order that the plugin would choose: the mesh's, in which tensors are sent.
        let ids = self.devices.list.iter().map(|device| Ok(vec![i64::from(device.description()?.id)]));
        options.device_assignment = Some(ids.collect::<pjrt::Result<_>>().map_err(failed)?);
        for (flag, value) in &self.flags {
            options = options.with(flag, value.clone());
        }
        let executable = match &self.cache {
            Some(cache) => cache.compile(&self.devices.client, &text, &options).map(|(executable, _)| executable),
            None => self.devices.client.compile(&text, &options),
        };
        let executable = Arc::new(executable.map_err(failed)?);
        let mut recent = recent();
        recent.truncate(RECENT - 1);
        recent.push_front((text, executable.clone()));
        Ok(executable)
    }
}

impl std::fmt::Debug for PjrtBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, devices, mesh, numerics, mosaic, .. } = self;
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
