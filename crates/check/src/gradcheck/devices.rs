//! Backends for the variants of a configuration.

use crate::error::Result;
use backend_cpu::{CpuBackend, Isa};
use backend_tpu::PjrtBackend;
use backend_tpu::aot::Variant;
use backend_tpu::plugins::{self, Kind};
use grpo_bench::config::{BackendName, BenchConfig, VariantConfig};
use grpo_bench::cpu::refuse_what_it_lacks;
use grpo_bench::inputs::Files;
use grpo_bench::protocol::{Job, Role};
use grpo_core::{Backend, Dtype, Error};
use pjrt::Client;
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
        let backend = config.backend(name)?;
        match backend {
            BackendName::Cpu => {
                let job = Job {
                    name: name.into(),
                    role: Role::Loss,
                    config: config.clone(),
                    variant: Some(name.into()),
                    backend: backend.to_string(),
                    plugin: None,
                    threads: settings.threads,
                    isa: settings.isa.clone(),
                    dlogits: settings.dlogits,
                    profile: false,
                    tensors: Files::new(),
                };
                refuse_what_it_lacks(&job, variant)?;
                let mut cpu = CpuBackend::with_threads(settings.threads)?;
                if let Some(isa) = settings.isa.as_deref().and_then(Isa::from_name) {
                    cpu = cpu.with_isa(isa);
                }
                if let Some(dlogits) = settings.dlogits {
                    cpu = cpu.with_dlogits(dlogits);
                }
                Ok(Box::new(cpu))
            }
            BackendName::Pjrt(kind) => {
                let numerics = variant.numerics;
                for (is_asked, what, instead) in [
                    (settings.threads != 0, "threads", "the plugin starts its own threads: leave it out"),
                    (settings.isa.is_some(), "isa", "the compiler chooses it: leave it out"),
                    (settings.dlogits.is_some(), "dlogits", "set it in `numerics`"),
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
                    if is_asked {
                        let (backend, what, instead) = (backend.to_string(), what.into(), instead.into());
                        return Err(Error::Unsupported { backend, what, instead }.into());
                    }
                }
                let client = self.client(kind)?;
                let mut pjrt = PjrtBackend::new(kind, client)?.with_mesh(variant.mesh)?.with_numerics(numerics);
                if let Some(blocks) = variant.mosaic {
                    pjrt = pjrt.with_mosaic(blocks)?;
                }
                Ok(Box::new(pjrt))
            }
        }
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
