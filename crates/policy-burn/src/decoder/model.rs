//! The whole policy: embedding, blocks, final norm, LM head.

use super::batch::PackedBatch;
use super::block::Block;
use super::build::{Builder, Initial, Seed, Source};
use super::hugging_face::{Mapped, Read};
use super::inference::Inference;
use super::layers::{Linear, RmsNorm};
use super::lora::{Adapted, LowRank};
use super::ops;
use super::params::{load_parameters, named_parameters};
use super::rope::Rope;
use super::weight::Weight;
use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor, TensorData};
use models::{ModelConfig, NamedTensor, Weights};
use policy::{Error, Result, TensorSource};

/// A decoder of the families Qwen2, Qwen3 and Llama 3. Hidden states and LM head are exposed apart because the loss takes them apart.
///
/// ```
/// use policy_burn::decoder::{Decoder, PackedBatch};
///
/// # fn main() -> policy::Result<()> {
/// let decoder = Decoder::new(&models::ModelConfig::default(), 0, &burn::tensor::Device::flex())?;
/// let hidden = decoder.forward(&PackedBatch::new(&[vec![1, 5, 9], vec![1, 7]])?)?;
/// assert_eq!(hidden.dims(), [5, 64]);
/// # Ok(())
/// # }
/// ```
#[derive(Module, Debug)]
pub struct Decoder {
    /// The embedding `[V, H]`.
    pub embed_tokens: Weight,
    /// The layers.
    pub layers: Vec<Block>,
    /// The norm before the LM head.
    pub norm: RmsNorm,
    /// The LM head `[V, H]`; `None` when the embedding serves as head.
    pub lm_head: Option<Weight>,
    /// The adapter of the LM head.
    pub lora_head: Option<LowRank>,
    /// The value head `[H, 1]` with its bias, which PPO trains; it reads the same hidden states as the LM head.
    pub value_head: Option<Linear>,
    #[module(skip)]
    adapted: Adapted,
    #[module(skip)]
    rope: Rope,
    #[module(skip)]
    config: ModelConfig,
}

impl Decoder {
    /// A decoder with initial weights that depend on `config` and `seed` only. On a device with autodiff it trains.
    ///
    /// # Errors
    /// [`Error::Model`] for an illegal configuration.
    pub fn new(config: &ModelConfig, seed: u64, device: &Device) -> Result<Self> {
        Self::build(config, &mut Seed(seed), device)
    }

    /// A decoder of stored weights, which are read tensor by tensor in f32. On a device with autodiff it trains.
    ///
    /// # Errors
    /// [`Error::Model`] for an illegal configuration, for weights that are not those of the configuration, and for weights that are
    /// not finite.
    pub fn from_weights(config: &ModelConfig, weights: &Weights, device: &Device) -> Result<Self> {
        weights.check(config)?;
        Self::build(config, &mut Read { config, weights }, device)
    }

    /// A decoder whose matrices stay in their files, which are mapped as long as it lives: it is not trained, but adapters may be. What
    /// cannot be used where it lies, matrices in f16, is copied as f32.
    ///
    /// # Errors
    /// As [`Decoder::from_weights`].
    pub fn mapped(config: &ModelConfig, weights: &Weights, device: &Device) -> Result<Self> {
        weights.check(config)?;
        Ok(Self::build(config, &mut Mapped { config, weights }, device)?.no_grad())
    }

    /// A decoder whose values come from `source`.
    ///
    /// # Errors
    /// [`Error::Model`] for an illegal configuration, and those of the source.
    pub(crate) fn build(config: &ModelConfig, source: &mut dyn Source, device: &Device) -> Result<Self> {
        config.validate()?;
        let mut of = Builder { config, device, source };
        let (matrix, initial) =
            ([config.vocab_size, config.hidden_size], Initial::Normal { std: config.initializer_range });
        let embed_tokens = of.weight("embed_tokens", matrix, initial)?;
        let layers = (0..config.num_hidden_layers).map(|i| Block::new(&mut of, &format!("layers.{i}")));
        let layers = layers.collect::<Result<_>>()?;
        let norm = RmsNorm::new(&mut of, "norm", config.hidden_size, config.rms_norm_eps)?;
        let lm_head = if config.tie_word_embeddings { None } else { Some(of.weight("lm_head", matrix, initial)?) };
        let (rope, config) = (Rope::new(config), config.clone());
        Ok(Self {
            embed_tokens,
            layers,
            norm,
            lm_head,
            lora_head: None,
            value_head: None,
            adapted: Adapted::default(),
            rope,
            config,
        })
    }

    /// The decoder with a value head of zeros: every state has the value 0.
    #[must_use]
    pub fn with_value_head(mut self) -> Self {
        let (device, input) = (self.device(), self.config.hidden_size);
        self.value_head = Some(Linear {
            weight: Weight::Parameter(Param::from_data(TensorData::new(vec![0f32; input], [input, 1]), &device)),
            bias: Some(Param::from_data(TensorData::new(vec![0f32], [1]), &device)),
            adapters: Vec::new(),
        });
        self
    }

    /// Values `[N, 1]` of states, from their hidden states `[N, H]`.
    ///
    /// # Errors
    /// [`Error::NoValueHead`].
    pub fn values(&self, hidden: Tensor<2>) -> Result<Tensor<2>> {
        self.value_head.as_ref().ok_or(Error::NoValueHead)?.forward(hidden)
    }

    /// The decoder, which leaves one without weights behind: whoever rewrites weights is then the only one who holds them.
    pub(crate) fn take(&mut self) -> Self {
        let (device, config, rope) = (self.device(), self.config.clone(), self.rope.clone());
        let nothing = || Weight::Parameter(Param::from_data(TensorData::new(Vec::<f32>::new(), [0, 0]), &device));
        let norm = self.norm.clone();
        let empty = Self {
            embed_tokens: nothing(),
            layers: Vec::new(),
            norm,
            lm_head: None,
            lora_head: None,
            value_head: None,
            adapted: Adapted::default(),
            rope,
            config,
        };
        std::mem::replace(self, empty)
    }

    /// The configuration that the decoder was made from.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The device that holds the weights.
    pub fn device(&self) -> Device {
        self.norm.weight.val().device()
    }

    /// The LM head, `[V, H]`: logits are `hidden x lm_head^T`. It is f32, or as it is stored where it stays in its file. With an adapter
    /// of the head it is a tensor of its own, f32, made for every call.
    ///
    /// # Errors
    /// [`Error::Other`] when the weights are not on burn's CPU backend.
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

    /// Hidden states after the final norm, `[N, H]`.
    ///
    /// # Errors
    /// [`Error::TooLong`], [`Error::Model`] for an unknown token.
    pub fn forward(&self, batch: &PackedBatch) -> Result<Tensor<2>> {
        self.norm.forward(self.run(batch)?)
    }

    /// [`Decoder::forward`] of the rows `rows` alone, which may repeat.
    ///
    /// # Errors
    /// As [`Decoder::forward`].
    pub(crate) fn forward_rows(&self, batch: &PackedBatch, rows: &[usize]) -> Result<Tensor<2>> {
        let x = self.run(batch)?;
        let rows: Vec<i32> = rows.iter().map(|row| *row as i32).collect();
        let count = rows.len();
        let rows = Tensor::<1, Int>::from_data(TensorData::new(rows, [count]), &x.device());
        self.norm.forward(x.select(0, rows))
    }

    /// The weights in the form in which tokens are sampled; those of now, whatever becomes of the decoder.
    ///
    /// # Errors
    /// [`Error::Other`] when the weights are not on burn's CPU backend.
    pub fn inference(&self) -> Result<Inference> {
        Inference::new(self)
    }

    /// Every parameter that is trained with its name and values, e.g. `layers.0.attn.qkv_proj.weight`.
    pub fn parameters(&self) -> Vec<NamedTensor> {
        named_parameters(self)
    }

    /// This decoder with the given values in place of its own; bit for bit what [`Decoder::parameters`] exported.
    ///
    /// # Errors
    /// [`Error::State`] when a name or shape does not fit.
    pub fn with_parameters(self, tensors: &dyn TensorSource) -> Result<Self> {
        load_parameters(self, tensors)
    }

    /// The adapted matrices.
    pub(super) fn adapted(&self) -> &Adapted {
        &self.adapted
    }

    /// The rotary positions.
    pub(super) fn rope(&self) -> &Rope {
        &self.rope
    }

    /// The residual stream `[N, H]` behind the last layer.
    fn run(&self, batch: &PackedBatch) -> Result<Tensor<2>> {
        check(&self.config, batch.ids(), batch.longest())?;
        let rope = self.rope.table(batch.longest())?;
        let mut x = match &self.embed_tokens {
            Weight::Parameter(table) => ops::embedding(table.val(), batch.ids(), self.config.pad_token_id)?,
            Weight::Stored(table) => {
                let (rows, dims) = (table.rows(batch.ids())?, [batch.ids().len(), self.config.hidden_size]);
                Tensor::from_data(TensorData::new(rows, dims), &self.device())
            }
        };
        for layer in &self.layers {
            x = layer.forward(x, &rope, &batch.sequences)?;
        }
        Ok(x)
    }
}

/// Whether tokens are in the vocabulary and a sequence of `length` has positions.
pub(super) fn check(config: &ModelConfig, ids: &[u32], length: usize) -> Result<()> {
    let limit = config.max_position_embeddings;
    if length > limit {
        return Err(Error::TooLong { what: "sequence", length, limit });
    }
    match ids.iter().find(|id| **id as usize >= config.vocab_size) {
        Some(&id) => Err(models::Error::UnknownToken { id, vocab_size: config.vocab_size }.into()),
        None => Ok(()),
    }
}

mod adapters;
mod export;

#[cfg(test)]
mod tests;
