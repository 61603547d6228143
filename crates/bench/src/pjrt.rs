//! Runners on the devices of a PJRT plugin. Tensors stay on the device between steps; only scalars return to the host.

use super::cpu::{policy, refuse_keys};
use super::floor;
use super::inputs::Inputs;
use super::memory;
use super::protocol::{Bytes, Job, Planned, Role as Asked, Stepped};
use super::report::{CompiledBytes, DeviceBytes, DeviceReport};
use super::runner::{Runner, input_bytes};
use crate::config::{BackendName, ProgramKind, VariantConfig};
use crate::error::{Error, Result};
use grpo_backend_tpu::aot::Variant;
use grpo_backend_tpu::plugins::Kind;
use grpo_backend_tpu::program::{Blocking, MeshShape, Pass, Role, Spec};
use grpo_backend_tpu::{PjrtBackend, PjrtPlan, PjrtTensor};
use grpo_core::{DeviceTensor, Dtype, GradientSpec, GradsMut, PolicyInput, PolicySpec, TensorMut, TensorRef};
use grpo_pjrt::{Client, DeviceMemoryStats};
use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::Path;
use std::rc::Rc;
use std::time::Instant;

/// Devices with the tensors that variants share.
pub(crate) struct OnDevices {
    kind: Kind,
    client: Client,
    mesh: MeshShape,
    /// Inputs and gradients, without tensors that a failed step has lost.
    tensors: RefCell<HashMap<(Role, Dtype), PjrtTensor>>,
}

impl OnDevices {
    /// Opens the devices of `kind`.
    pub(crate) fn open(kind: Kind, plugin: Option<&Path>, mesh: MeshShape) -> Result<Self> {
        let backend = PjrtBackend::open(kind, plugin)?.on_mesh(mesh)?;
        Ok(Self { kind, client: backend.client().clone(), mesh, tensors: RefCell::default() })
    }

    fn report(&self) -> Result<DeviceReport> {
        let plugin = self.client.plugin();
        let (major, minor) = plugin.api_version();
        let device = &self.client.addressable_devices()[0];
        let kind = device.description().map_err(backend_error)?.kind;
        Ok(DeviceReport {
            platform: self.client.platform_name().into(),
            platform_version: self.client.platform_version().into(),
            kind,
            used: self.mesh.devices(),
            memory_bytes: self.memory().and_then(|memory| u64::try_from(memory.bytes_limit?).ok()),
            plugin: plugin.path().display().to_string(),
            api_version: format!("{major}.{minor}"),
        })
    }

    /// Returns the statistics of the first device's allocator, if it has any.
    fn memory(&self) -> Option<DeviceMemoryStats> {
        self.client.addressable_devices()[0].memory_stats().ok()
    }

    /// Compiles the program of `job`.
    pub(crate) fn plan(on: &Rc<Self>, job: &Job, inputs: Rc<Inputs>) -> Result<(Planned, Box<dyn Runner>)> {
        let settings = VariantConfig { threads: job.threads, ..job.settings() };
        let (mut variant, mut kind) = (job.config.variant(job.variant.as_deref().unwrap_or_default())?, settings.pass);
        if job.role == Asked::BareProducts {
            let floor = floor::bare_products(&variant, kind);
            variant = floor.ok_or_else(|| Error::argument("bench worker", "a variant with a floor", &job.name))?.1;
            kind = ProgramKind::Bare;
        }
        let began = Instant::now();
        // A separate backend per variant, so that no variant reuses an executable that another one has compiled.
        let backend = backend(on.kind, on.client.clone(), &settings, &variant)?;
        let gradients = variant.request.gradients;
        let mut request = variant.request.clone();
        if kind == ProgramKind::Materialised {
            // The program returns its gradients; there are no accumulators.
            request.gradients = GradientSpec { hidden: false, lm_head: false, bias: false };
        }
        let program = |spec: &Spec| variant.program(&Spec { gradients, ..spec.clone() });
        let mut plan = backend.plan_program(&request, variant.pass, program)?;
        let memory = plan.compiled_memory()?;
        let plan_seconds = began.elapsed().as_secs_f64();
        let bytes = |bytes: i64| u64::try_from(bytes).unwrap_or(0);
        let compiled = CompiledBytes {
            arguments: bytes(memory.argument),
            outputs: bytes(memory.output),
            aliased: bytes(memory.alias),
            temp: bytes(memory.temp),
        };
        let has_bias = matches!(variant.request.policy, PolicySpec::Hidden { bias: true, .. });
        let runner = OnDevice { on: on.clone(), plan, variant, kind, inputs };
        let planned = Planned {
            plan_seconds,
            blocking: runner.blocking(),
            bytes: Bytes {
                inputs: Some(input_bytes(&runner.inputs, has_bias)),
                outputs: Some(compiled.outputs),
                workspace: Some(compiled.temp),
            },
            compiled: Some(compiled),
            device: Some(on.report()?),
            ..Planned::default()
        };
        Ok((planned, Box::new(runner)))
    }
}

/// Opens the backend of a variant with its `settings` on `client`.
///
/// # Errors
/// [`Error::Loss`] that names a key that only other backends support, and the alternative; the errors of [`PjrtBackend`].
pub fn backend(kind: Kind, client: Client, settings: &VariantConfig, variant: &Variant) -> Result<PjrtBackend> {
    refuse_keys(
        &BackendName::Pjrt(kind).to_string(),
        [
            (settings.threads != 0, "threads", "the plugin starts its own threads: leave it out"),
            (settings.isa.is_some(), "isa", "the compiler chooses it: leave it out"),
            (settings.dlogits.is_some(), "dlogits", "set it in `numerics`"),
            (settings.profile, "profile", "only the CPU backend measures it: leave it out"),
        ],
    )?;
    let backend = PjrtBackend::new(kind, client)?.on_mesh(variant.mesh)?.with_numerics(variant.numerics);
    Ok(match variant.mosaic {
        Some(blocks) => backend.with_mosaic(blocks)?,
        None => backend,
    })
}

fn backend_error(error: grpo_pjrt::Error) -> grpo_core::Error {
    grpo_core::Error::Backend { backend: "pjrt".into(), message: error.to_string() }
}

/// A compiled variant with its inputs on the devices.
struct OnDevice {
    on: Rc<OnDevices>,
    plan: PjrtPlan,
    variant: Variant,
    kind: ProgramKind,
    inputs: Rc<Inputs>,
}

impl OnDevice {
    /// Returns the blocking of the fused loops, if any.
    fn blocking(&self) -> Option<Blocking> {
        let spec = self.plan.spec();
        self.variant.has_tiles().then_some(match spec.blocking {
            Blocking::TokenChunks(size) => Blocking::TokenChunks(size.min(spec.padded_tokens())),
            Blocking::VocabPanels(size) => Blocking::VocabPanels(size.min(spec.local_vocab())),
        })
    }

    /// Returns the inputs of the step with their values.
    fn reads(&self) -> Vec<(Role, TensorRef<'_>)> {
        match policy(&self.inputs, &self.variant) {
            PolicyInput::Logits(logits) => vec![(Role::Logits, logits)],
            PolicyInput::Hidden { hidden, lm_head, bias } => {
                let bias = bias.map(|bias| (Role::Bias, bias));
                [(Role::Hidden, hidden), (Role::LmHead, lm_head)].into_iter().chain(bias).collect()
            }
        }
    }

    /// Returns the gradients that the step adds to, in the order of [`GradsMut`].
    fn gradients(&self) -> [Option<Role>; 4] {
        let made = self.variant.request.gradients;
        let requested = match (self.variant.pass, self.kind, self.variant.request.policy) {
            (Pass::Score | Pass::GradientInPlace, ..) | (_, ProgramKind::Materialised, _) => [false; 4],
            (Pass::Gradient, _, PolicySpec::Logits { .. }) => [false, false, false, made.hidden],
            (Pass::Gradient, _, PolicySpec::Hidden { .. }) => [made.hidden, made.lm_head, made.bias, false],
        };
        let roles = [Role::GradHidden, Role::GradLmHead, Role::GradBias, Role::GradLogits];
        std::array::from_fn(|i| requested[i].then_some(roles[i]))
    }

    fn input_key(&self, role: Role) -> (Role, Dtype) {
        (role, self.variant.request.policy.dtype())
    }

    fn gradient_key(&self, role: Role) -> (Role, Dtype) {
        (role, self.variant.numerics.gradients)
    }

    /// Returns the inputs on the devices, which [`OnDevice::prepare`] has uploaded.
    fn policy<'t>(&self, tensors: &'t HashMap<(Role, Dtype), PjrtTensor>) -> PolicyInput<'t> {
        let get = |role| -> Option<TensorRef<'t>> { Some(TensorRef::Device(tensors.get(&self.input_key(role))?)) };
        match (get(Role::Logits), get(Role::Hidden), get(Role::LmHead)) {
            (None, Some(hidden), Some(lm_head)) => {
                let has_bias = matches!(self.variant.request.policy, PolicySpec::Hidden { bias: true, .. });
                PolicyInput::Hidden { hidden, lm_head, bias: if has_bias { get(Role::Bias) } else { None } }
            }
            (Some(logits), ..) => PolicyInput::Logits(logits),
            _ => unreachable!("a step follows its preparation"),
        }
    }
}

impl Runner for OnDevice {
    fn step(&mut self, check: bool) -> Result<Stepped> {
        self.prepare()?;
        // For a device on this host, the process's memory is measured as well.
        let resident_before = if self.on.kind == Kind::Cpu { memory::resident() } else { None };
        let can_reset = resident_before.and_then(|_| memory::reset_high_water());
        let before = if check { self.on.memory() } else { None };
        let began = Instant::now();
        let loss = self.run()?;
        let seconds = began.elapsed().as_secs_f64();
        let high_water = can_reset.and_then(|()| Some(memory::high_water()?.saturating_sub(resident_before?)));
        let resident_after = resident_before.and_then(|_| memory::resident());
        let device = before.zip(self.on.memory()).and_then(|(before, after)| device_bytes(&before, &after));
        Ok(Stepped { seconds, loss, high_water, resident_before, resident_after, device, ..Stepped::default() })
    }

    fn score(&mut self) -> Result<Vec<f32>> {
        self.prepare()?;
        let tensors = self.on.tensors.borrow();
        let policy = self.policy(&tensors);
        let [logp, _] = self.plan.score_on_device(policy, &self.inputs.batch)?;
        Ok(logp.to_host()?)
    }
}

/// Returns the memory of a step from the allocator's statistics before and after it. The peak counts allocated bytes or, on devices that
/// reserve memory for executables, reserved bytes.
fn device_bytes(before: &DeviceMemoryStats, after: &DeviceMemoryStats) -> Option<DeviceBytes> {
    let peak = |stats: &DeviceMemoryStats| {
        let peak = stats.peak_bytes_in_use?.max(stats.peak_bytes_reserved.unwrap_or(0));
        u64::try_from(peak).ok()
    };
    let in_use = |stats: &DeviceMemoryStats| u64::try_from(stats.bytes_in_use).ok();
    Some(DeviceBytes::new(in_use(before)?, peak(before)?, peak(after)?, in_use(after)?))
}

impl OnDevice {
    /// Restores the tensors that the last step has consumed.
    fn prepare(&mut self) -> Result<()> {
        let tokens = self.inputs.batch.tokens();
        let mut tensors = self.on.tensors.borrow_mut();
        for (role, values) in self.reads() {
            if let Entry::Vacant(place) = tensors.entry(self.input_key(role)) {
                place.insert(self.plan.upload(role, tokens, values)?).wait()?;
            }
        }
        for role in self.gradients().into_iter().flatten() {
            if let Entry::Vacant(place) = tensors.entry(self.gradient_key(role)) {
                place.insert(self.plan.zeros(role, tokens)?).wait()?;
            }
        }
        Ok(())
    }

    /// Runs a step and waits for all results; returns the loss, if there is one.
    fn run(&mut self) -> Result<Option<f64>> {
        let (on, inputs) = (self.on.clone(), self.inputs.clone());
        let (mut tensors, batch) = (on.tensors.borrow_mut(), &inputs.batch);
        if self.variant.pass == Pass::Score {
            let policy = self.policy(&tensors);
            let results = self.plan.score_on_device(policy, batch)?;
            results.iter().try_for_each(PjrtTensor::wait)?;
            return Ok(None);
        }
        if self.variant.pass == Pass::GradientInPlace {
            // The buffer now holds gradients; the next step uploads logits again.
            let Some(mut logits) = tensors.remove(&self.input_key(Role::Logits)) else {
                unreachable!("a step follows its preparation")
            };
            let output = self.plan.value_and_grad_in_place_on_device(TensorMut::Device(&mut logits), batch)?;
            logits.wait()?;
            return Ok((self.kind != ProgramKind::Bare).then_some(output.loss));
        }
        let roles = self.gradients();
        let keys = roles.map(|role| role.map(|role| self.gradient_key(role)));
        let mut sums = keys.map(|key| key.and_then(|key| tensors.remove(&key)));
        let policy = self.policy(&tensors);
        let [hidden, lm_head, bias, logits] = sums
            .each_mut()
            .map(|tensor| tensor.as_mut().map(|tensor| TensorMut::Device(tensor as &mut dyn DeviceTensor)));
        let grads = GradsMut { hidden, lm_head, bias, logits };
        let output = self.plan.value_and_grad_on_device(policy, batch, grads)?;
        sums.iter().flatten().try_for_each(PjrtTensor::wait)?;
        tensors.extend(keys.into_iter().flatten().zip(sums.into_iter().flatten()));
        Ok((self.kind != ProgramKind::Bare).then_some(output.loss))
    }
}
