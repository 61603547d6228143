//! Backends for the variants of a configuration.

use crate::error::Result;
use grpo_backend_tpu::aot::Variant;
use grpo_backend_tpu::plugins::{self, Kind};
use grpo_bench::config::{BackendName, BenchConfig, VariantConfig};
use grpo_bench::{cpu, pjrt as bench_pjrt};
use grpo_core::{Backend, Dtype, Error};
use grpo_pjrt::Client;
use std::collections::HashMap;
use std::path::PathBuf;

/// Opens backends. Devices are opened once.
#[derive(Default)]
pub(super) struct Devices {
    plugin: Option<PathBuf>,
    clients: HashMap<&'static str, Client>,
}

impl Devices {
    pub(super) fn new(plugin: Option<PathBuf>) -> Self {
        Self { plugin, clients: HashMap::new() }
    }

    /// Returns the backend of the variant called `name`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a key that the backend does not have, as in a benchmark; [`Error::Backend`] if there is
    /// no plugin or no device.
    pub(super) fn open(
        &mut self,
        config: &BenchConfig,
        name: &str,
        settings: &VariantConfig,
        variant: &Variant,
    ) -> Result<Box<dyn Backend>> {
        // No time is measured.
        let settings = VariantConfig { profile: false, ..settings.clone() };
        let backend = config.backend(name)?;
        let BackendName::Pjrt(kind) = backend else { return Ok(Box::new(cpu::backend(&settings, variant)?)) };
        let numerics = variant.numerics;
        for (is_set, what, instead) in [
            (
                numerics.gradients != Dtype::F32,
                "numerics.gradients in a gradient check",
                "gradients accumulated in bf16 stay on the device: check the variant with f32",
            ),
            (
                numerics.logits != Dtype::F32 && !numerics.exact_ratio,
                "rounded logits without numerics.exact_ratio in a gradient check",
                "the compiler decides when values are rounded: check the variant with it",
            ),
        ] {
            if is_set {
                let (backend, what, instead) = (backend.to_string(), what.into(), instead.into());
                return Err(Error::Unsupported { backend, what, instead }.into());
            }
        }
        Ok(Box::new(bench_pjrt::backend(kind, self.client(kind)?, &settings, variant)?))
    }

    fn client(&mut self, kind: Kind) -> Result<Client> {
        if let Some(client) = self.clients.get(kind.name()) {
            return Ok(client.clone());
        }
        let client = plugins::client(kind, self.plugin.as_deref(), &[])?;
        self.clients.insert(kind.name(), client.clone());
        Ok(client)
    }
}
