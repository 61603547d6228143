//! Policies with LoRA adapters or a value head.

use super::layout::Layout;
use super::{PjrtPolicy, PjrtPolicyOptions, modules};
use crate::decoder::{Adapters, Decoder, Role};
use crate::error::Result;
use crate::memory::TrainingSizes;
use crate::rollout::DeviceRollout;
use crate::runtime::Runtime;
use crate::storage::Storage;
use crate::train::AdamW;
use crate::weights::DeviceWeights;
use grpo_core::LossConfig;
use grpo_core::objective::ValueLossConfig;
use models::{Adapter, LoraConfig, ModelConfig};
use policy::Error;
use rng::uniform_weights;
use stablehlo::Dtype;
use std::borrow::Cow;
use std::sync::Arc;

impl PjrtPolicy {
    /// Creates a policy from stored weights with fresh LoRA adapters: [`PjrtPolicy::with_lora`], with frozen weights that stay bf16 if
    /// all of them are stored in bf16, and otherwise have f32 precision.
    ///
    /// # Errors
    /// See [`PjrtPolicy::from_weights`] and [`PjrtPolicy::with_lora`].
    pub fn from_weights_with_lora(
        runtime: &Runtime,
        config: &ModelConfig,
        weights: &models::Weights,
        lora: &LoraConfig,
        seed: u64,
        loss: impl Into<Arc<LossConfig>>,
        options: PjrtPolicyOptions,
    ) -> Result<Self> {
        let storage = match TrainingSizes::frozen_dtype(weights) {
            models::Dtype::Bf16 => Storage::Plain(Dtype::Bf16),
            _ => Storage::of_masters(options.compute.dtype()),
        };
        let weights = DeviceWeights::from_files(runtime, config, weights, storage)?;
        Self::of(runtime, config, weights, loss, options)?.with_lora(lora, seed)
    }

    /// Adds fresh LoRA adapters, which do not change the model's outputs yet. From now on, only adapters are trained: gradients, moments
    /// and checkpoints contain only adapters, tokens are sampled with them, and the reference policy is the model without them. As in PEFT,
    /// A is uniform within 1 / sqrt(in) and B is zero; values depend on `seed` only, and equal those of the CPU policy.
    ///
    /// ```no_run
    /// use backend_tpu::plugins::Kind;
    /// use models::LoraConfig;
    /// use policy_pjrt::{PjrtPolicy, PjrtPolicyOptions, Runtime};
    ///
    /// # fn main() -> policy_pjrt::Result<()> {
    /// let folder = models::ModelFolder::open("Qwen2.5-0.5B-Instruct".as_ref())?;
    /// let (runtime, loss) = (Runtime::open(Kind::Cpu, None)?, grpo_core::LossConfig::default());
    /// let (weights, options) = (folder.weights()?, PjrtPolicyOptions::default());
    /// let policy = PjrtPolicy::from_weights(&runtime, folder.config(), &weights, loss, options)?;
    /// let lora = LoraConfig { r: 8, ..LoraConfig::default() };
    /// let policy = policy.with_lora(&lora, 0)?;
    /// # drop(policy);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::Model`] for an invalid configuration or target modules that the model does not have; [`crate::Error::Device`].
    pub fn with_lora(self, lora: &LoraConfig, seed: u64) -> Result<Self> {
        self.adapted(lora, |layout, name, shape| {
            let count = shape.iter().product();
            match layout.name_of(name) {
                Some(name) if name.ends_with(".a") => {
                    let bound = 1.0 / (shape[1] as f64).sqrt();
                    Ok(Cow::Owned(uniform_weights(count, bound, seed, name)))
                }
                _ => Ok(Cow::Owned(vec![0.0; count])),
            }
        })
    }

    /// Adds stored adapters; otherwise like [`PjrtPolicy::with_lora`].
    ///
    /// # Errors
    /// [`crate::Error::Model`] if the adapter does not fit this model; [`crate::Error::Device`].
    pub fn with_adapter(self, adapter: &Adapter) -> Result<Self> {
        self.adapted(adapter.config(), |_, name, shape| {
            let stored = adapter.matrices().iter().find_map(|matrix| {
                let is_a = matrix.lora_a() == name;
                (is_a || matrix.lora_b() == name)
                    .then(|| if is_a { adapter.lora_a(matrix) } else { adapter.lora_b(matrix) })
            });
            let tensor = stored.ok_or_else(|| Error::state(name, "a matrix of the adapter", "none"))??;
            if tensor.shape() != shape {
                return Err(Error::state(name, format!("shape {shape:?}"), format!("shape {:?}", tensor.shape())));
            }
            Ok(tensor.values())
        })
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
        let zeros = |_: &str, shape: &[usize]| Ok(Cow::Owned(vec![0.0; shape.iter().product()]));
        let value_head = DeviceWeights::from_values(&self.runtime, table, Storage::Plain(Dtype::F32), zeros)?;
        let weights = self.weights()?.subset(|role| !role.is_of_value_head()).followed_by(value_head);
        self.grpo.of_values = Some(loss);
        self.rebuilt(decoder, weights)
    }

    fn adapted<'a>(
        self,
        lora: &LoraConfig,
        values: impl Fn(&Layout, &str, &[usize]) -> policy::Result<Cow<'a, [f32]>>,
    ) -> Result<Self> {
        let adapters = Adapters::new(self.config(), lora)?;
        let table = adapters.parameters(self.config());
        let decoder = self.modules.decoder().clone().with_adapters(adapters);
        let layout = Layout::of_trained(&decoder);
        let storage = Storage::Plain(Dtype::F32);
        let added =
            DeviceWeights::from_values(&self.runtime, table, storage, |name, shape| values(&layout, name, shape))?;
        let weights = self.weights()?;
        let (of_model, value_head) = (weights.subset(Role::is_of_model), weights.subset(Role::is_of_value_head));
        self.rebuilt(decoder, of_model.followed_by(added).followed_by(value_head))
    }

    /// Returns this policy with another decoder and its weights, and resets all training state.
    fn rebuilt(mut self, decoder: Decoder, weights: DeviceWeights) -> Result<Self> {
        self.optimizer = AdamW::new(decoder.trained(), weights.storage());
        self.rollout = DeviceRollout::of(&self.runtime, decoder.clone(), self.options.rollout)?;
        self.modules = modules(decoder, weights.dtype(), &self.options);
        (self.weights, self.ref_policy) = (weights, None);
        (self.steps, self.moments, self.remembered) = (0, None, None);
        self.grpo.forget_programs();
        self.cross_entropy.forget_programs();
        self.forget_gradient();
        Ok(self)
    }
}
