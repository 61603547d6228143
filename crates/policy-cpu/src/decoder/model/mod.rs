//! The model: embedding, layers, final norm, LM head.

use super::autodiff_ops;
use super::batch::PackedBatch;
use super::build::{Builder, Source};
use super::embedded::EmbeddedRows;
use super::hugging_face::{Read, Tensors};
use super::layers::{Block, Linear, Mlp, RmsNorm};
use super::lora::LowRank;
use super::names::Adapted;
use super::rope::Ropes;
use super::routers::Routers;
use super::weight::{Stored, Weight};
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor, TensorData};
use grpo_backend_cpu::layers::Layers;
use grpo_core::Dtype;
use grpo_models::{ModelConfig, Quantization, Weights};
use grpo_policy::{Error, InitialWeights, Result, RoutedExperts};

/// A decoder of the families of [`grpo_models::Family`]. Hidden states and LM head are separate outputs, because the loss takes both.
///
/// ```
/// use grpo_policy_cpu::decoder::{Decoder, PackedBatch};
///
/// # fn main() -> grpo_policy::Result<()> {
/// let decoder = Decoder::new(&grpo_models::ModelConfig::default(), 0, &burn::tensor::Device::flex())?;
/// let hidden = decoder.forward(&PackedBatch::new(&[vec![1, 5, 9], vec![1, 7]])?)?;
/// assert_eq!(hidden.dims(), [5, 64]);
/// # Ok(())
/// # }
/// ```
#[derive(Module, Debug)]
pub struct Decoder {
    /// Embedding `[V, H]`.
    pub embed_tokens: Weight,
    /// Layers.
    pub layers: Vec<Block>,
    /// Final norm.
    pub norm: RmsNorm,
    /// LM head `[V, H]`; `None` if it is tied to the embedding.
    pub lm_head: Option<Weight>,
    /// Adapter of the LM head.
    pub lora_head: Option<LowRank>,
    /// Value head `[H, 1]` with bias, trained by PPO; it takes the same hidden states as the LM head.
    pub value_head: Option<Linear>,
    #[module(skip)]
    pub(crate) adapted: Adapted,
    #[module(skip)]
    pub(super) ropes: Ropes,
    /// `true` if routers of experts are not trained.
    #[module(skip)]
    frozen_routers: bool,
    /// The kernels of the products with the weights of layers.
    #[module(skip)]
    pub(super) kernels: Layers,
    #[module(skip)]
    config: ModelConfig,
}

/// The name of the embedding's parameter.
pub(crate) const EMBED_TOKENS: &str = "embed_tokens";

impl Decoder {
    /// Creates a decoder with random weights ([`InitialWeights::of_model`]). It is trainable on a device with autodiff.
    ///
    /// # Errors
    /// [`Error::Model`] for an invalid configuration.
    pub fn new(config: &ModelConfig, seed: u64, device: &Device) -> Result<Self> {
        let (tensors, adapted) = (InitialWeights::of_model(config, seed)?, Adapted::default());
        Self::build(config, &mut Tensors { config, adapted: &adapted, prefix: "", tensors: &tensors }, device)
    }

    /// Creates a decoder from stored weights, read tensor by tensor as f32. It is trainable on a device with autodiff.
    ///
    /// # Errors
    /// [`Error::Model`] for an invalid configuration, and for weights that do not fit it or are not finite.
    pub fn from_weights(config: &ModelConfig, weights: &Weights, device: &Device) -> Result<Self> {
        weights.check(config)?;
        Self::build(config, &mut Read { config, weights, in_place: false, quantization: None }, device)
    }

    /// Creates a decoder whose matrices are used in place in memory-mapped files, which stay mapped as long as it lives. Its weights are
    /// frozen; adapters can be trained. Matrices that cannot be used in place, for example in f16, are copied as f32.
    ///
    /// # Errors
    /// See [`Decoder::from_weights`].
    pub fn mapped(config: &ModelConfig, weights: &Weights, device: &Device) -> Result<Self> {
        Self::frozen(config, weights, None, device)
    }

    /// Like [`Decoder::mapped`], with quantised matrices of layers. Their products dequantise them in parts; embedding, head, norms and biases are
    /// those of the files.
    ///
    /// # Errors
    /// See [`Decoder::mapped`] and [`Quantization::check`].
    pub fn quantized(
        config: &ModelConfig,
        weights: &Weights,
        quantization: Quantization,
        device: &Device,
    ) -> Result<Self> {
        quantization.check(config)?;
        Self::frozen(config, weights, Some(quantization), device)
    }

    fn frozen(
        config: &ModelConfig,
        weights: &Weights,
        quantization: Option<Quantization>,
        device: &Device,
    ) -> Result<Self> {
        weights.check(config)?;
        Ok(Self::build(config, &mut Read { config, weights, in_place: true, quantization }, device)?.no_grad())
    }

    /// Creates a decoder with values from `source`.
    pub(crate) fn build(config: &ModelConfig, source: &mut dyn Source, device: &Device) -> Result<Self> {
        config.validate()?;
        let mut of = Builder { config, device, source };
        let matrix = [config.vocab_size, config.hidden_size];
        let embed_tokens = of.weight(EMBED_TOKENS, matrix)?;
        let layers =
            (0..config.num_hidden_layers).map(|i| Block::new(&mut of, &format!("layers.{i}"), config.layer(i)));
        let layers = layers.collect::<Result<_>>()?;
        let norm = RmsNorm::new(&mut of, "norm", config.hidden_size)?;
        let lm_head = if config.tie_word_embeddings { None } else { Some(of.weight("lm_head", matrix)?) };
        let (ropes, config) = (Ropes::new(config), config.clone());
        Ok(Self {
            embed_tokens,
            layers,
            norm,
            lm_head,
            lora_head: None,
            value_head: None,
            adapted: Adapted::default(),
            ropes,
            frozen_routers: false,
            kernels: Layers::new(),
            config,
        })
    }

    /// Sets the dtype of the operands of products with weights, in training, scoring and sampling; f32 by default. See
    /// [`Layers::with_products`]. Weights keep f32 precision; adapters, routers of experts and the value head are computed in f32. The loss
    /// computes the products with the LM head.
    #[must_use]
    pub fn with_products(mut self, dtype: Dtype) -> Self {
        self.kernels = self.kernels.with_products(dtype);
        self.layers.iter_mut().for_each(|layer| layer.set_kernels(self.kernels));
        self
    }

    /// Returns the kernels of the products with weights.
    pub(crate) fn kernels(&self) -> Layers {
        self.kernels
    }

    /// Freezes the routers of experts: they have no gradients, and updates leave them as they are.
    #[must_use]
    pub fn with_frozen_routers(mut self) -> Self {
        for layer in &mut self.layers {
            if let Mlp::Experts(mlp) = &mut layer.mlp {
                mlp.router = mlp.router.clone().no_grad();
            }
        }
        self.frozen_routers = true;
        self
    }

    /// Returns `true` if routers are frozen.
    pub fn has_frozen_routers(&self) -> bool {
        self.frozen_routers
    }

    /// Adds a value head initialised to zero: every state has value 0.
    #[must_use]
    pub fn with_value_head(mut self) -> Self {
        let (device, input) = (self.device(), self.config.hidden_size);
        self.value_head = Some(Linear {
            weight: Weight::Parameter(Param::from_data(TensorData::new(vec![0f32; input], [input, 1]), &device)),
            bias: Some(Param::from_data(TensorData::new(vec![0f32], [1]), &device)),
            adapters: Vec::new(),
            kernels: Layers::new(),
        });
        self
    }

    /// Returns the values `[N, 1]` of states, given their hidden states `[N, H]`.
    ///
    /// # Errors
    /// [`Error::NoValueHead`].
    pub fn values(&self, hidden: Tensor<2>) -> Result<Tensor<2>> {
        self.value_head.as_ref().ok_or(Error::NoValueHead)?.forward(hidden)
    }

    /// Takes the decoder out and leaves one without weights, so that the weights have no other owner and can be updated in place.
    pub(crate) fn take(&mut self) -> Self {
        let nothing = Param::from_data(TensorData::new(Vec::<f32>::new(), [0, 0]), &self.device());
        let empty = Self {
            embed_tokens: Weight::Parameter(nothing),
            layers: Vec::new(),
            lm_head: None,
            lora_head: None,
            value_head: None,
            ..self.clone()
        };
        std::mem::replace(self, empty)
    }

    /// Returns the configuration of the decoder.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the device of the weights.
    pub fn device(&self) -> Device {
        self.norm.weight.val().device()
    }

    /// Returns the LM head `[V, H]`: logits are `hidden x lm_head^T`. It is f32; a memory-mapped head has the dtype of its file. With an
    /// adapter, every call computes the merged head as a new f32 tensor.
    ///
    /// # Errors
    /// [`Error::Other`] if the weights are not on burn's CPU backend.
    pub fn lm_head(&self) -> Result<Tensor<2>> {
        let head = match self.lm_head.as_ref().unwrap_or(&self.embed_tokens) {
            Weight::Parameter(head) => head.val(),
            Weight::Stored(head) => {
                head.tensors().next().ok_or_else(|| Error::argument("lm_head", "a stored matrix", "none"))?
            }
        };
        match &self.lora_head {
            Some(adapter) => adapter.adapted_head(head),
            None => Ok(head),
        }
    }

    /// Returns the hidden states after the final norm, `[N, H]`, divided by the divisor of logits.
    ///
    /// # Errors
    /// [`Error::TooLong`], [`Error::Model`] for an unknown token.
    pub fn forward(&self, batch: &PackedBatch) -> Result<Tensor<2>> {
        check(&self.config, batch.ids(), batch.longest())?;
        let x = match &self.embed_tokens {
            Weight::Parameter(table) => autodiff_ops::embedding(table.val(), batch.ids(), self.config.pad_token_id)?,
            Weight::Stored(table) => self.stored_rows(table, batch)?,
        };
        self.hidden(self.run(x, batch, &mut Routers::default())?)
    }

    /// Applies the final norm to the residual stream `[N, H]`.
    fn hidden(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        autodiff_ops::scaled(self.norm.forward(x)?, (1.0 / self.config.logits_scaling) as f32)
    }

    /// Returns `routers`, which replay the recorded experts of the sequences of `batch`, if there are any.
    ///
    /// # Errors
    /// [`Error::Argument`] if they do not fit the sequences or the model.
    pub(crate) fn replaying(
        &self,
        batch: &PackedBatch,
        routed_experts: &[RoutedExperts],
        routers: Routers,
    ) -> Result<Routers> {
        let of_layer = self.config.experts.as_ref().map_or(0, |experts| experts.num_experts_per_tok);
        Ok(routers.with_recorded(batch.recorded(routed_experts, of_layer * self.config.routers())?))
    }

    /// Computes [`Decoder::forward`] for the given rows only; rows may repeat. The rows of a trained embedding are a leaf of their own, whose
    /// gradient is a part of the embedding's.
    pub(crate) fn forward_rows(
        &self,
        batch: &PackedBatch,
        rows: &[usize],
        routers: &mut Routers,
    ) -> Result<(Tensor<2>, Option<EmbeddedRows>)> {
        let (x, embedded) = self.embedded(batch)?;
        let x = self.run(x, batch, routers)?;
        Ok((self.hidden(autodiff_ops::select_rows(x, rows)?)?, embedded))
    }

    /// Returns the embedding `[N, H]` of the tokens, and the same as a leaf if the embedding is trained.
    fn embedded(&self, batch: &PackedBatch) -> Result<(Tensor<2>, Option<EmbeddedRows>)> {
        check(&self.config, batch.ids(), batch.longest())?;
        let table = match &self.embed_tokens {
            Weight::Parameter(table) => table.val(),
            Weight::Stored(table) => return Ok((self.stored_rows(table, batch)?, None)),
        };
        let is_trained = table.is_require_grad();
        let table = if table.is_autodiff() { table.inner() } else { table };
        let rows = autodiff_ops::embedding(table, batch.ids(), None)?;
        let rows = if self.device().is_autodiff() { Tensor::from_inner(rows) } else { rows };
        if !is_trained {
            return Ok((rows, None));
        }
        let rows = rows.require_grad();
        Ok((rows.clone(), Some(EmbeddedRows::new(batch.ids(), rows, self.config.pad_token_id))))
    }

    /// Returns the rows `[N, H]` of a memory-mapped embedding.
    fn stored_rows(&self, table: &Stored, batch: &PackedBatch) -> Result<Tensor<2>> {
        let (rows, dims) = (table.rows(batch.ids())?, [batch.ids().len(), self.config.hidden_size]);
        Ok(Tensor::from_data(TensorData::new(rows, dims), &self.device()))
    }

    /// Returns the residual stream `[N, H]` after the last layer, from the embedding `x: [N, H]`.
    fn run(&self, x: Tensor<2>, batch: &PackedBatch, routers: &mut Routers) -> Result<Tensor<2>> {
        let ropes = self.ropes.tables(batch.longest())?;
        let mut x = autodiff_ops::scaled(x, self.config.embedding_multiplier as f32)?;
        for layer in &self.layers {
            x = layer.forward(x, &ropes, &batch.sequences, routers)?;
        }
        Ok(x)
    }
}

/// Checks that tokens are in the vocabulary and `length` is within the model's positions.
pub(super) fn check(config: &ModelConfig, ids: &[u32], length: usize) -> Result<()> {
    let limit = config.max_position_embeddings;
    if length > limit {
        return Err(Error::TooLong { what: "sequence", length, limit });
    }
    match ids.iter().find(|id| **id as usize >= config.vocab_size) {
        Some(&id) => Err(grpo_models::Error::UnknownToken { id, vocab_size: config.vocab_size }.into()),
        None => Ok(()),
    }
}

mod adapters;
mod export;

#[cfg(test)]
mod tests;
