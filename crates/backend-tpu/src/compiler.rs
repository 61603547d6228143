//! The compiler of a backend's programs.

use crate::compile_options;
use crate::devices::Devices;
use crate::error::failed;
use crate::program::MeshShape;
use grpo_core::error::Result;
use grpo_pjrt::{CompileCache, LoadedExecutable, OptionValue};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// Compiles programs for the devices of a mesh, and caches the most recent executables.
#[derive(Clone)]
pub(crate) struct DeviceCompiler {
    pub(crate) devices: Devices,
    pub(crate) mesh: MeshShape,
    pub(crate) cache: Option<CompileCache>,
    /// Flags in addition to [`compile_options`], by their names without dashes.
    pub(crate) flags: Vec<(String, OptionValue)>,
    pub(crate) recent: Arc<Mutex<VecDeque<Recent>>>,
}

/// A program's text and its executable.
type Recent = (String, Arc<LoadedExecutable>);

/// The number of cached executables, for plans that return to the same shapes.
const RECENT: usize = 8;

impl DeviceCompiler {
    /// Compiles `text`, unless its executable is cached.
    pub(crate) fn compile(&self, text: String) -> Result<Arc<LoadedExecutable>> {
        // After a panic elsewhere, the list is still valid: it is changed in one step.
        let recent = || self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, executable)) = recent().iter().find(|(known, _)| *known == text) {
            return Ok(executable.clone());
        }
        let (client, count) = (self.devices.client(), self.devices.list().len());
        let mut options = self.devices.options(compile_options::options_for(self.devices.kind(), count))?;
        for (flag, value) in &self.flags {
            options = options.with(flag, value.clone());
        }
        let executable = match &self.cache {
            Some(cache) => cache.compile(client, &text, &options).map(|(executable, _)| executable),
            None => client.compile(&text, &options),
        };
        let executable = Arc::new(executable.map_err(failed)?);
        let mut recent = recent();
        recent.truncate(RECENT - 1);
        recent.push_front((text, executable.clone()));
        Ok(executable)
    }
}
