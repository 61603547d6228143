//! The whole policy: embedding, blocks, final norm, LM head.

use super::batch::PackedBatch;
use super::block::Block;
use super::inference::Inference;
use super::layers::{Linear, RmsNorm};
use super::params::{load_parameters, named_parameters, normal};
use backend_cpu::layers::RopeTable;
use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor, TensorData};
use models::{ModelConfig, NamedTensor};
use policy::{Error, Result};

/// A Qwen2-style decoder. Hidden states and LM head are exposed apart because the loss takes them apart.
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
    pub embed_tokens: Param<Tensor<2>>,
    /// The layers.
    pub layers: Vec<Block>,
    /// The norm before the LM head.
    pub norm: RmsNorm,
    /// The LM head `[V, H]`; `None` when the embedding serves as head.
    pub lm_head: Option<Param<Tensor<2>>>,
    /// The value head `[H, 1]` with its bias, which PPO trains; it reads the same hidden states as the LM head.
    pub value_head: Option<Linear>,
    #[module(skip)]
    rope: RopeTable,
    #[module(skip)]
    config: ModelConfig,
}

impl Decoder {
    /// A decoder with initial weights that depend on `config` and `seed` only. On a device with autodiff it trains.
    ///
    /// # Errors
    /// [`Error::Model`] for an illegal configuration.
    pub fn new(config: &ModelConfig, seed: u64, device: &Device) -> Result<Self> {
        config.validate()?;
        let matrix = |name: &str, std: f64| {
            Param::from_data(normal([config.vocab_size, config.hidden_size], std, seed, name), device)
        };
        let std = config.initializer_range;
        Ok(Self {
            embed_tokens: matrix("embed_tokens", std),
            layers: (0..config.num_hidden_layers)
                .map(|i| Block::new(config, seed, &format!("layers.{i}"), device))
                .collect(),
            norm: RmsNorm::new(config.hidden_size, config.rms_norm_eps, device),
            lm_head: (!config.tie_word_embeddings).then(|| matrix("lm_head", std)),
            value_head: None,
            rope: RopeTable::new(config.head_dim(), config.max_position_embeddings, config.rope_theta),
            config: config.clone(),
        })
    }

    /// The decoder with a value head of zeros: every state has the value 0.
    #[must_use]
    pub fn with_value_head(mut self) -> Self {
        let (device, input) = (self.device(), self.config.hidden_size);
        self.value_head = Some(Linear {
            weight: Param::from_data(TensorData::new(vec![0f32; input], [input, 1]), &device),
            bias: Some(Param::from_data(TensorData::new(vec![0f32], [1]), &device)),
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

    /// The configuration that the decoder was made from.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The device that holds the weights.
    pub fn device(&self) -> Device {
        self.embed_tokens.val().device()
    }

    /// The LM head, `[V, H]`: logits are `hidden x lm_head^T`.
    pub fn lm_head(&self) -> Tensor<2> {
        self.lm_head.as_ref().unwrap_or(&self.embed_tokens).val()
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

    /// Every parameter with its name and values, e.g. `layers.0.attn.qkv_proj.weight`.
    pub fn parameters(&self) -> Vec<NamedTensor> {
        named_parameters(self)
    }

    /// This decoder with the given values in place of its own; bit for bit what [`Decoder::parameters`] exported.
    ///
    /// # Errors
    /// [`Error::State`] when a name or shape does not fit.
    pub fn with_parameters(self, tensors: &[NamedTensor]) -> Result<Self> {
        load_parameters(self, tensors)
    }

    /// The table of rotary positions.
    pub(super) fn rope(&self) -> &RopeTable {
        &self.rope
    }

    /// The residual stream `[N, H]` behind the last layer.
    fn run(&self, batch: &PackedBatch) -> Result<Tensor<2>> {
        check(&self.config, &self.rope, batch.ids(), batch.longest())?;
        let ids: Vec<i32> = batch.ids().iter().map(|&id| id as i32).collect();
        let ids = Tensor::<1, Int>::from_data(TensorData::new(ids, [batch.ids().len()]), &self.device());
        let mut x = self.embed_tokens.val().select(0, ids);
        for layer in &self.layers {
            x = layer.forward(x, &self.rope, &batch.sequences)?;
        }
        Ok(x)
    }
}

/// Whether tokens are in the vocabulary and a sequence of `length` has positions.
pub(super) fn check(config: &ModelConfig, rope: &RopeTable, ids: &[u32], length: usize) -> Result<()> {
    if length > rope.len() {
        return Err(Error::TooLong { what: "sequence", length, limit: rope.len() });
    }
    match ids.iter().find(|id| **id as usize >= config.vocab_size) {
        Some(&id) => Err(models::Error::UnknownToken { id, vocab_size: config.vocab_size }.into()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
