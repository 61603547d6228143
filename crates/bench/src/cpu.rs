//! Variants on this CPU.

use super::inputs::Inputs;
use super::memory;
use super::protocol::{Bytes, Job, Planned, Stepped};
use super::runner::{Runner, input_bytes};
use crate::config::{ProgramKind, VariantConfig};
use crate::error::Result;
use grpo_backend_cpu::profile::{Work, measured};
use grpo_backend_cpu::{CpuBackend, Isa};
use grpo_backend_tpu::aot::Variant;
use grpo_backend_tpu::program::{MeshShape, Numerics, Pass};
use grpo_core::{
    Backend, GradientSpec, GradsMut, Implementation, LossPlan, PolicyInput, PolicyOutput, PolicySpec, Tensor, TensorMut,
};
use std::collections::BTreeMap;
use std::hint::black_box;
use std::rc::Rc;
use std::time::Instant;

/// A planned variant with its own gradients; inputs are read-only.
pub(crate) struct OnCpu {
    plan: Box<dyn LossPlan>,
    inputs: Rc<Inputs>,
    variant: Variant,
    /// Gradient buffers by the names of their tensors.
    gradients: BTreeMap<&'static str, Vec<f32>>,
    /// Logits that a step overwrites.
    in_place: Option<Tensor>,
    /// Memory of the process before the plan, with inputs and gradients.
    resident: Option<u64>,
    /// The number of threads, if the time of a step is measured by kind of work.
    profile: Option<usize>,
}

impl OnCpu {
    pub(crate) fn plan(job: &Job, inputs: Rc<Inputs>) -> Result<(Planned, Box<dyn Runner>)> {
        let variant = job.config.variant(job.variant.as_deref().unwrap_or_default())?;
        let settings = VariantConfig { threads: job.threads, ..job.settings() };
        let backend = backend(&settings, &variant)?;
        let request = &variant.request;
        let gradients: BTreeMap<_, _> =
            wanted(&variant, &inputs).into_iter().map(|(name, elements)| (name, touched(elements))).collect();
        let in_place = match (&inputs.policy, variant.pass) {
            (PolicyOutput::Logits(logits), Pass::GradientInPlace) => Some(logits.clone()),
            _ => None,
        };
        let resident = memory::resident();
        let began = Instant::now();
        let plan = backend.plan(request)?;
        let plan_seconds = began.elapsed().as_secs_f64();
        let rows = 8 * request.max_tokens as u64;
        let gradient_bytes: u64 = gradients.values().map(|values| 4 * values.len() as u64).sum();
        let has_bias = matches!(request.policy, PolicySpec::Hidden { bias: true, .. });
        let bytes = Bytes {
            inputs: Some(input_bytes(&inputs, has_bias)),
            outputs: Some(gradient_bytes + rows),
            workspace: Some(plan.memory().workspace as u64),
        };
        let planned = Planned { plan_seconds, bytes, ..Planned::default() };
        let threads =
            if job.threads == 0 { std::thread::available_parallelism().map_or(1, usize::from) } else { job.threads };
        let profile = settings.profile.then_some(threads);
        let runner = Self { plan, inputs: inputs.clone(), variant, gradients, in_place, resident, profile };
        Ok((planned, Box::new(runner)))
    }
}

/// Opens the backend of a variant with its `settings`.
///
/// # Errors
/// [`crate::Error::Loss`] that names a key that only other backends support, and the alternative; the errors of
/// [`CpuBackend::with_threads`].
pub fn backend(settings: &VariantConfig, variant: &Variant) -> Result<CpuBackend> {
    refuse_keys(
        "cpu",
        [
            (variant.numerics != Numerics::default(), "numerics", "set `dlogits` instead"),
            (variant.mosaic.is_some(), "mosaic", "it configures TPU kernels: leave it out"),
            (variant.mesh != MeshShape::default(), "mesh", "the CPU is one device: leave it out"),
            (
                settings.pass == ProgramKind::Materialised,
                "pass: materialised",
                "take `implementation: reference`, or a pjrt backend",
            ),
            (
                settings.profile && variant.request.implementation != Implementation::Fused,
                "profile",
                "only `implementation: fused` measures it",
            ),
            (settings.pass == ProgramKind::Bare, "bare products", "take a pjrt backend"),
        ],
    )?;
    let mut backend = CpuBackend::with_threads(settings.threads)?;
    if let Some(isa) = settings.isa.as_deref().and_then(Isa::from_name) {
        backend = backend.with_isa(isa);
    }
    if let Some(dlogits) = settings.dlogits {
        backend = backend.with_dlogits(dlogits);
    }
    Ok(backend)
}

/// Refuses the first key that is set: each has its name and the alternative.
pub(crate) fn refuse_keys<'a>(
    backend: &str,
    keys: impl IntoIterator<Item = (bool, &'a str, &'a str)>,
) -> grpo_core::Result<()> {
    match keys.into_iter().find(|(is_set, ..)| *is_set) {
        Some((_, what, instead)) => {
            Err(grpo_core::Error::Unsupported { backend: backend.into(), what: what.into(), instead: instead.into() })
        }
        None => Ok(()),
    }
}

/// Returns the gradients that the caller holds, with their sizes.
fn wanted(variant: &Variant, inputs: &Inputs) -> Vec<(&'static str, usize)> {
    if matches!(variant.pass, Pass::Score | Pass::GradientInPlace) {
        return vec![];
    }
    let GradientSpec { hidden, lm_head, bias } = variant.request.gradients;
    let is_wanted = |name| match name {
        "lm_head" => lm_head,
        "bias" => bias,
        _ => hidden,
    };
    let tensors = inputs.policy.tensors().filter(|(name, _)| is_wanted(*name));
    tensors.map(|(name, tensor)| (name, tensor.len())).collect()
}

/// Returns zeros in pages that are already mapped.
fn touched(elements: usize) -> Vec<f32> {
    let mut values = Vec::new();
    values.resize(elements, black_box(0.0));
    values
}

/// Returns the policy's tensors for the plan of `variant`, without the bias if it has none.
pub fn policy<'a>(inputs: &'a Inputs, variant: &Variant) -> PolicyInput<'a> {
    match (inputs.policy.as_input(), variant.request.policy) {
        (PolicyInput::Hidden { hidden, lm_head, .. }, PolicySpec::Hidden { bias: false, .. }) => {
            PolicyInput::Hidden { hidden, lm_head, bias: None }
        }
        (policy, _) => policy,
    }
}

impl Runner for OnCpu {
    fn step(&mut self, check: bool) -> Result<Stepped> {
        match (&mut self.in_place, &self.inputs.policy) {
            (Some(Tensor::F32(to)), PolicyOutput::Logits(Tensor::F32(from))) => to.copy_from_slice(from),
            (Some(Tensor::Bf16(to)), PolicyOutput::Logits(Tensor::Bf16(from))) => to.copy_from_slice(from),
            _ => {}
        }
        if check {
            self.gradients.values_mut().for_each(|values| values.fill(0.0));
        }
        let can_reset = memory::reset_high_water();
        let began = Instant::now();
        let (loss, work) = match self.profile {
            None => (self.call()?, BTreeMap::new()),
            Some(threads) => {
                let (loss, seconds) = measured(|| self.call());
                let mut work: BTreeMap<_, _> = Work::ALL.map(|work| (work.name().to_owned(), seconds(work))).into();
                let busy: f64 = work.values().sum();
                work.insert("waiting".into(), (threads as f64 * began.elapsed().as_secs_f64() - busy).max(0.0));
                (loss?, work)
            }
        };
        let seconds = began.elapsed().as_secs_f64();
        let high_water = can_reset.and_then(|()| Some(memory::high_water()?.saturating_sub(self.resident?)));
        let (resident_before, resident_after) = (self.resident, memory::resident());
        let grad_norms = if check { self.norms() } else { BTreeMap::new() };
        Ok(Stepped { seconds, work, loss, grad_norms, high_water, resident_before, resident_after, device: None })
    }

    fn score(&mut self) -> Result<Vec<f32>> {
        Ok(self.plan.score(policy(&self.inputs, &self.variant), &self.inputs.batch)?.logp)
    }
}

impl OnCpu {
    /// Calls the plan once; returns the loss, if the plan computes it.
    fn call(&mut self) -> Result<Option<f64>> {
        if self.variant.pass == Pass::Score {
            black_box(self.plan.score(policy(&self.inputs, &self.variant), &self.inputs.batch)?);
            return Ok(None);
        }
        if let Some(logits) = &mut self.in_place {
            return Ok(Some(self.plan.value_and_grad_in_place(logits.as_mut(), &self.inputs.batch)?.loss));
        }
        let mut grads = GradsMut::default();
        for (name, values) in &mut self.gradients {
            let place = match *name {
                "hidden" => &mut grads.hidden,
                "lm_head" => &mut grads.lm_head,
                "bias" => &mut grads.bias,
                _ => &mut grads.logits,
            };
            *place = Some(TensorMut::F32(values));
        }
        let input = policy(&self.inputs, &self.variant);
        Ok(Some(self.plan.value_and_grad(input, &self.inputs.batch, grads)?.loss))
    }

    fn norms(&self) -> BTreeMap<String, f64> {
        let norm = |squares: &mut dyn Iterator<Item = f32>| squares.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let logits_norm = match &self.in_place {
            Some(Tensor::F32(values)) => Some(norm(&mut values.iter().copied())),
            Some(Tensor::Bf16(values)) => Some(norm(&mut values.iter().map(|x| x.to_f32()))),
            None => None,
        };
        let all = self.gradients.iter().map(|(name, values)| (*name, norm(&mut values.iter().copied())));
        all.chain(logits_norm.map(|norm| ("logits", norm))).map(|(name, norm)| (name.to_owned(), norm)).collect()
    }
}
