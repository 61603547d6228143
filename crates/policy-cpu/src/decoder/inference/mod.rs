//! The decoder for sampling: no autodiff graph, packed weights, a cache of keys and values, and of the states of Gated DeltaNets.

mod cache;
mod forward;
mod weights;

pub use cache::Cache;
pub(crate) use forward::cap;

use super::batch::PackedBatch;
use super::host::storage;
use super::layers::activation;
use super::model::{Decoder, check};
use super::rope::Ropes;
use super::weight;
use grpo_backend_cpu::layers::{Activation, DeltaState, KvCache, Layers, PackedWeight, StoredWeight};
use grpo_burn::custom_op::elements;
use grpo_models::ModelConfig;
use grpo_policy::{Error, Result, RoutedExperts};
use weights::{Embedding, Layer, LayerAttention, LayerDeltaNet, LayerMixer, Norm};

/// The largest number of tokens of prompts that are prefilled together; a longer prompt is prefilled alone, in one piece. The C library returns
/// larger activations to the system after every layer: 8,192 tokens of a 0.5B model took 25 % more time (docs/notes/host-trainer.md).
const PREFILLED: usize = 1024;

/// The weights of a decoder, packed for sampling. Every output row depends only on the tokens of its own sequence, bit for bit.
#[derive(Debug)]
pub struct Inference {
    kernels: Layers,
    config: ModelConfig,
    ropes: Ropes,
    activation: Activation,
    /// `[V, H]`.
    embed_tokens: Embedding,
    layers: Vec<Layer>,
    norm: Norm,
    /// `[H, V]`.
    head: PackedWeight,
    /// `true` if caches record the experts of tokens.
    records_experts: bool,
}

impl Decoder {
    /// Returns the current weights in packed form, for sampling. Later updates of the decoder do not change them.
    ///
    /// # Errors
    /// [`Error::Other`] if the weights are not on burn's CPU backend.
    pub fn inference(&self) -> Result<Inference> {
        Inference::new(self)
    }
}

impl Inference {
    pub(super) fn new(model: &Decoder) -> Result<Self> {
        let kernels = model.kernels;
        let config = model.config().clone();
        let (mut layers, mut attentions, mut nets) = (Vec::new(), 0, 0);
        for block in &model.layers {
            let layer = Layer::new(&config, layers.len(), [attentions, nets], block)?;
            match &layer.mixer {
                LayerMixer::Attention { .. } => attentions += 1,
                LayerMixer::GatedDeltaNet { .. } => nets += 1,
            }
            layers.push(layer);
        }
        let head = storage(model.lm_head()?)?;
        Ok(Self {
            ropes: model.ropes.clone(),
            activation: activation(&config),
            embed_tokens: match &model.embed_tokens {
                weight::Weight::Parameter(table) => Embedding::Parameter(storage(table.val())?),
                weight::Weight::Stored(stored) => Embedding::Stored(stored.clone()),
            },
            layers,
            norm: Norm::new(&model.norm)?,
            head: kernels.pack_stored(&StoredWeight::new(
                &[elements("lm_head", &head).map_err(Error::other)?],
                config.hidden_size,
            )?),
            kernels,
            config,
            records_experts: false,
        })
    }

    /// Records the experts that routers choose in caches.
    #[must_use]
    pub fn recording_experts(self, records_experts: bool) -> Self {
        Self { records_experts, ..self }
    }

    /// Returns `true` if caches record the experts of tokens.
    pub fn records_experts(&self) -> bool {
        self.records_experts
    }

    /// Returns the number of recorded experts of a token, L k; 0 if there are none.
    fn recorded_width(&self) -> usize {
        let of_layer = self.config.experts.as_ref().map_or(0, |experts| experts.num_experts_per_tok);
        if self.records_experts { of_layer * self.config.routers() } else { 0 }
    }

    /// Returns V, the number of logits per row.
    pub fn vocab(&self) -> usize {
        self.config.vocab_size
    }

    /// Returns the number of weights.
    pub(crate) fn weights(&self) -> u64 {
        self.config.parameter_count()
    }

    /// Checks that a sequence of `length` tokens fits into the model's positions.
    ///
    /// # Errors
    /// [`Error::TooLong`].
    pub fn check_length(&self, length: usize) -> Result<()> {
        check(&self.config, &[], length)
    }

    /// Returns logits `[B, V]` after each prompt, and a cache for `per_prompt` samples of each prompt with room for `capacity` tokens each.
    ///
    /// # Errors
    /// [`Error::TooLong`] if a prompt exceeds the model's positions, [`Error::Model`] for an unknown token, [`Error::Argument`] for an empty
    /// prompt.
    pub fn prefill<S: AsRef<[u32]>>(
        &self,
        prompts: &[S],
        per_prompt: usize,
        capacity: usize,
    ) -> Result<(Vec<f32>, Cache)> {
        let lengths: Vec<usize> = prompts.iter().map(|prompt| prompt.as_ref().len()).collect();
        let attentions = self.layers.iter().filter_map(|layer| match &layer.mixer {
            LayerMixer::Attention { attention, .. } => Some((attention.heads, attention.scores)),
            LayerMixer::GatedDeltaNet { .. } => None,
        });
        let attentions: Vec<_> = attentions.collect();
        let kv = KvCache::new(&attentions, &lengths, per_prompt, capacity);
        let mut cache =
            Cache { kv, states: vec![Vec::new(); self.layers.len() - attentions.len()], routed: Vec::new() };
        let mut last = Vec::with_capacity(prompts.len() * self.config.hidden_size);
        let (mut rest, mut lengths) = (prompts, &lengths[..]);
        while !rest.is_empty() {
            let mut tokens = 0;
            let fits = |length: &&usize| {
                tokens += **length;
                tokens <= PREFILLED
            };
            let count = lengths.iter().take_while(fits).count().max(1);
            let (piece, of_piece) = rest.split_at(count);
            last.extend(self.prefill_piece(&PackedBatch::new(piece)?, per_prompt, &mut cache)?);
            (rest, lengths) = (of_piece, &lengths[count..]);
        }
        Ok((self.logits(Vec::new(), &last)?, cache))
    }

    /// Fills the cache of the next prompts. Returns the residual stream `[B, H]` after their last tokens.
    fn prefill_piece(&self, prompts: &PackedBatch, per_prompt: usize, cache: &mut Cache) -> Result<Vec<f32>> {
        check(&self.config, prompts.ids(), prompts.longest())?;
        let sequences = &prompts.sequences;
        let Cache { kv, states, routed } = cache;
        let attend = |index: usize, attention: &LayerAttention, qkv: Vec<f32>| {
            kv.fill_prompts(index, &qkv, &sequences.spans)?;
            attention.attended(self.kernels.attention(&qkv, attention.heads, attention.scores, &sequences.spans)?)
        };
        let recur = |index: usize, net: &LayerDeltaNet, rows: Vec<f32>| {
            let (y, of_prompts) =
                self.kernels.gated_delta_net_states(&rows, net.heads, net.weights(), &sequences.spans)?;
            states[index].extend(of_prompts.into_iter().flat_map(|state| vec![state; per_prompt]));
            Ok(y)
        };
        let last: Vec<usize> = sequences.spans.iter().map(|span| span.rows.end - 1).collect();
        let (x, chosen) = self.run(prompts.ids(), &sequences.positions, &last, attend, recur)?;
        let width = self.recorded_width();
        for span in &sequences.spans {
            let ids = chosen[span.rows.start * width..span.rows.end * width].to_vec();
            routed.extend(std::iter::repeat_n(RoutedExperts { width, ids }, per_prompt));
        }
        Ok(x)
    }

    /// Computes logits `[samples, V]` after one more token of each of `samples`, which are ascending sample indices of the cache. Overwrites
    /// `logits`; a loop over tokens passes the same vector, whose memory then is allocated once.
    ///
    /// # Errors
    /// [`Error::Argument`] if ids and samples do not fit each other or the cache, a sample is full, or samples do not ascend;
    /// [`Error::TooLong`] beyond the model's positions; [`Error::Model`] for an unknown token.
    pub fn decode(&self, ids: &[u32], samples: &[usize], cache: &mut Cache, logits: &mut Vec<f32>) -> Result<()> {
        let Cache { kv, states, routed } = cache;
        let is_free = |sample: &usize| *sample < kv.samples() && kv.free(*sample) > 0;
        if ids.len() != samples.len() || !samples.iter().all(is_free) || !samples.is_sorted_by(|a, b| a < b) {
            let expected = format!("as many ids as samples, and ascending samples below {} with room", kv.samples());
            return Err(Error::argument("decode", expected, format!("{} ids and {samples:?}", ids.len())));
        }
        let positions: Vec<usize> = samples.iter().map(|sample| kv.position(*sample)).collect();
        check(&self.config, ids, positions.iter().max().map_or(0, |position| position + 1))?;
        let lengths = vec![1; samples.len()];
        let attend = |index: usize, attention: &LayerAttention, qkv: Vec<f32>| {
            attention.attended(self.kernels.attention_cached(&qkv, kv, index, samples, 0)?)
        };
        let recur = |index: usize, net: &LayerDeltaNet, rows: Vec<f32>| {
            let of_samples = states[index].iter_mut().enumerate();
            let is_open = |(sample, state)| samples.binary_search(&sample).is_ok().then_some(state);
            let mut open: Vec<&mut DeltaState> = of_samples.filter_map(is_open).collect();
            Ok(self.kernels.gated_delta_net_continued(&rows, net.heads, net.weights(), &lengths, &mut open)?)
        };
        let all: Vec<usize> = (0..ids.len()).collect();
        let (x, chosen) = self.run(ids, &positions, &all, attend, recur)?;
        kv.advance(samples);
        for (sample, chosen) in samples.iter().zip(chosen.chunks(self.recorded_width().max(1))) {
            routed[*sample].ids.extend_from_slice(chosen);
        }
        *logits = self.logits(std::mem::take(logits), &x)?;
        Ok(())
    }

    /// Returns logits `[samples, V]` after one or more further tokens of each sample of the cache.
    ///
    /// # Errors
    /// See [`Inference::decode`].
    pub fn extend(&self, ids: &[&[u32]], cache: &mut Cache) -> Result<Vec<f32>> {
        let Cache { kv, states, routed } = cache;
        let fits = |(sample, ids): (usize, &&[u32])| !ids.is_empty() && ids.len() <= kv.free(sample);
        if ids.len() != kv.samples() || !ids.iter().enumerate().all(fits) {
            let expected = format!("at least one token for each of {} samples, and room for them", kv.samples());
            return Err(Error::argument("extend", expected, format!("{} lists of tokens", ids.len())));
        }
        let rows: Vec<u32> = ids.iter().copied().flatten().copied().collect();
        let positions: Vec<usize> = (ids.iter().enumerate())
            .flat_map(|(sample, ids)| {
                let first = kv.position(sample);
                first..first + ids.len()
            })
            .collect();
        check(&self.config, &rows, positions.iter().max().map_or(0, |position| position + 1))?;
        let firsts: Vec<usize> = ids
            .iter()
            .scan(0, |end, ids| {
                *end += ids.len();
                Some(*end - ids.len())
            })
            .collect();
        let longest = ids.iter().map(|ids| ids.len()).max().unwrap_or(0);
        // The samples that have a token number j, for each j.
        let open: Vec<Vec<usize>> =
            (0..longest).map(|j| (0..ids.len()).filter(|sample| j < ids[*sample].len()).collect()).collect();
        let lengths: Vec<usize> = ids.iter().map(|ids| ids.len()).collect();
        let attend = |index: usize, attention: &LayerAttention, qkv: Vec<f32>| {
            let heads = attention.heads;
            let (width, out_width) = (heads.row(), heads.query * heads.width);
            let mut out = vec![0.0; rows.len() * out_width];
            for (j, open) in open.iter().enumerate() {
                let of_tokens: Vec<f32> =
                    open.iter().flat_map(|s| &qkv[(firsts[*s] + j) * width..][..width]).copied().collect();
                let mixed = self.kernels.attention_cached(&of_tokens, kv, index, open, j)?;
                let attended = attention.attended(mixed)?;
                for (sample, row) in open.iter().zip(attended.chunks_exact(out_width)) {
                    out[(firsts[*sample] + j) * out_width..][..out_width].copy_from_slice(row);
                }
            }
            Ok(out)
        };
        let recur = |index: usize, net: &LayerDeltaNet, rows: Vec<f32>| {
            let mut all: Vec<&mut DeltaState> = states[index].iter_mut().collect();
            Ok(self.kernels.gated_delta_net_continued(&rows, net.heads, net.weights(), &lengths, &mut all)?)
        };
        let last: Vec<usize> = firsts.iter().zip(&lengths).map(|(first, length)| first + length - 1).collect();
        let (x, chosen) = self.run(&rows, &positions, &last, attend, recur)?;
        open.iter().for_each(|open| kv.advance(open));
        let width = self.recorded_width();
        for ((routed, first), ids) in routed.iter_mut().zip(&firsts).zip(ids) {
            routed.ids.extend_from_slice(&chosen[first * width..(first + ids.len()) * width]);
        }
        self.logits(Vec::new(), &x)
    }
}
