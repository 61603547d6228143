//! The state of sequences that are being sampled.

use grpo_backend_cpu::layers::{DeltaState, KvCache};
use grpo_policy::{Result, RoutedExperts};

/// Keys and values, and states of Gated DeltaNets, of the sequences that are being sampled. States are those after all tokens of a sequence:
/// a cache continues sequences, and never goes back.
#[derive(Debug)]
pub struct Cache {
    /// Of the layers with attention.
    pub(super) kv: KvCache,
    /// Of each layer with a Gated DeltaNet, a state per sample.
    pub(super) states: Vec<Vec<DeltaState>>,
    /// The recorded experts of each sample.
    pub(super) routed: Vec<RoutedExperts>,
}

impl Cache {
    /// Returns a cache that continues sequences of other caches, each given as its cache and the index of its sample, with room for `capacity`
    /// more tokens each.
    ///
    /// # Errors
    /// [`grpo_policy::Error::Loss`] for an index beyond the samples of its cache.
    pub fn continued(sequences: &[(&Cache, usize)], capacity: usize) -> Result<Self> {
        let caches: Vec<_> = sequences.iter().map(|(cache, sample)| (&cache.kv, *sample)).collect();
        let kv = KvCache::continued(&caches, capacity)?;
        // All caches are of the same model, and their samples exist.
        let layers = sequences.first().map_or(0, |(cache, _)| cache.states.len());
        let states = (0..layers)
            .map(|layer| sequences.iter().map(|(cache, sample)| cache.states[layer][*sample].clone()).collect());
        let routed = sequences.iter().map(|(cache, sample)| cache.routed_experts(*sample));
        Ok(Self { states: states.collect(), routed: routed.collect(), kv })
    }

    /// Returns the number of tokens of a sample in the cache, including its prompt.
    pub fn tokens(&self, sample: usize) -> usize {
        self.kv.position(sample)
    }

    /// Returns the experts of the tokens of a sample in the cache; none unless [`super::Inference::recording_experts`].
    pub fn routed_experts(&self, sample: usize) -> RoutedExperts {
        self.routed.get(sample).cloned().unwrap_or_default()
    }
}
