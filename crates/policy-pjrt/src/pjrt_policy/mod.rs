//! [`PjrtPolicy`]: the decoder, its loss and its optimizer on a PJRT device, as a [`Policy`].

mod adapted;
mod logits;
mod ref_policy;
mod state;
mod steps;

use crate::DeviceTensor;
use crate::decoder::{Attention, AxisRules, Compute, Decoder, ExpertProducts, Parameter, Role, parameters};
use crate::error::{Error, Result};
use crate::program::Programs;
use crate::rollout::{DeviceRollout, RolloutOptions};
use crate::runtime::Runtime;
use crate::storage::Storage;
use crate::train::{Device, Loss, Moments, Optimizer, TrainPrograms, default_tiling};
use crate::weights::DeviceWeights;
use grpo_backend_tpu::aot::Chip;
use grpo_core::{LossConfig, LossOutput, Scores, Tiling};
use grpo_models::{ModelConfig, Quantization};
use grpo_policy::{
    Completion, InitialWeights, OptimizerName, OptimizerSettings, Policy, PolicyState, RolloutRequest,
    RouterStatistics, SequenceBatch, StateGroup, StepLoss, TensorSink, TensorSource, UpdateReport, Weights,
};
use grpo_stablehlo::{Dtype, Save};
use smart_default::SmartDefault;
use std::sync::Arc;
use steps::upload;

/// A decoder on the devices of a [`Runtime`] with AdamW and an optional reference policy. Weights, moments and gradient accumulators have f32 precision
/// and stay on the device between checkpoints; [`PjrtPolicyOptions::compute`] is the dtype of matrix products. With LoRA adapters
/// ([`PjrtPolicy::with_lora`]), the model's weights are frozen: policy and reference policy share one copy, without gradients or moments.
///
/// With bf16 products, training, scoring and sampling use matrices in bf16. The 16 low bits of each f32 weight are stored separately;
/// updates and checkpoints combine both into the exact f32 weight. The reference policy has no low bits until [`Policy::mix_ref_policy`]
/// changes it.
///
/// ```no_run
/// use grpo_backend_tpu::plugins::Kind;
/// use grpo_policy_pjrt::{PjrtPolicy, PjrtPolicyOptions, Runtime};
///
/// # fn main() -> grpo_policy_pjrt::Result<()> {
/// let folder = grpo_models::ModelFolder::open("Qwen2.5-0.5B-Instruct".as_ref())?;
/// let runtime = Runtime::open(Kind::Cpu, None)?;
/// let loss = grpo_core::LossConfig::default();
/// let options = PjrtPolicyOptions::default();
/// let policy = PjrtPolicy::from_weights(&runtime, folder.config(), &folder.weights()?, loss, options)?;
/// # drop(policy);
/// # Ok(())
/// # }
/// ```
///
/// # Roll back
/// [`Policy::begin`] shares the buffers of weights and moments: the next [`Policy::apply`] then writes new buffers instead of updating in
/// place, so both copies exist until [`Policy::commit`]. If the device lacks the memory, the step fails with the device's error, and the
/// old state remains. Without [`PjrtPolicyOptions::can_roll_back`] updates are in place and cannot be rolled back. If the device fails
/// during such an update, the weights are lost ([`Error::Lost`]), and the run must continue from its checkpoint.
pub struct PjrtPolicy {
    runtime: Runtime,
    options: PjrtPolicyOptions,
    modules: TrainPrograms,
    grpo: Loss,
    cross_entropy: Loss,
    weights: DeviceWeights,
    ref_policy: Option<DeviceWeights>,
    rollout: DeviceRollout,
    optimizer: Optimizer,
    settings: OptimizerSettings,
    steps: u64,
    moments: Option<Moments>,
    /// Gradient accumulators; empty before the first gradient.
    sums: Vec<DeviceTensor>,
    /// `true` if the accumulators contain a gradient.
    has_gradient: bool,
    /// Executables of `mix_ref_policy`, by the storage of the reference policy before it.
    mix: Programs<Storage>,
    /// The executable that moves weights to the mesh of the rollout.
    resharding: Programs<()>,
    remembered: Option<Remembered>,
}

/// Options of a policy on a PJRT device.
#[derive(Clone, Debug, SmartDefault, PartialEq)]
pub struct PjrtPolicyOptions {
    /// Dtype of the operands of matrix products, in training and sampling, and of the model's matrices on the device. For bf16, the low 16
    /// bits of f32 weights are stored separately, for updates and checkpoints.
    #[default(Compute::F32)]
    pub compute: Compute,
    /// Attention implementation in training and scoring.
    pub attention: Attention,
    /// Implementation of the products of experts, in training and sampling.
    pub expert_products: ExpertProducts,
    /// Activations that each layer saves for the backward pass: more memory or more recomputation.
    pub save: Save,
    /// Tiling of the logits in the loss.
    #[default(default_tiling())]
    pub tiling: Tiling,
    /// Options of sampling.
    pub rollout: RolloutOptions,
    /// Axis rules of sampling, with a mesh of the same devices. `None` samples on the mesh of the runtime.
    pub rollout_rules: Option<AxisRules>,
    /// `true` if a failed step can be rolled back, which holds weights and moments twice during the step.
    #[default(true)]
    pub can_roll_back: bool,
    /// The peak of matmuls of all devices together in flop/s, for devices that [`grpo_backend_tpu::aot::Chip`] does not list.
    pub peak_flops: Option<f64>,
    /// `true` if the routers of experts are not trained.
    pub freeze_router: bool,
    /// The format of the matrices of layers below adapters; for [`PjrtPolicy::from_weights_with_lora`] only.
    pub quantization: Option<Quantization>,
    /// The factor of the load balancing loss of the routers of experts, which is added to the loss of every update with transformers'
    /// definition: computed for each micro-batch and averaged over the micro-batches of a call of [`Policy::accumulate`], as in TRL. 0 is
    /// no such loss.
    pub router_aux_loss_coef: f64,
}

/// The state that [`Policy::roll_back`] restores. Its tensors are shared with the policy until an update writes new ones.
struct Remembered {
    weights: DeviceWeights,
    ref_policy: Option<DeviceWeights>,
    moments: Option<Moments>,
    steps: u64,
}

impl PjrtPolicy {
    /// Creates a policy from stored weights, uploaded tensor by tensor, with the default AdamW settings.
    ///
    /// # Errors
    /// See [`DeviceWeights::from_weights`]; [`Error::Loss`] for an invalid loss configuration.
    pub fn from_weights(
        runtime: &Runtime,
        config: &ModelConfig,
        weights: &grpo_models::Weights,
        loss: impl Into<Arc<LossConfig>>,
        options: PjrtPolicyOptions,
    ) -> Result<Self> {
        let storage = Storage::of_masters(options.compute.dtype());
        check_unquantized("PjrtPolicy::from_weights", &options)?;
        Self::of(runtime, config, DeviceWeights::from_files(runtime, config, weights, storage, None)?, loss, options)
    }

    /// Creates a policy with random weights ([`InitialWeights::of_model`]), with the default AdamW settings.
    ///
    /// # Errors
    /// [`Error::Policy`] for an invalid configuration; see [`PjrtPolicy::from_tensors`].
    pub fn new(
        runtime: &Runtime,
        config: &ModelConfig,
        seed: u64,
        loss: impl Into<Arc<LossConfig>>,
        options: PjrtPolicyOptions,
    ) -> Result<Self> {
        Self::from_tensors(runtime, config, &InitialWeights::of_model(config, seed)?, loss, options)
    }

    /// Creates a policy from tensors with the names of `transformers`, with the default AdamW settings.
    ///
    /// # Errors
    /// See [`DeviceWeights::from_tensors`]; [`Error::Loss`] for an invalid loss configuration.
    pub fn from_tensors(
        runtime: &Runtime,
        config: &ModelConfig,
        tensors: &dyn TensorSource,
        loss: impl Into<Arc<LossConfig>>,
        options: PjrtPolicyOptions,
    ) -> Result<Self> {
        config.validate()?;
        check_unquantized("PjrtPolicy::from_tensors", &options)?;
        let storage = Storage::of_masters(options.compute.dtype());
        let runtime = &runtime.for_model(config);
        let weights = DeviceWeights::from_source(runtime, parameters(config), storage, "", tensors)?;
        Self::of(runtime, config, weights, loss, options)
    }

    fn of(
        runtime: &Runtime,
        config: &ModelConfig,
        weights: DeviceWeights,
        loss: impl Into<Arc<LossConfig>>,
        options: PjrtPolicyOptions,
    ) -> Result<Self> {
        let (runtime, loss) = (&runtime.for_model(config), loss.into());
        loss.validate()?;
        grpo_policy::loss_of_model(&loss, config)?;
        let decoder = Decoder::new(config, options.compute)
            .with_attention(options.attention)
            .with_quantization(options.quantization)
            .with_expert_products(options.expert_products);
        let decoder = if options.freeze_router { decoder.with_frozen_routers() } else { decoder };
        grpo_policy::check_router_aux_loss(config, options.router_aux_loss_coef)?;
        let decoder = if options.router_aux_loss_coef > 0.0 { decoder.with_router_aux_loss() } else { decoder };
        let decoder = decoder.with_axis_rules(runtime.axis_rules().clone())?;
        Ok(Self {
            runtime: runtime.clone(),
            modules: modules(decoder.clone(), weights.dtype(), &options),
            grpo: Loss::new(loss),
            cross_entropy: Loss::new(StepLoss::cross_entropy().into()),
            ref_policy: None,
            optimizer: Optimizer::new(decoder.trained(), weights.storage(), OptimizerName::default()),
            weights,
            rollout: rollout(runtime, decoder, &options)?,
            settings: OptimizerSettings::default(),
            steps: 0,
            moments: None,
            sums: Vec::new(),
            has_gradient: false,
            mix: Programs::new(),
            resharding: Programs::new(),
            remembered: None,
            options,
        })
    }

    /// Returns the configuration of the decoder.
    pub fn config(&self) -> &ModelConfig {
        self.modules.decoder().config()
    }

    /// Returns the weights on the device.
    ///
    /// # Errors
    /// [`Error::Lost`].
    pub fn weights(&self) -> Result<&DeviceWeights> {
        if self.weights.are_there() { Ok(&self.weights) } else { Err(Error::Lost) }
    }

    /// Passes the gradients accumulated since the last update to `sink`, one by one, with the names of `transformers` (adapters: PEFT).
    /// Without a gradient, nothing is passed.
    ///
    /// # Errors
    /// The sink's error, [`Error::Device`].
    pub fn export_gradients(&mut self, sink: &mut dyn TensorSink) -> Result<()> {
        if !self.has_gradient {
            return Ok(());
        }
        let shared: Vec<Arc<DeviceTensor>> = std::mem::take(&mut self.sums).into_iter().map(Arc::new).collect();
        let exported = self.like_trained(shared.clone()).export(sink);
        self.sums = shared.into_iter().filter_map(Arc::into_inner).collect();
        exported
    }

    /// Sets the optimizer and its settings.
    fn set_optimizer(&mut self, config: &OptimizerSettings) {
        self.settings = config.clone();
        self.optimizer.set_name(config.name);
        self.modules.set_optimizer(config.name);
    }

    /// Views `tensors` as values of the trained parameters.
    fn like_trained(&self, tensors: Vec<Arc<DeviceTensor>>) -> DeviceWeights {
        let trained = self.modules.decoder().trained();
        DeviceWeights::of_tensors(&self.runtime, trained, Storage::Plain(Dtype::F32), tensors)
    }

    /// Returns the weights for sampling: all but the value head, on the mesh of the rollout.
    fn sampled(&mut self) -> Result<DeviceWeights> {
        let weights = self.weights()?.subset(|role| !role.is_of_value_head()).without_remainders();
        weights.on(self.rollout.runtime(), &mut self.resharding)
    }
}

/// Checks that no quantisation is requested for weights that are trained.
fn check_unquantized(operation: &'static str, options: &PjrtPolicyOptions) -> Result<()> {
    let Some(quantization) = options.quantization else { return Ok(()) };
    let expected = "PjrtPolicyOptions::quantization None: only the weights of from_weights_with_lora are quantised";
    Err(grpo_policy::Error::argument(operation, expected, quantization.name()).into())
}

/// Creates the rollout of `decoder` on its mesh.
fn rollout(runtime: &Runtime, decoder: Decoder, options: &PjrtPolicyOptions) -> Result<DeviceRollout> {
    let devices = runtime.devices().len();
    let runtime = match &options.rollout_rules {
        Some(rules) if rules.mesh().devices() != devices => {
            let expected = format!("a mesh of the {devices} devices of the runtime");
            return Err(grpo_policy::Error::argument("rollout_rules", expected, rules.mesh()).into());
        }
        Some(rules) => runtime.clone().on_mesh(rules.clone())?,
        None => runtime.clone(),
    };
    DeviceRollout::of(&runtime, decoder, options.rollout)
}

/// Creates the training programs of `decoder`; `weights` is the dtype of the model's matrices.
fn modules(decoder: Decoder, weights: Dtype, options: &PjrtPolicyOptions) -> TrainPrograms {
    TrainPrograms::new(decoder, options.save.clone()).with_tiling(options.tiling.clone()).with_model_dtype(weights)
}

fn no_ref_policy(operation: &'static str) -> Error {
    grpo_policy::Error::argument(operation, "a reference policy: freeze_ref_policy makes one", "none").into()
}

impl Policy for PjrtPolicy {
    fn num_parameters(&self) -> usize {
        self.modules.decoder().trained().iter().map(Parameter::count).sum()
    }

    fn context_length(&self) -> usize {
        self.config().max_position_embeddings
    }

    fn model_config(&self) -> Option<&ModelConfig> {
        Some(self.config())
    }

    fn peak_flops(&self) -> Option<f64> {
        let of_device = |device: &grpo_pjrt::Device| Some(Chip::of_kind(&device.description().ok()?.kind)?.peak_flops);
        let of_all = || self.runtime.devices().iter().map(of_device).sum();
        // The makers state the peak of bf16.
        self.options.peak_flops.or_else(|| (self.options.compute == Compute::Bf16).then(of_all).flatten())
    }

    fn generate(&mut self, request: &RolloutRequest<'_>) -> grpo_policy::Result<Vec<Completion>> {
        let weights = self.sampled()?;
        Ok(self.rollout.generate(&weights, request)?)
    }

    fn score(&mut self, of: Weights, batches: &[SequenceBatch<'_>]) -> grpo_policy::Result<Scores> {
        self.rollout.forget_turns();
        self.weights()?;
        let of_model = self.modules.of_model();
        let (modules, weights) = match of {
            Weights::Policy => (&self.modules, &self.weights),
            Weights::RefPolicy => (&of_model, self.ref_policy.as_ref().ok_or_else(|| no_ref_policy("score"))?),
        };
        let on = Device { runtime: &self.runtime, modules };
        let mut all = Scores::default();
        for batch in batches {
            // The reference policy chooses its own experts.
            let routed = if of == Weights::Policy { batch.routed_experts } else { &[] };
            let rows = upload(on, batch.sequences, routed, &batch.tokens)?;
            let part = self.grpo.score(&on, weights, &rows, &batch.tokens)?;
            all.logp.extend(part.logp);
            all.entropy.extend(part.entropy);
        }
        Ok(all)
    }

    fn has_value_head(&self) -> bool {
        self.modules.decoder().has_value_head()
    }

    fn values(&mut self, batches: &[SequenceBatch<'_>]) -> grpo_policy::Result<Vec<f32>> {
        if !self.has_value_head() {
            return Err(grpo_policy::Error::NoValueHead);
        }
        self.rollout.forget_turns();
        self.weights()?;
        let on = Device { runtime: &self.runtime, modules: &self.modules };
        let mut all = Vec::new();
        for batch in batches {
            let rows = upload(on, batch.sequences, batch.routed_experts, &batch.tokens)?;
            all.extend(self.grpo.values(&on, &self.weights, &rows, batch.tokens.tokens())?);
        }
        Ok(all)
    }

    fn accumulate(&mut self, batches: &[SequenceBatch<'_>], loss: StepLoss) -> grpo_policy::Result<LossOutput> {
        self.rollout.forget_turns();
        let (mut sum, mut statistics) = (LossOutput::default(), RouterStatistics::default());
        for batch in batches {
            let (part, routers) = self.add(batch, loss, batches.len()).inspect_err(|_| self.forget_gradient())?;
            self.has_gradient = true;
            sum.merge(part);
            statistics.merge(routers);
        }
        statistics.record(&mut sum.metrics);
        Ok(sum)
    }

    fn apply(&mut self, learning_rate: f64) -> grpo_policy::Result<UpdateReport> {
        self.rollout.forget_turns();
        Ok(self.update(learning_rate)?)
    }

    fn step(
        &mut self,
        batches: &[SequenceBatch<'_>],
        loss: StepLoss,
        learning_rate: f64,
    ) -> grpo_policy::Result<(LossOutput, UpdateReport)> {
        self.rollout.forget_turns();
        if let ([batch], false) = (batches, self.has_gradient)
            && let Some(done) = self.step_at_once(batch, loss, learning_rate)?
        {
            return Ok(done);
        }
        grpo_policy::accumulate_and_apply(self, batches, loss, learning_rate)
    }

    fn skip(&mut self) -> grpo_policy::Result<UpdateReport> {
        if !std::mem::take(&mut self.has_gradient) {
            return Ok(UpdateReport { grad_norm: 0.0, applied: false });
        }
        let (grad_norm, sums) = self.optimizer.drop(&self.runtime, std::mem::take(&mut self.sums))?;
        self.sums = sums;
        Ok(UpdateReport { grad_norm, applied: false })
    }

    fn reset_optimizer(&mut self, config: &OptimizerSettings) -> grpo_policy::Result<()> {
        grpo_policy::check_optimizer(config.name, self.modules.decoder().adapters().is_some())?;
        self.set_optimizer(config);
        (self.steps, self.moments) = (0, None);
        self.forget_gradient();
        Ok(())
    }

    fn optimizer_steps(&self) -> u64 {
        self.steps
    }

    fn has_ref_policy(&self) -> bool {
        self.ref_policy.is_some()
    }

    fn freeze_ref_policy(&mut self) -> grpo_policy::Result<()> {
        // The tensors are shared until an update writes new ones. With adapters, the reference policy is the model without them.
        self.ref_policy = Some(self.weights()?.subset(Role::is_of_model).without_remainders());
        Ok(())
    }

    fn mix_ref_policy(&mut self, alpha: f64) -> grpo_policy::Result<()> {
        Ok(self.mix(alpha)?)
    }

    fn begin(&mut self) -> grpo_policy::Result<()> {
        if self.options.can_roll_back {
            let (weights, ref_policy) = (self.weights()?.clone(), self.ref_policy.clone());
            self.remembered =
                Some(Remembered { weights, ref_policy, moments: self.moments.clone(), steps: self.steps });
        }
        Ok(())
    }

    fn commit(&mut self) {
        self.remembered = None;
    }

    fn roll_back(&mut self) -> grpo_policy::Result<()> {
        self.rollout.forget_turns();
        let Some(Remembered { weights, ref_policy, moments, steps }) = self.remembered.take() else {
            return Err(grpo_policy::Error::state("the policy", "a state saved by `begin`", "none"));
        };
        (self.weights, self.ref_policy, self.moments, self.steps) = (weights, ref_policy, moments, steps);
        self.forget_gradient();
        Ok(())
    }

    fn export(&self, group: StateGroup, sink: &mut dyn TensorSink) -> grpo_policy::Result<()> {
        Ok(self.export_group(group, sink)?)
    }

    fn export_model(&self, sink: &mut dyn TensorSink) -> grpo_policy::Result<()> {
        if let Some(quantization) = self.options.quantization {
            let expected = "weights that are not quantised: export the adapter, or merge it into the weights of the model's folder";
            return Err(grpo_policy::Error::argument("export_model", expected, quantization.name()));
        }
        Ok(self.weights()?.export_merged(self.modules.decoder(), sink)?)
    }

    fn export_adapter(&self, sink: &mut dyn TensorSink) -> grpo_policy::Result<()> {
        if self.modules.decoder().adapters().is_none() {
            return Err(grpo_policy::Error::argument("export_adapter", "a policy with LoRA adapters", "one without"));
        }
        Ok(self.weights()?.subset(|role| matches!(role, Role::LoraA(_) | Role::LoraB(_))).export(sink)?)
    }

    fn import(&mut self, state: &PolicyState<'_>) -> grpo_policy::Result<()> {
        self.rollout.forget_turns();
        Ok(self.import_state(state)?)
    }

    fn import_weights(&mut self, weights: &dyn TensorSource) -> grpo_policy::Result<()> {
        self.rollout.forget_turns();
        Ok(self.import_trained(weights)?)
    }
}
