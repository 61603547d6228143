//! Adding and removing LoRA adapters.

use super::Decoder;
use crate::decoder::build::Builder;
use crate::decoder::hugging_face::Tensors;
use crate::decoder::layers::Mlp;
use crate::decoder::lora::LowRank;
use crate::decoder::names::Adapted;
use burn::module::Module;
use grpo_models::LoraConfig;
use grpo_policy::{AdapterTensors, InitialWeights, Result, TensorSource, check_tensors};

impl Decoder {
    /// Adds fresh adapters, which do not change outputs yet. From now on, only adapters are trained: the weights below are frozen and
    /// shared with every clone. Values depend on `seed` only.
    ///
    /// # Errors
    /// [`grpo_policy::Error::Model`] for an invalid configuration or target modules that the model does not have.
    pub fn with_lora(self, lora: &LoraConfig, seed: u64) -> Result<Self> {
        let tensors = InitialWeights::of_adapters(&self.config, lora, seed)?;
        self.adapt(lora, &tensors)
    }

    /// Adds stored adapters; otherwise like [`Decoder::with_lora`].
    ///
    /// # Errors
    /// [`grpo_policy::Error::Model`] if the adapter does not fit this model; [`grpo_policy::Error::State`] if a tensor does not.
    pub fn with_adapter(self, adapter: &grpo_models::Adapter) -> Result<Self> {
        self.adapt(adapter.config(), &AdapterTensors(adapter))
    }

    fn adapt(self, lora: &LoraConfig, tensors: &dyn TensorSource) -> Result<Self> {
        check_tensors(&lora.parameters(&self.config)?, "", tensors)?;
        let matrices = lora.resolve(&self.config)?;
        let device = self.device();
        // The value head is trained, too, so it stays outside `no_grad`.
        let value_head = self.value_head.clone();
        let mut model = self.without_adapters().no_grad();
        model.value_head = value_head;
        model.adapted = Adapted { matrices };
        let (adapted, config) = (model.adapted.clone(), model.config.clone());
        let source = &mut Tensors { config: &config, adapted: &adapted, prefix: "", tensors };
        let mut of = Builder { config: &config, device: &device, source };
        for (i, layer) in model.layers.iter_mut().enumerate() {
            for (module, linear) in layer.linears() {
                for (j, (matrix, first)) in adapted.of_layer(&config, &i.to_string(), module).into_iter().enumerate() {
                    let name = format!("layers.{i}.{module}.adapters.{j}");
                    linear.adapters.push(LowRank::new(&mut of, &name, lora, matrix, first)?);
                }
            }
            let Mlp::Experts(mlp) = &mut layer.mlp else { continue };
            for (parameter, adapter) in mlp.adapters() {
                let Some(matrix) = adapted.of_experts(&i.to_string(), parameter) else { continue };
                let name = format!("layers.{i}.mlp.experts_{}_adapter", parameter.trim_end_matches("_proj"));
                *adapter = Some(LowRank::new(&mut of, &name, lora, matrix, 0)?);
            }
        }
        let head = adapted.matrices.iter().find(|matrix| matrix.name == "lm_head");
        model.lora_head = head.map(|matrix| LowRank::new(&mut of, "lora_head", lora, matrix, 0)).transpose()?;
        Ok(model)
    }

    /// Returns the decoder without adapters; its weights are shared, not copied.
    #[must_use]
    pub fn without_adapters(mut self) -> Self {
        for layer in &mut self.layers {
            layer.linears().into_iter().for_each(|(_, linear)| linear.adapters.clear());
            if let Mlp::Experts(mlp) = &mut layer.mlp {
                mlp.adapters().into_iter().for_each(|(_, adapter)| *adapter = None);
            }
        }
        (self.lora_head, self.adapted) = (None, Adapted::default());
        self
    }

    /// Returns `true` if there are adapters; the model's own weights are then frozen.
    pub fn has_adapters(&self) -> bool {
        !self.adapted.matrices.is_empty()
    }
}
