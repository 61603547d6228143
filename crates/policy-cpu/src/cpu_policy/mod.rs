//! [`CpuPolicy`]: the decoder, its loss and its optimizer on the CPU, as a [`Policy`].

use crate::decoder::{
    Decoder, Which, export_parameters, fork, replace_parameters, to_host, trained_tensors, trained_values,
};
use crate::gradients::GradientSum;
use crate::loss::{PartialLoss, PlannedLoss, PolicyLoss};
use crate::micro_batch::accumulate;
use crate::optimizer::Optimizer;
use crate::ref_policy::{freeze, has_values, mix};
use crate::rollout::{self, Prepared};
use crate::sequences::{Observed, completion_hidden, observed_hidden};
use burn::module::Module;
use burn::tensor::Device;
use grpo_core::objective::ValueLossConfig;
use grpo_core::{Dtype, LossOutput, Scores};
use grpo_models::{Adapter, LoraConfig, ModelConfig, Quantization};
use grpo_policy::{
    Completion, Error, OptimizerSettings, Policy, PolicyState, Result, RolloutRequest, SequenceBatch, StateGroup,
    StepLoss, TensorSink, TensorSource, UpdateReport, Weights, check_optimizer, check_tensors, imitation,
};
use rayon::prelude::*;
use std::sync::{Mutex, PoisonError};

/// Default of the largest number of sequences that decode together.
const ROLLOUT_BATCH_SIZE: usize = 256;

/// A decoder in burn on the CPU, with an optimizer and an optional reference policy. The [crate documentation](crate) has an example.
///
/// Micro-batches and batches of samples run in parallel on rayon's thread pool; results do not depend on the number of threads.
pub struct CpuPolicy {
    /// The trained weights, on a device with autodiff.
    model: Decoder,
    /// The weights of the reference policy, on a device without autodiff.
    ref_policy: Option<Decoder>,
    loss: PlannedLoss,
    cross_entropy: PlannedLoss,
    /// The value loss, if the decoder has a value head.
    value_loss: Option<ValueLossConfig>,
    optimizer: Optimizer,
    sums: GradientSum,
    rollout_batch_size: usize,
    /// The packed weights of the last request, and its KV caches if it had a turn, until a call other than [`Policy::generate`]. A mutex,
    /// because exports, which need the memory, do not change the policy.
    prepared: Mutex<Option<Prepared>>,
    remembered: Option<Remembered>,
    /// The initial weights, memory-mapped; `None` after the first change of the policy's weights.
    in_files: Option<Decoder>,
    /// The factor of the load balancing loss of routers.
    router_aux_loss_coef: f64,
}

/// The state that [`Policy::roll_back`] restores.
struct Remembered {
    model: Decoder,
    ref_policy: Option<Decoder>,
    optimizer: Optimizer,
}

impl CpuPolicy {
    /// Creates a policy with random weights that depend on `config` and `seed` only, with the default AdamW settings.
    ///
    /// # Errors
    /// [`Error::Model`] for an invalid configuration of the model, [`Error::Other`] of the loss.
    pub fn new(config: &ModelConfig, seed: u64, loss: PolicyLoss) -> Result<Self> {
        Self::of(Decoder::new(config, seed, &Device::flex().autodiff())?, loss)
    }

    /// Creates a policy from stored weights, read tensor by tensor as f32, with the default AdamW settings.
    ///
    /// # Errors
    /// See [`Decoder::from_weights`].
    pub fn from_weights(config: &ModelConfig, weights: &grpo_models::Weights, loss: PolicyLoss) -> Result<Self> {
        Self::of(Decoder::from_weights(config, weights, &Device::flex().autodiff())?, loss)
    }

    /// Creates a policy from stored weights with fresh LoRA adapters: [`CpuPolicy::with_lora`] with memory-mapped base weights, which
    /// every product reads from the files. The files are mapped as long as the policy lives, and must not change meanwhile.
    ///
    /// # Errors
    /// See [`Decoder::mapped`] and [`Decoder::with_lora`].
    pub fn mapped_with_lora(
        config: &ModelConfig,
        weights: &grpo_models::Weights,
        lora: &LoraConfig,
        seed: u64,
        loss: PolicyLoss,
    ) -> Result<Self> {
        let base = Decoder::mapped(config, weights, &Device::flex().autodiff())?;
        Self::of(base.with_lora(lora, seed)?, loss)
    }

    /// Like [`CpuPolicy::mapped_with_lora`], with quantised matrices of layers ([`Decoder::quantized`]). [`Policy::export_model`] is an error: the
    /// adapter is for the weights of the files, and its merge into quantised weights would lose precision.
    ///
    /// # Errors
    /// See [`Decoder::quantized`] and [`Decoder::with_lora`].
    pub fn quantized_with_lora(
        config: &ModelConfig,
        weights: &grpo_models::Weights,
        quantization: Quantization,
        lora: &LoraConfig,
        seed: u64,
        loss: PolicyLoss,
    ) -> Result<Self> {
        let base = Decoder::quantized(config, weights, quantization, &Device::flex().autodiff())?;
        Self::of(base.with_lora(lora, seed)?, loss)
    }

    /// Adds fresh LoRA adapters ([`Decoder::with_lora`]): gradients, moments and checkpoints contain only adapters, tokens are sampled with
    /// them, and the reference policy is the model without them.
    ///
    /// # Errors
    /// See [`Decoder::with_lora`].
    pub fn with_lora(self, lora: &LoraConfig, seed: u64) -> Result<Self> {
        self.adapted(|model| model.with_lora(lora, seed))
    }

    /// Adds stored adapters; otherwise like [`CpuPolicy::with_lora`].
    ///
    /// # Errors
    /// See [`Decoder::with_adapter`].
    pub fn with_adapter(self, adapter: &Adapter) -> Result<Self> {
        self.adapted(|model| model.with_adapter(adapter))
    }

    fn adapted(mut self, adapt: impl FnOnce(Decoder) -> Result<Decoder>) -> Result<Self> {
        self.model = adapt(self.model)?;
        self.release();
        self.optimizer = Optimizer::new(&self.optimizer.config);
        (self.sums, self.ref_policy, self.remembered, self.in_files) = (GradientSum::new(), None, None, None);
        Ok(self)
    }

    fn of(model: Decoder, loss: PolicyLoss) -> Result<Self> {
        let planned = |loss: PolicyLoss| PlannedLoss::new(loss.of_model(model.config())?);
        let (loss, cross_entropy) = (planned(loss)?, planned(PolicyLoss::cross_entropy(Dtype::F32))?);
        Ok(Self {
            model,
            ref_policy: None,
            loss,
            cross_entropy,
            value_loss: None,
            optimizer: Optimizer::new(&OptimizerSettings::default()),
            sums: GradientSum::new(),
            rollout_batch_size: ROLLOUT_BATCH_SIZE,
            prepared: Mutex::default(),
            remembered: None,
            in_files: None,
            router_aux_loss_coef: 0.0,
        })
    }

    /// Returns the dtype of the operands of matrix products.
    fn products(&self) -> Dtype {
        if self.model.kernels().rounds_operands() { Dtype::Bf16 } else { Dtype::F32 }
    }

    /// Sets the dtype of the operands of matrix products in training, scoring and sampling ([`Decoder::with_products`]); f32 by default. Weights,
    /// gradients and moments keep f32 precision. The backend of the loss is the caller's, and must compute its products in the same dtype
    /// ([`grpo_backend_cpu::CpuBackend::with_products`]).
    ///
    /// # Errors
    /// [`Error::Other`] of the loss.
    pub fn with_products(mut self, dtype: Dtype) -> Result<Self> {
        self.cross_entropy = PlannedLoss::new(PolicyLoss::cross_entropy(dtype).of_model(self.model.config())?)?;
        self.model = self.model.with_products(dtype);
        self.in_files = self.in_files.map(|model| model.with_products(dtype));
        self.ref_policy = self.ref_policy.map(|model| model.with_products(dtype));
        self.release();
        self.remembered = None;
        Ok(self)
    }

    /// Uses the memory-mapped `weights` as the reference policy, which then needs no memory of its own. `weights` must be those that this
    /// policy was created from; they are used if the reference policy is frozen before the first update. The files are mapped as long as
    /// the reference policy lives, and must not change meanwhile.
    ///
    /// # Errors
    /// See [`Decoder::mapped`].
    pub fn with_reference_in_files(mut self, weights: &grpo_models::Weights) -> Result<Self> {
        let model = Decoder::mapped(self.model.config(), weights, &Device::flex())?;
        let model = model.with_products(self.products());
        self.in_files = Some(if self.model.has_frozen_routers() { model.with_frozen_routers() } else { model });
        Ok(self)
    }

    /// Sets the largest number of sequences that decode together. It bounds the memory and does not change the samples.
    #[must_use]
    pub fn with_rollout_batch_size(mut self, sequences: usize) -> Self {
        self.rollout_batch_size = sequences;
        self
    }

    /// Adds a value head, initialised to zero, that is trained with this loss.
    ///
    /// # Errors
    /// [`Error::Loss`] for invalid settings.
    pub fn with_value_head(mut self, loss: ValueLossConfig) -> Result<Self> {
        loss.validate()?;
        self.model = self.model.with_value_head();
        self.value_loss = Some(loss);
        Ok(self)
    }

    /// Freezes the routers of experts.
    ///
    /// # Errors
    /// [`Error::Argument`] if the model has no experts.
    pub fn with_frozen_routers(mut self) -> Result<Self> {
        if self.model.config().experts.is_none() {
            return Err(Error::argument("with_frozen_routers", "a model with experts", "a model without"));
        }
        self.model = self.model.with_frozen_routers();
        self.in_files = self.in_files.map(Decoder::with_frozen_routers);
        self.ref_policy = self.ref_policy.map(Decoder::with_frozen_routers);
        Ok(self)
    }

    /// Adds `coef` times the load balancing loss of the routers of experts to the loss of every update, with transformers' definition. It is
    /// computed for each micro-batch and averaged over the micro-batches of a call of [`Policy::accumulate`], as in TRL.
    ///
    /// # Errors
    /// [`Error::Argument`] if the model has no experts, or `coef` is not a number from 0.
    pub fn with_router_aux_loss(mut self, coef: f64) -> Result<Self> {
        grpo_policy::check_router_aux_loss(self.model.config(), coef)?;
        self.router_aux_loss_coef = coef;
        Ok(self)
    }

    /// Returns the decoder, on a device with autodiff.
    pub fn model(&self) -> &Decoder {
        &self.model
    }

    /// Returns the gradients accumulated since the last update; empty if there are none.
    pub fn gradients(&self) -> &GradientSum {
        &self.sums
    }

    /// Drops what the last request left for the next one.
    fn release(&self) {
        *self.prepared.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Replaces the trained weights; the caller has checked names and shapes.
    fn replace(&mut self, weights: &dyn TensorSource) -> Result<()> {
        self.release();
        let (model, replaced) = replace_parameters(self.model.take(), weights);
        self.model = model;
        replaced
    }

    fn no_ref_policy(operation: &'static str) -> Error {
        Error::argument(operation, "a reference policy: freeze_ref_policy makes one", "none")
    }
}

/// Returns the results of `of` for the micro-batches, computed in parallel.
fn of_each<T: Send>(
    model: &Decoder,
    batches: &[SequenceBatch<'_>],
    of: impl Fn(&Decoder, &SequenceBatch<'_>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let parts: Vec<_> = batches.iter().map(|batch| (batch, model.clone())).collect();
    parts.into_par_iter().map(|(batch, model)| of(&model, batch)).collect()
}

impl Policy for CpuPolicy {
    fn num_parameters(&self) -> usize {
        trained_values(&self.model)
    }

    fn context_length(&self) -> usize {
        self.model.config().max_position_embeddings
    }

    fn model_config(&self) -> Option<&ModelConfig> {
        Some(self.model.config())
    }

    fn peak_flops(&self) -> Option<f64> {
        Some(grpo_backend_cpu::peak::flops(self.products(), rayon::current_num_threads()))
    }

    fn generate(&mut self, request: &RolloutRequest<'_>) -> Result<Vec<Completion>> {
        if request.return_routed_experts && self.model.config().experts.is_none() {
            let expected = "a model with a mixture of experts, for routed experts";
            return Err(Error::argument("generate", expected, "a model without"));
        }
        let prepared = self.prepared.get_mut().unwrap_or_else(PoisonError::into_inner);
        rollout::generate(|| self.model.valid(), request, self.rollout_batch_size, prepared)
    }

    fn score(&mut self, of: Weights, batches: &[SequenceBatch<'_>]) -> Result<Scores> {
        self.release();
        let model = match of {
            Weights::Policy => self.model.valid(),
            Weights::RefPolicy => self.ref_policy.clone().ok_or_else(|| Self::no_ref_policy("score"))?,
        };
        let loss = &self.loss;
        let scores = of_each(&model, batches, |model, batch| {
            // Only the policy's own routers have chosen the recorded experts.
            let routed = if of == Weights::Policy { batch.routed_experts } else { &[] };
            let hidden = completion_hidden(model, batch.sequences, routed)?;
            loss.score(hidden, model.lm_head()?, &batch.tokens)
        })?;
        let mut all = Scores::default();
        for part in scores {
            all.logp.extend(part.logp);
            all.entropy.extend(part.entropy);
        }
        Ok(all)
    }

    fn has_value_head(&self) -> bool {
        self.value_loss.is_some()
    }

    fn values(&mut self, batches: &[SequenceBatch<'_>]) -> Result<Vec<f32>> {
        self.release();
        let values = of_each(&self.model.valid(), batches, |model, batch| {
            let hidden = completion_hidden(model, batch.sequences, batch.routed_experts)?;
            Ok(to_host(model.values(hidden)?))
        })?;
        Ok(values.concat())
    }

    fn accumulate(&mut self, batches: &[SequenceBatch<'_>], loss: StepLoss) -> Result<LossOutput> {
        self.release();
        let (grpo, cross_entropy, value_loss) = (&self.loss, &self.cross_entropy, self.value_loss.as_ref());
        let aux_loss = self.router_aux_loss_coef / batches.len().max(1) as f64;
        accumulate(&self.model, batches, &mut self.sums, |model, batch| {
            let Observed { hidden, routers, embedded } = observed_hidden(model, batch, aux_loss > 0.0)?;
            let partial = match loss {
                StepLoss::Grpo => match (value_loss, batch.tokens.value_targets()) {
                    (None, None) => grpo.loss(hidden, model.lm_head()?, &batch.tokens),
                    (Some(of_values), Some(_)) => {
                        let [hidden, of_values_head] = fork(hidden)?;
                        let values = model.values(of_values_head)?;
                        let of_policy = grpo.loss(hidden, model.lm_head()?, &batch.tokens)?;
                        of_policy.with_values(values, of_values, grpo.config(), &batch.tokens)
                    }
                    (None, Some(_)) => Err(Error::NoValueHead),
                    (Some(_), None) => {
                        let expected = "values of the old policy and returns, which the value head is trained on";
                        Err(Error::argument("accumulate", expected, "a batch without them"))
                    }
                },
                StepLoss::CrossEntropy { tokens } => {
                    cross_entropy.loss(hidden, model.lm_head()?, &imitation(&batch.tokens, tokens)?)
                }
            };
            Ok(PartialLoss { embedded, ..partial?.with_routers(routers, aux_loss) })
        })
        .inspect_err(|_| self.sums = GradientSum::new())
    }

    fn apply(&mut self, learning_rate: f64) -> Result<UpdateReport> {
        self.release();
        let sums = std::mem::take(&mut self.sums);
        if sums.is_empty() {
            return Err(Error::argument("apply", "an accumulated gradient", "none"));
        }
        let report = self.optimizer.step(&mut self.model, &sums, learning_rate)?;
        if report.applied {
            self.in_files = None;
        }
        Ok(report)
    }

    fn skip(&mut self) -> Result<UpdateReport> {
        let sums = std::mem::take(&mut self.sums);
        Ok(UpdateReport { grad_norm: sums.norm(), applied: false })
    }

    fn reset_optimizer(&mut self, config: &OptimizerSettings) -> Result<()> {
        check_optimizer(config.name, self.model.has_adapters())?;
        self.optimizer = Optimizer::new(config);
        self.sums = GradientSum::new();
        Ok(())
    }

    fn optimizer_steps(&self) -> u64 {
        self.optimizer.steps
    }

    fn has_ref_policy(&self) -> bool {
        self.ref_policy.is_some()
    }

    fn freeze_ref_policy(&mut self) -> Result<()> {
        // With adapters, the reference policy is the model without them, and shares the frozen weights.
        self.ref_policy = Some(self.in_files.take().unwrap_or_else(|| freeze(&self.model)));
        Ok(())
    }

    fn mix_ref_policy(&mut self, alpha: f64) -> Result<()> {
        let old = self.ref_policy.as_ref().ok_or_else(|| Self::no_ref_policy("mix_ref_policy"))?;
        if self.model.has_adapters() {
            let expected = "a reference policy with weights of its own (sync_ref_model without LoRA)";
            let found = "the model beneath LoRA adapters, which is frozen";
            return Err(Error::argument("mix_ref_policy", expected, found));
        }
        self.ref_policy = Some(mix(old, &self.model, alpha)?);
        Ok(())
    }

    fn begin(&mut self) -> Result<()> {
        let (model, ref_policy) = (self.model.clone(), self.ref_policy.clone());
        self.remembered = Some(Remembered { model, ref_policy, optimizer: self.optimizer.clone() });
        Ok(())
    }

    fn commit(&mut self) {
        self.remembered = None;
    }

    fn roll_back(&mut self) -> Result<()> {
        let Some(Remembered { model, ref_policy, optimizer }) = self.remembered.take() else {
            return Err(Error::state("the policy", "a state saved by `begin`", "none"));
        };
        (self.model, self.ref_policy, self.optimizer) = (model, ref_policy, optimizer);
        self.release();
        self.sums = GradientSum::new();
        Ok(())
    }

    fn export(&self, group: StateGroup, sink: &mut dyn TensorSink) -> Result<()> {
        self.release();
        match group {
            StateGroup::Weights(Weights::Policy) => export_parameters(&self.model, Which::Trained, sink),
            StateGroup::Weights(Weights::RefPolicy) => match &self.ref_policy {
                // With adapters, the reference policy is the frozen model, which checkpoints do not store.
                Some(model) if !self.model.has_adapters() => export_parameters(model, Which::Trained, sink),
                _ => Ok(()),
            },
            StateGroup::Optimizer => self.optimizer.export(&self.model, sink),
        }
    }

    fn export_model(&self, sink: &mut dyn TensorSink) -> Result<()> {
        self.release();
        self.model.export(sink)
    }

    fn export_adapter(&self, sink: &mut dyn TensorSink) -> Result<()> {
        if !self.model.has_adapters() {
            return Err(Error::argument("export_adapter", "a policy with LoRA adapters", "one without"));
        }
        self.release();
        self.model.export_adapter(sink)
    }

    fn import(&mut self, state: &PolicyState<'_>) -> Result<()> {
        // Check everything before the first write, because the weights are replaced in place.
        check_tensors(&trained_tensors(&self.model), "", state.policy)?;
        check_optimizer(state.optimizer_settings.name, self.model.has_adapters())?;
        let mut optimizer = Optimizer::new(state.optimizer_settings);
        optimizer.restore(state.optimizer_steps, state.optimizer, &self.model)?;
        let ref_policy = match state.ref_policy {
            Some(weights) if self.model.has_adapters() && weights.shapes().is_empty() => Some(freeze(&self.model)),
            Some(weights) => {
                let new = freeze(&self.model);
                let trained = trained_tensors(&new);
                // Keep a memory-mapped reference policy if its values are equal.
                match self.ref_policy.take_if(|old| has_values(old, &trained, weights)) {
                    Some(old) => Some(old),
                    None => Some(new.with_parameters(weights)?),
                }
            }
            None => None,
        };
        (self.ref_policy, self.optimizer) = (ref_policy, optimizer);
        self.sums = GradientSum::new();
        (self.remembered, self.in_files) = (None, None);
        self.replace(state.policy)
    }

    fn import_weights(&mut self, weights: &dyn TensorSource) -> Result<()> {
        check_tensors(&trained_tensors(&self.model), "", weights)?;
        self.sums = GradientSum::new();
        (self.remembered, self.in_files) = (None, None);
        self.replace(weights)
    }
}

#[cfg(test)]
mod tests;
