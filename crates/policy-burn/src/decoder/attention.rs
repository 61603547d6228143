//! Grouped-query attention (arXiv 2305.13245) with rotary positions.

use super::cache::KvCache;
use super::layers::Linear;
use super::rope::Rotation;
use burn::module::Module;
use burn::tensor::activation::softmax;
use burn::tensor::{Device, Tensor};
use models::ModelConfig;

/// Causal self-attention in which each of K key/value heads serves R = A / K query heads.
#[derive(Module, Debug)]
pub struct Attention {
    /// The projection `[H, (A + 2K) D]` to query heads, then key heads, then value heads: one product instead of three.
    pub qkv_proj: Linear,
    /// The projection `[A D, H]` back to the residual stream.
    pub o_proj: Linear,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
}

impl Attention {
    pub(crate) fn new(config: &ModelConfig, seed: u64, name: &str, device: &Device) -> Self {
        let (h, d) = (config.hidden_size, config.head_dim());
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let std = config.initializer_range;
        let residual_std = std / (2.0 * config.num_hidden_layers as f64).sqrt();
        let qkv = [h, (heads + 2 * kv_heads) * d];
        Self {
            qkv_proj: Linear::new(qkv, true, std, seed, &format!("{name}.qkv_proj"), device),
            o_proj: Linear::new([heads * d, h], false, residual_std, seed, &format!("{name}.o_proj"), device),
            num_heads: heads,
            num_kv_heads: kv_heads,
            head_dim: d,
        }
    }

    /// `x: [B, T, H]` -> `[B, T, H]`. `mask: [B, 1, 1, T, S]` is added to the scores; with a cache, S counts its
    /// columns too.
    pub(crate) fn forward(
        &self,
        x: Tensor<3>,
        rotation: &Rotation,
        mask: Option<&Tensor<5>>,
        cache: Option<(&mut KvCache, usize)>,
    ) -> Tensor<3> {
        let [b, t, _] = x.dims();
        let (a, k, d) = (self.num_heads, self.num_kv_heads, self.head_dim);
        let r = a / k;

        let qkv = self.qkv_proj.forward(x).reshape([b, t, a + 2 * k, d]);
        let turned = rotation.apply(qkv.clone().narrow(2, 0, a + k));
        let queries = turned.clone().narrow(2, 0, a);
        let keys = turned.narrow(2, a, k).swap_dims(1, 2);
        let values = qkv.narrow(2, a + k, k).swap_dims(1, 2);
        let (keys, values) = match cache {
            Some((cache, layer)) => cache.append(layer, keys, values),
            None => (keys, values),
        };
        let s = keys.dims()[2];

        // The R queries of a key/value head are R T rows of one product: keys and values are never repeated.
        let queries = queries.reshape([b, t, k, r, d]).permute([0, 2, 3, 1, 4]).reshape([b, k, r * t, d]);
        let scores = queries.matmul(keys.swap_dims(2, 3)) * (1.0 / (d as f64).sqrt());
        let scores = match mask {
            Some(mask) => (scores.reshape([b, k, r, t, s]) + mask.clone()).reshape([b, k, r * t, s]),
            None => scores,
        };
        let mixed = softmax(scores, 3).matmul(values);
        let mixed = mixed.reshape([b, k, r, t, d]).permute([0, 3, 1, 2, 4]).reshape([b, t, a * d]);
        self.o_proj.forward(mixed)
    }
}
