//! Contenders on the devices of a PJRT plugin. Everything stays there between steps; only scalars come back.

use super::inputs::{Inputs, PolicyTensors};
use super::measure::Contender;
use super::report::{CompiledBytes, DeviceReport};
use crate::error::Result;
use backend_tpu::aot::{Variant, What};
use backend_tpu::plugins::Kind;
use backend_tpu::program::{Blocking, Mesh, Pass, Role};
use backend_tpu::{PjrtBackend, PjrtPlan, PjrtTensor};
use grpo_core::{DeviceTensor, Dtype, GradsMut, PolicyInput, PolicySpec, TensorMut, TensorRef};
use pjrt::{Client, DeviceMemoryStats};
use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::Path;

/// Devices with the tensors that contenders share.
pub(super) struct OnDevices {
    kind: Kind,
    client: Client,
    mesh: Mesh,
    /// Inputs and gradients. What a failed step has lost is not among them.
    tensors: RefCell<HashMap<(Role, Dtype), PjrtTensor>>,
}

impl OnDevices {
    /// Opens the devices of `kind`.
    pub(super) fn open(kind: Kind, plugin: Option<&Path>, mesh: Mesh) -> Result<Self> {
        let backend = PjrtBackend::open(kind, plugin)?.with_mesh(mesh)?;
        Ok(Self { kind, client: backend.client().clone(), mesh, tensors: RefCell::default() })
    }

    pub(super) fn report(&self) -> Result<DeviceReport> {
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

    /// What the first device's allocator says, where it speaks.
    pub(super) fn memory(&self) -> Option<DeviceMemoryStats> {
        self.client.addressable_devices()[0].memory_stats().ok()
    }

    /// Compiles `variant`.
    pub(super) fn contender<'a>(&'a self, variant: &Variant, inputs: &'a Inputs) -> Result<OnDevice<'a>> {
        // A backend of its own: otherwise a program that another variant has compiled would be there already.
        let mut backend = PjrtBackend::new(self.kind, self.client.clone())?.with_mesh(self.mesh)?;
        backend = backend.with_numerics(variant.numerics);
        if let Some(blocks) = variant.mosaic {
            backend = backend.with_mosaic(blocks)?;
        }
        let mut plan = backend.plan_program(&variant.request, variant.what)?;
        let memory = plan.compiled_memory()?;
        let bytes = |bytes: i64| u64::try_from(bytes).unwrap_or(0);
        let compiled = CompiledBytes {
            arguments: bytes(memory.argument),
            outputs: bytes(memory.output),
            aliased: bytes(memory.alias),
            temp: bytes(memory.temp),
        };
        Ok(OnDevice { on: self, plan, variant: variant.clone(), inputs, compiled, loss: None })
    }

    /// Log-probabilities `[N]` of the inputs.
    pub(super) fn score(&self, variant: &Variant, inputs: &Inputs) -> Result<Vec<f32>> {
        let mut contender = self.contender(&Variant { what: What::Score, mosaic: None, ..variant.clone() }, inputs)?;
        contender.prepare()?;
        let tensors = self.tensors.borrow();
        let policy = contender.policy(&tensors);
        let [logp, _] = contender.plan.score_on_device(policy, &inputs.batch)?;
        Ok(logp.to_host()?)
    }
}

fn backend_error(error: pjrt::Error) -> grpo_core::Error {
    grpo_core::Error::Backend { backend: "pjrt".into(), message: error.to_string() }
}

/// A variant, compiled.
pub(super) struct OnDevice<'a> {
    on: &'a OnDevices,
    plan: PjrtPlan,
    variant: Variant,
    inputs: &'a Inputs,
    pub(super) compiled: CompiledBytes,
    /// Of the last step.
    pub(super) loss: Option<f64>,
}

impl OnDevice<'_> {
    /// How its loops are cut.
    pub(super) fn blocking(&self) -> Option<Blocking> {
        let spec = self.plan.spec();
        self.variant.has_tiles().then_some(match spec.blocking {
            Blocking::TokenChunks(size) => Blocking::TokenChunks(size.min(spec.local_tokens())),
            Blocking::VocabPanels(size) => Blocking::VocabPanels(size.min(spec.local_vocab())),
        })
    }

    fn pass(&self) -> Pass {
        self.variant.what.pass(self.variant.request.policy)
    }

    /// Inputs that it reads, with what they hold.
    fn reads(&self) -> Vec<(Role, TensorRef<'_>)> {
        match (&self.inputs.policy, self.variant.request.policy) {
            (PolicyTensors::Logits(logits), _) => vec![(Role::Logits, logits.as_ref())],
            (PolicyTensors::Hidden { hidden, lm_head, bias }, policy) => {
                let all = [(Role::Hidden, hidden), (Role::LmHead, lm_head), (Role::Bias, bias)];
                let has_bias = matches!(policy, PolicySpec::Hidden { bias: true, .. });
                let used = all.into_iter().filter(|(role, _)| *role != Role::Bias || has_bias);
                used.map(|(role, tensor)| (role, tensor.as_ref())).collect()
            }
        }
    }

    /// Gradients that it adds to, in [`GradsMut`]'s order.
    fn gradients(&self) -> [Option<Role>; 4] {
        let made = self.variant.request.gradients;
        let wanted = match (self.pass(), self.variant.what, self.variant.request.policy) {
            (Pass::Score | Pass::GradientInPlace, ..) | (_, What::Materialised, _) => [false; 4],
            (Pass::Gradient, _, PolicySpec::Logits { .. }) => [false, false, false, made.hidden],
            (Pass::Gradient, _, PolicySpec::Hidden { .. }) => [made.hidden, made.lm_head, made.bias, false],
        };
        let roles = [Role::GradHidden, Role::GradLmHead, Role::GradBias, Role::GradLogits];
        std::array::from_fn(|i| wanted[i].then_some(roles[i]))
    }

    fn input_key(&self, role: Role) -> (Role, Dtype) {
        (role, self.variant.request.policy.dtype())
    }

    fn gradient_key(&self, role: Role) -> (Role, Dtype) {
        (role, self.variant.numerics.gradients)
    }

    /// The inputs, to be read; [`Contender::prepare`] has put them there.
    fn policy<'t>(&self, tensors: &'t HashMap<(Role, Dtype), PjrtTensor>) -> PolicyInput<'t> {
        let get = |role| tensors.get(&self.input_key(role)).map(|tensor| TensorRef::Device(tensor));
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

impl Contender for OnDevice<'_> {
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

    fn step(&mut self) -> Result<()> {
        let (on, inputs) = (self.on, self.inputs);
        let (mut tensors, batch) = (on.tensors.borrow_mut(), &inputs.batch);
        if self.pass() == Pass::Score {
            let policy = self.policy(&tensors);
            let results = self.plan.score_on_device(policy, batch)?;
            return Ok(results.iter().try_for_each(PjrtTensor::wait)?);
        }
        if self.pass() == Pass::GradientInPlace {
            // The next step uploads logits again: these are gradients now.
            let Some(mut logits) = tensors.remove(&self.input_key(Role::Logits)) else {
                unreachable!("a step follows its preparation")
            };
            let policy = PolicyInput::LogitsInPlace(TensorMut::Device(&mut logits));
            let output = self.plan.value_and_grad_on_device(policy, batch, GradsMut::default())?;
            logits.wait()?;
            self.loss = Some(output.loss);
            return Ok(());
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
        for tensor in sums.iter().flatten().chain(&output.gradients) {
            tensor.wait()?;
        }
        tensors.extend(keys.into_iter().flatten().zip(sums.into_iter().flatten()));
        self.loss = (self.variant.what != What::Bare).then_some(output.loss);
        Ok(())
    }
}
