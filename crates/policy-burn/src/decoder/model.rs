//! The whole policy: embedding, blocks, final norm, LM head.

use super::batch::PaddedBatch;
use super::block::Block;
use super::cache::KvCache;
use super::layers::RmsNorm;
use super::params::{load_parameters, named_parameters, normal};
use super::rope::RopeTable;
use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor, TensorData};
use models::{ModelConfig, NamedTensor};
use policy::{Error, Result};

/// Added to scores of pairs that must not attend: far below any score, and finite, so that a row of padding, which
/// may look at nothing, becomes an average instead of NaN.
const MASKED: f32 = -1e9;

/// A Qwen2-style decoder. Hidden states and LM head are exposed apart because the loss takes them apart.
///
/// ```
/// use policy_burn::decoder::{Decoder, PaddedBatch};
///
/// # fn main() -> policy::Result<()> {
/// let decoder = Decoder::new(&models::ModelConfig::default(), 0, &burn::tensor::Device::flex())?;
/// let hidden = decoder.forward(&PaddedBatch::right_padded(&[vec![1, 5, 9], vec![1, 7]])?)?;
/// assert_eq!(hidden.dims(), [2, 3, 64]);
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
            rope: RopeTable::new(config.head_dim(), config.max_position_embeddings, config.rope_theta),
            config: config.clone(),
        })
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

    /// Hidden states after the final norm, `[B, T, H]`. Those of padding are finite and mean nothing.
    ///
    /// # Errors
    /// [`Error::TooLong`], [`Error::Model`] for an unknown token.
    pub fn forward(&self, batch: &PaddedBatch) -> Result<Tensor<3>> {
        self.check(batch, batch.columns)?;
        let device = self.device();
        let mask = mask(batch, 0..batch.columns, batch.columns, &device);
        Ok(self.run(&batch.ids, &batch.positions(), batch.columns, mask, None))
    }

    /// [`Decoder::forward`] of left-padded prompts that also fills a new cache of `capacity` columns for
    /// [`Decoder::decode`].
    ///
    /// # Errors
    /// As [`Decoder::forward`], with `capacity` in place of the batch's columns; [`Error::Argument`] when a row ends
    /// before the last column or the capacity is smaller than the batch.
    pub fn prefill(&self, batch: &PaddedBatch, capacity: usize) -> Result<(Tensor<3>, KvCache)> {
        self.check(batch, capacity)?;
        let ends = batch.start.iter().zip(&batch.len).all(|(s, l)| s + l == batch.columns);
        if !ends || capacity < batch.columns {
            let expected = format!("left-padded rows and room for {} columns", batch.columns);
            return Err(Error::argument("prefill", expected, format!("capacity {capacity}, left-padded: {ends}")));
        }
        let device = self.device();
        let shape = [batch.rows(), self.config.num_key_value_heads, capacity, self.config.head_dim()];
        let mut cache = KvCache::new(self.layers.len(), shape, &device);
        let mask = mask(batch, 0..batch.columns, batch.columns, &device);
        let hidden = self.run(&batch.ids, &batch.positions(), batch.columns, mask, Some(&mut cache));
        cache.advance(batch.columns);
        Ok((hidden, cache))
    }

    /// Hidden states `[B, H]` of one more token per sequence; row b's first column in the cache is `start[b]`.
    ///
    /// # Errors
    /// [`Error::TooLong`] when the cache is full; [`Error::Argument`] when `ids` and `start` differ in length;
    /// [`Error::Model`] for an unknown token.
    pub fn decode(&self, ids: &[u32], start: &[usize], cache: &mut KvCache) -> Result<Tensor<2>> {
        if cache.len() >= cache.capacity() {
            return Err(Error::TooLong { what: "decode", length: cache.len() + 1, limit: cache.capacity() });
        }
        if ids.len() != start.len() || ids.is_empty() {
            let found = format!("{} and {}", ids.len(), start.len());
            return Err(Error::argument("decode", "as many ids as starts, at least one", found));
        }
        let column = cache.len();
        let view = PaddedBatch {
            ids: ids.to_vec(),
            start: start.to_vec(),
            len: start.iter().map(|s| column + 1 - s).collect(),
            columns: column + 1,
        };
        self.check(&view, cache.capacity())?;
        // Without padding in front a new token may look at everything.
        let padded = start.iter().any(|&s| s > 0);
        let mask = if padded { mask(&view, column..column + 1, column + 1, &self.device()) } else { None };
        let positions: Vec<usize> = start.iter().map(|s| column - s).collect();
        let hidden = self.run(ids, &positions, 1, mask, Some(cache));
        cache.advance(1);
        let [b, _, h] = hidden.dims();
        Ok(hidden.reshape([b, h]))
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

    fn check(&self, batch: &PaddedBatch, length: usize) -> Result<()> {
        if length > self.rope.len() {
            return Err(Error::TooLong { what: "sequence", length, limit: self.rope.len() });
        }
        match batch.ids.iter().find(|id| **id as usize >= self.config.vocab_size) {
            Some(&id) => Err(models::Error::UnknownToken { id, vocab_size: self.config.vocab_size }.into()),
            None => Ok(()),
        }
    }

    /// The hidden states of `ids, positions: [B * T]` -> `[B, T, H]`.
    fn run(
        &self,
        ids: &[u32],
        positions: &[usize],
        columns: usize,
        mask: Option<Tensor<5>>,
        mut cache: Option<&mut KvCache>,
    ) -> Tensor<3> {
        let device = self.device();
        let shape = [ids.len() / columns, columns];
        let ids: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
        let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, shape), &device);
        let rotation = self.rope.rotation(positions, shape, &device);
        let mut x = burn::tensor::module::embedding(self.embed_tokens.val(), ids);
        for (i, layer) in self.layers.iter().enumerate() {
            x = layer.forward(x, &rotation, mask.as_ref(), cache.as_deref_mut().map(|c| (c, i)));
        }
        self.norm.forward(x)
    }
}

/// `[B, 1, 1, T, S]` of 0 and [`MASKED`] for the queries in columns `queries` and S keys from column 0 on: a query
/// sees keys of its own sequence up to itself. `None` when everything may be seen.
fn mask(batch: &PaddedBatch, queries: std::ops::Range<usize>, keys: usize, device: &Device) -> Option<Tensor<5>> {
    let mut data = vec![MASKED; batch.rows() * queries.len() * keys];
    let shape = [batch.rows(), 1, 1, queries.len(), keys];
    let mut rows = data.chunks_exact_mut(keys);
    for (&start, &len) in batch.start.iter().zip(&batch.len) {
        for (query, row) in queries.clone().zip(&mut rows) {
            let end = (query + 1).min(start + len);
            if start < end {
                row[start..end].fill(0.0);
            }
        }
    }
    data.contains(&MASKED).then(|| Tensor::from_data(TensorData::new(data, shape), device))
}

#[cfg(test)]
mod tests;
