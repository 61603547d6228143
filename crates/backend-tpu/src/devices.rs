//! The devices of a mesh, and the compiler of their platform.

use crate::compile_options;
use crate::error::failed;
use crate::plugins::Kind;
use crate::program::Mesh;
use grpo_core::error::Result;
use pjrt::{Client, CompileCache, Device, LoadedExecutable, OptionValue};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// The devices of a mesh, in its order.
#[derive(Clone, Debug)]
pub(crate) struct Devices {
    pub(crate) list: Vec<Device>,
    pub(crate) client: Client,
}

/// Compiles programs for the devices of a mesh, and caches the most recent executables.
#[derive(Clone)]
pub(crate) struct MeshCompiler {
    pub(crate) kind: Kind,
    pub(crate) devices: Devices,
    pub(crate) mesh: Mesh,
    pub(crate) cache: Option<CompileCache>,
    /// Flags in addition to [`compile_options`], by their names without dashes.
    pub(crate) flags: Vec<(String, OptionValue)>,
    pub(crate) recent: Arc<Mutex<VecDeque<Recent>>>,
}

/// A program's text and its executable.
type Recent = (String, Arc<LoadedExecutable>);

/// The number of cached executables, for plans that return to the same shapes.
const RECENT: usize = 8;

impl MeshCompiler {
    /// Compiles `text`, unless its executable is cached.
    pub(crate) fn compile(&self, text: String) -> Result<Arc<LoadedExecutable>> {
        // After a panic elsewhere, the list is still valid: it is changed in one step.
        let recent = || self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, executable)) = recent().iter().find(|(known, _)| *known == text) {
            return Ok(executable.clone());
        }
        let mut options = compile_options::options_for(self.kind, self.mesh);
        // The order of the mesh, in which tensors are sent, instead of the plugin's default.
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
