//! Keys and values of positions already seen.

use burn::tensor::{Device, Tensor};

/// Keys and values of every layer for one batch of sequences, allocated once at full length.
#[derive(Debug)]
pub struct KvCache {
    /// The keys and values of each layer, `[B, K, capacity, D]`.
    layers: Vec<(Tensor<4>, Tensor<4>)>,
    /// The number of columns that are filled.
    length: usize,
}

impl KvCache {
    /// An empty cache for `shape = [B, K, capacity, D]`.
    pub(crate) fn new(num_layers: usize, shape: [usize; 4], device: &Device) -> Self {
        let layers = (0..num_layers).map(|_| (Tensor::zeros(shape, device), Tensor::zeros(shape, device))).collect();
        Self { layers, length: 0 }
    }

    /// The number of columns that are filled.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether nothing is cached yet.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The number of columns that fit.
    pub fn capacity(&self) -> usize {
        self.layers.first().map_or(0, |(keys, _)| keys.dims()[2])
    }

    /// Writes `keys, values: [B, K, T, D]` behind the filled columns of `layer` and returns all columns so far,
    /// `[B, K, len + T, D]`. [`KvCache::advance`] makes the columns count once every layer has written.
    pub(crate) fn append(&mut self, layer: usize, keys: Tensor<4>, values: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
        let [b, k, t, d] = keys.dims();
        let end = self.length + t;
        let write = |old: &mut Tensor<4>, new: Tensor<4>| {
            // Taking the tensor out leaves a single owner, so that the write is in place.
            let device = old.device();
            let owned = std::mem::replace(old, Tensor::zeros([0, 0, 0, 0], &device));
            *old = owned.slice_assign([0..b, 0..k, self.length..end, 0..d], new);
            old.clone().narrow(2, 0, end)
        };
        let (old_keys, old_values) = &mut self.layers[layer];
        (write(old_keys, keys), write(old_values, values))
    }

    /// Counts `columns` more as filled.
    pub(crate) fn advance(&mut self, columns: usize) {
        self.length += columns;
    }

    /// A cache in which every sequence stands `times` times in a row: samples of one prompt share its prefill.
    pub(crate) fn repeat_each(self, times: usize) -> Self {
        let repeat = |x: Tensor<4>| {
            let [b, k, s, d] = x.dims();
            x.reshape([b, 1, k * s, d]).expand([b, times, k * s, d]).reshape([b * times, k, s, d])
        };
        let layers = self.layers.into_iter().map(|(keys, values)| (repeat(keys), repeat(values))).collect();
        Self { layers, length: self.length }
    }
}
