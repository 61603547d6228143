//! Policies with LoRA adapters or a value head.

use super::{PjrtPolicy, PjrtPolicyOptions, modules, rollout};
use crate::decoder::{Adapters, Decoder, Role};
use crate::error::Result;
use crate::memory::TrainingSizes;
use crate::program::Programs;
use crate::runtime::Runtime;
use crate::storage::Storage;
use crate::train::Optimizer;
use crate::weights::DeviceWeights;
use grpo_core::LossConfig;
use grpo_core::objective::ValueLossConfig;
use grpo_models::{Adapter, LoraConfig, ModelConfig};
use grpo_policy::{AdapterTensors, InitialWeights, TensorSource, check_tensors};
use grpo_stablehlo::Dtype;
use std::sync::Arc;

impl PjrtPolicy {
    /// Creates a policy from stored weights with fresh LoRA adapters: [`PjrtPolicy::with_lora`], with frozen weights that stay bf16 if
    /// all of them are stored in bf16, and otherwise have f32 precision. With [`PjrtPolicyOptions::quantization`], the matrices of layers are
    /// quantised, and [`grpo_policy::Policy::export_model`] is an error.
    ///
    /// # Errors
    /// See [`PjrtPolicy::from_weights`] and [`PjrtPolicy::with_lora`].
    pub fn from_weights_with_lora(
        runtime: &Runtime,
        config: &ModelConfig,
        weights: &grpo_models::Weights,
        lora: &LoraConfig,
        seed: u64,
        loss: impl Into<Arc<LossConfig>>,
        options: PjrtPolicyOptions,
    ) -> Result<Self> {
        let storage = match TrainingSizes::frozen_dtype(weights) {
            grpo_models::Dtype::Bf16 => Storage::Plain(Dtype::Bf16),
            _ => Storage::of_masters(options.compute.dtype()),
        };
        let weights = DeviceWeights::from_files(runtime, config, weights, storage, options.quantization)?;
        Self::of(runtime, config, weights, loss, options)?.with_lora(lora, seed)
    }

    /// Adds fresh LoRA adapters, which do not change the model's outputs yet. From now on, only adapters are trained: gradients, moments
    /// and checkpoints contain only adapters, tokens are sampled with them, and the reference policy is the model without them.
    /// [`InitialWeights::of_adapters`] computes their values. For example: `policy.with_lora(&LoraConfig { r: 8, ..Default::default() }, 0)?`.
    ///
    /// # Errors
    /// [`crate::Error::Model`] for an invalid configuration or target modules that the model does not have; [`crate::Error::Device`].
    pub fn with_lora(self, lora: &LoraConfig, seed: u64) -> Result<Self> {
        let tensors = InitialWeights::of_adapters(self.config(), lora, seed)?;
        self.adapted(lora, &tensors)
    }

    /// Adds stored adapters; otherwise like [`PjrtPolicy::with_lora`].
    ///
    /// # Errors
    /// [`crate::Error::Model`] if the adapter does not fit this model; [`crate::Error::Device`].
    pub fn with_adapter(self, adapter: &Adapter) -> Result<Self> {
        self.adapted(adapter.config(), &AdapterTensors(adapter))
    }

    /// Adds a value head, initialised to zero, that is trained with this loss, as in PPO:
    /// `policy.with_value_head(ValueLossConfig::default())?`.
    ///
    /// # Errors
    /// [`crate::Error::Loss`] for invalid settings; [`crate::Error::Device`].
    pub fn with_value_head(mut self, loss: ValueLossConfig) -> Result<Self> {
        loss.validate()?;
        let decoder = self.modules.decoder().clone().with_value_head();
        let table = decoder.parameters().into_iter().filter(|p| p.role.is_of_value_head()).collect();
        let (storage, zeros) = (Storage::Plain(Dtype::F32), InitialWeights::of_value_head(self.config()));
        let value_head = DeviceWeights::from_source(&self.runtime, table, storage, "", &zeros)?;
        let weights = self.weights()?.subset(|role| !role.is_of_value_head()).followed_by(value_head);
        self.grpo.of_values = Some(loss);
        self.rebuilt(decoder, weights)
    }

    fn adapted(self, lora: &LoraConfig, tensors: &dyn TensorSource) -> Result<Self> {
        check_tensors(&lora.parameters(self.config())?, "", tensors)?;
        let adapters = Adapters::new(self.config(), lora)?;
        let table = adapters.parameters(self.config());
        let decoder = self.modules.decoder().clone().with_adapters(adapters);
        let added = DeviceWeights::from_source(&self.runtime, table, Storage::Plain(Dtype::F32), "", tensors)?;
        let weights = self.weights()?;
        let (of_model, value_head) = (weights.subset(Role::is_of_model), weights.subset(Role::is_of_value_head));
        self.rebuilt(decoder, of_model.followed_by(added).followed_by(value_head))
    }

    /// Returns this policy with another decoder and its weights, and resets all training state.
    fn rebuilt(mut self, decoder: Decoder, weights: DeviceWeights) -> Result<Self> {
        self.optimizer = Optimizer::new(decoder.trained(), weights.storage(), self.settings.name);
        self.rollout = rollout(&self.runtime, decoder.clone(), &self.options)?;
        self.modules = modules(decoder, weights.dtype(), &self.options).with_optimizer(self.settings.name);
        (self.weights, self.ref_policy) = (weights, None);
        (self.steps, self.moments, self.remembered) = (0, None, None);
        (self.mix, self.resharding) = (Programs::new(), Programs::new());
        self.grpo.forget_programs();
        self.cross_entropy.forget_programs();
        self.forget_gradient();
        Ok(self)
    }
}
