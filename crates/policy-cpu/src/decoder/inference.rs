//! The decoder for sampling: no autodiff graph, packed weights, a cache of keys and values, and of the states of Gated DeltaNets.

use super::batch::PackedBatch;
use super::experts::{ExpertsMlp, PackedExperts};
use super::gated_delta_net::GatedDeltaNet;
use super::layers::{Attention, Linear, Mixer, Mlp, RmsNorm, activation, scores};
use super::lora::LowRank;
use super::model::{Decoder, check};
use super::params::{read, storage};
use super::rope::Ropes;
use super::values::{ValueHeads, heads};
use super::weight::{self, Stored};
use backend_cpu::layers::{
    Activation, Add, DeltaHeads, DeltaState, DeltaWeights, HeadNorms, Heads, KvCache, Layers, Mixed, PackedWeight,
    Scores, StoredWeight,
};
use burn::backend::flex::FlexTensor;
use burn::module::Param;
use burn::tensor::Tensor;
use grpo_burn::custom_op::elements;
use models::{Experts, LayerRope, ModelConfig};
use policy::{Error, Result, RoutedExperts};
use std::borrow::Cow;

/// The largest number of tokens of prompts that are prefilled together; a longer prompt is prefilled alone, in one piece. The C library returns
/// larger activations to the system after every layer: 8,192 tokens of a model with 0.5 billion weights took 25 % more time (BENCHMARKS.md).
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

/// Keys and values, and states of Gated DeltaNets, of the sequences that are being sampled. States are those after all tokens of a sequence:
/// a cache continues sequences, and never goes back.
#[derive(Debug)]
pub struct Cache {
    /// Of the layers with attention.
    kv: KvCache,
    /// Of each layer with a Gated DeltaNet, a state per sample.
    states: Vec<Vec<DeltaState>>,
    /// The recorded experts of each sample.
    routed: Vec<RoutedExperts>,
}

impl Cache {
    /// Returns a cache that continues sequences of other caches, each given as its cache and the index of its sample, with room for `capacity`
    /// more tokens each.
    ///
    /// # Errors
    /// [`Error::Loss`] for an index beyond the samples of its cache.
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

    /// Returns the experts of the tokens of a sample in the cache; none unless [`Inference::recording_experts`].
    pub fn routed_experts(&self, sample: usize) -> RoutedExperts {
        self.routed.get(sample).cloned().unwrap_or_default()
    }
}

#[derive(Debug)]
enum Embedding {
    Parameter(FlexTensor),
    Stored(Stored),
}

#[derive(Debug)]
struct Layer {
    input_norm: Option<Norm>,
    mixer: LayerMixer,
    attn_output_norm: Option<Norm>,
    post_norm: Option<Norm>,
    mlp: LayerMlp,
    mlp_output_norm: Option<Norm>,
    /// Factor of the layer's output.
    factor: f64,
}

/// Attention or a Gated DeltaNet; `index` counts the layers of its kind.
#[derive(Debug)]
enum LayerMixer {
    Attention { index: usize, attention: LayerAttention },
    GatedDeltaNet { index: usize, net: LayerDeltaNet },
}

#[derive(Debug)]
struct LayerAttention {
    heads: Heads,
    values: Option<ValueHeads>,
    scores: Scores,
    rope: LayerRope,
    qkv: Weight,
    /// Norms of queries and keys.
    head_norms: Option<[Norm; 2]>,
    /// `true` if the values of query heads have gates.
    has_gates: bool,
    o: Weight,
    /// Logits of the sinks of query heads.
    sinks: Option<Vec<f32>>,
}

#[derive(Debug)]
struct LayerDeltaNet {
    heads: DeltaHeads,
    in_proj: Weight,
    conv: Vec<f32>,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Norm,
    out_proj: Weight,
}

#[derive(Debug)]
enum LayerMlp {
    Dense { gate_up: Weight, down: Weight },
    Experts { router: Weight, gate_up: PackedExperts, down: PackedExperts, spec: Experts },
}

#[derive(Debug)]
struct Norm {
    weight: Vec<f32>,
    eps: f64,
}

#[derive(Debug)]
struct Weight {
    matrix: Matrix,
    bias: Option<Vec<f32>>,
    /// Adapters that are not merged into the weight.
    adapters: Vec<Adapter>,
}

/// The matrix of a linear layer.
#[derive(Debug)]
enum Matrix {
    Packed(PackedWeight),
    /// Dequantised by every product: packed, it would take the memory that quantisation saves.
    Quantized(Stored),
}

impl Matrix {
    /// Returns `[in, out]`.
    fn dims(&self) -> [usize; 2] {
        match self {
            Self::Packed(weight) => weight.dims(),
            Self::Quantized(weight) => weight.dims(),
        }
    }
}

/// An adapter that is applied separately from its weight.
#[derive(Debug)]
struct Adapter {
    /// A^T `[in, r]`.
    a: PackedWeight,
    /// B^T `[r, width]`.
    b: PackedWeight,
    scale: f32,
    /// First output column of the adapter.
    first: usize,
}

impl Adapter {
    fn new(adapter: &LowRank) -> Result<Self> {
        let kernels = Layers::new();
        let packed = |matrix: &Param<Tensor<2>>| {
            let values = storage(matrix.val())?;
            Ok::<_, Error>(kernels.pack_stored(&StoredWeight::new(&[read(&values)?.into()], matrix.dims()[1])?))
        };
        let (a, b) = (packed(&adapter.a)?, packed(&adapter.b)?);
        Ok(Self { a, b, scale: adapter.scale as f32, first: adapter.first })
    }

    /// Adds s x A^T B^T to the adapter's columns of y `[n, out]`.
    fn add_to(&self, kernels: Layers, x: &[f32], y: &mut [f32], n: usize) -> Result<()> {
        let inner = kernels.linear_packed(x, &self.a, Add::Nothing, n)?;
        let outer = kernels.linear_packed(&inner, &self.b, Add::Nothing, n)?;
        let (width, columns) = (self.b.dims()[1], y.len() / n.max(1));
        for (row, added) in y.chunks_exact_mut(columns.max(1)).zip(outer.chunks_exact(width.max(1))) {
            row[self.first..self.first + width].iter_mut().zip(added).for_each(|(y, added)| *y += self.scale * added);
        }
        Ok(())
    }
}

fn to_vec<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>> {
    Ok(read(&storage(tensor)?)?.to_vec())
}

impl Norm {
    fn new(norm: &RmsNorm) -> Result<Self> {
        let mut weight = to_vec(norm.weight.val())?;
        if norm.offset != 0.0 {
            weight.iter_mut().for_each(|weight| *weight += norm.offset as f32);
        }
        Ok(Self { weight, eps: norm.eps })
    }

    fn optional(norm: &Option<RmsNorm>) -> Result<Option<Self>> {
        norm.as_ref().map(Self::new).transpose()
    }
}

impl LayerMlp {
    fn of_experts(mlp: &ExpertsMlp, router: Weight, hidden: usize) -> Result<Self> {
        let [gate_up, down] = mlp.packed(hidden)?;
        Ok(Self::Experts { router, gate_up, down, spec: mlp.spec().clone() })
    }
}

impl LayerDeltaNet {
    fn new(net: &GatedDeltaNet) -> Result<Self> {
        Ok(Self {
            heads: net.heads(),
            in_proj: Weight::new(&net.in_proj)?,
            conv: to_vec(net.conv.val())?,
            a_log: to_vec(net.a_log.val())?,
            dt_bias: to_vec(net.dt_bias.val())?,
            norm: Norm { weight: to_vec(net.norm.val())?, eps: net.eps() },
            out_proj: Weight::new(&net.out_proj)?,
        })
    }

    fn weights(&self) -> DeltaWeights<'_> {
        let Self { conv, a_log, dt_bias, norm, .. } = self;
        DeltaWeights { conv, a_log, dt_bias, norm: &norm.weight, eps: norm.eps }
    }
}

impl LayerAttention {
    fn new(config: &ModelConfig, layer: usize, attention: &Attention) -> Result<Self> {
        let spec = config.layer(layer);
        Ok(Self {
            heads: heads(config, spec),
            values: ValueHeads::of(config, spec),
            scores: scores(config, spec),
            rope: spec.rope,
            qkv: Weight::new(&attention.qkv_proj)?,
            head_norms: match (&attention.q_norm, &attention.k_norm) {
                (Some(query), Some(key)) => Some([Norm::new(query)?, Norm::new(key)?]),
                _ => None,
            },
            has_gates: config.attention_output_gate,
            o: Weight::new(&attention.o_proj)?,
            sinks: attention.sinks.as_ref().map(Param::val).map(to_vec).transpose()?,
        })
    }

    /// Returns the values of attention, after the sinks.
    fn attended(&self, mut mixed: Mixed) -> Result<Vec<f32>> {
        if let Some(sinks) = &self.sinks {
            mixed.add_sinks(self.heads, sinks)?;
        }
        Ok(mixed.values)
    }
}

impl Weight {
    fn new(linear: &Linear) -> Result<Self> {
        let (kernels, dims) = (linear.kernels, linear.weight.dims());
        let mut adapters = Vec::new();
        let bias = linear.bias.as_ref().map(Param::val).map(to_vec).transpose()?;
        if let weight::Weight::Stored(stored) = &linear.weight
            && stored.is_quantized()
        {
            let adapters = linear.adapters.iter().map(Adapter::new).collect::<Result<_>>()?;
            return Ok(Self { matrix: Matrix::Quantized(stored.clone()), bias, adapters });
        }
        let weight = match (linear.adapters.as_slice(), &linear.weight) {
            ([], weight::Weight::Parameter(weight)) => kernels.pack_weight(read(&storage(weight.val())?)?, dims)?,
            ([], weight::Weight::Stored(stored)) => kernels.pack_stored(&stored.view()?),
            // A large bf16 weight stays bf16 and its adapters separate: a merged weight would need f32, and adapters are small in
            // comparison.
            (of_linear, weight::Weight::Stored(stored))
                if kernels.rounds_operands() || stored.view()?.packs_narrow() =>
            {
                adapters = of_linear.iter().map(Adapter::new).collect::<Result<_>>()?;
                kernels.pack_stored(&stored.view()?)
            }
            // Rounding a merged weight would change what the adapters add, which scoring computes in f32.
            (of_linear, weight::Weight::Parameter(weight)) if kernels.rounds_operands() => {
                adapters = of_linear.iter().map(Adapter::new).collect::<Result<_>>()?;
                kernels.pack_weight(read(&storage(weight.val())?)?, dims)?
            }
            // Otherwise adapters are merged, so they cost nothing per token.
            _ => kernels.pack_weight(&linear.merged()?, dims)?,
        };
        Ok(Self { matrix: Matrix::Packed(weight), bias, adapters })
    }
}

impl Inference {
    pub(super) fn new(model: &Decoder) -> Result<Self> {
        let kernels = model.kernels;
        let weight = Weight::new;
        let config = model.config().clone();
        let (mut attentions, mut nets) = (0.., 0..);
        let layers = model.layers.iter().enumerate().map(|(number, layer)| {
            let factor = layer.layer_scalar.as_ref().map(Param::val).map(to_vec).transpose()?;
            Ok(Layer {
                input_norm: Norm::optional(&layer.input_norm)?,
                mixer: match &layer.attn {
                    Mixer::Attention(attention) => LayerMixer::Attention {
                        index: attentions.next().unwrap_or(0),
                        attention: LayerAttention::new(&config, number, attention)?,
                    },
                    Mixer::GatedDeltaNet(net) => {
                        LayerMixer::GatedDeltaNet { index: nets.next().unwrap_or(0), net: LayerDeltaNet::new(net)? }
                    }
                },
                attn_output_norm: Norm::optional(&layer.attn_output_norm)?,
                post_norm: Norm::optional(&layer.post_norm)?,
                mlp: match &layer.mlp {
                    Mlp::Dense(mlp) => {
                        LayerMlp::Dense { gate_up: weight(&mlp.gate_up_proj)?, down: weight(&mlp.down_proj)? }
                    }
                    Mlp::Experts(mlp) => LayerMlp::of_experts(mlp, weight(&mlp.router)?, config.hidden_size)?,
                },
                mlp_output_norm: Norm::optional(&layer.mlp_output_norm)?,
                factor: factor.as_deref().and_then(<[f32]>::first).map_or(1.0, |factor| f64::from(*factor)),
            })
        });
        let layers = layers.collect::<Result<_>>()?;
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
        if self.records_experts { of_layer * self.layers.len() } else { 0 }
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
        Ok((self.logits(&last)?, cache))
    }

    /// Fills the cache of the next prompts. Returns the residual stream `[B, H]` after their last tokens.
    fn prefill_piece(&self, prompts: &PackedBatch, per_prompt: usize, cache: &mut Cache) -> Result<Vec<f32>> {
        check(&self.config, prompts.ids(), prompts.longest())?;
        let (sequences, h) = (&prompts.sequences, self.config.hidden_size);
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
        let (x, chosen) = self.run(prompts.ids(), &sequences.positions, attend, recur)?;
        let width = self.recorded_width();
        for span in &sequences.spans {
            let ids = chosen[span.rows.start * width..span.rows.end * width].to_vec();
            routed.extend(std::iter::repeat_n(RoutedExperts { width, ids }, per_prompt));
        }
        let last = sequences.spans.iter().flat_map(|span| &x[(span.rows.end - 1) * h..span.rows.end * h]);
        Ok(last.copied().collect())
    }

    /// Returns logits `[samples, V]` after one more token of each of `samples`, which are ascending sample indices of the cache.
    ///
    /// # Errors
    /// [`Error::Argument`] if ids and samples do not fit each other or the cache, a sample is full, or samples do not ascend;
    /// [`Error::TooLong`] beyond the model's positions; [`Error::Model`] for an unknown token.
    pub fn decode(&self, ids: &[u32], samples: &[usize], cache: &mut Cache) -> Result<Vec<f32>> {
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
        let (x, chosen) = self.run(ids, &positions, attend, recur)?;
        kv.advance(samples);
        for (sample, chosen) in samples.iter().zip(chosen.chunks(self.recorded_width().max(1))) {
            routed[*sample].ids.extend_from_slice(chosen);
        }
        self.logits(&x)
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
        let (x, chosen) = self.run(&rows, &positions, attend, recur)?;
        open.iter().for_each(|open| kv.advance(open));
        let width = self.recorded_width();
        for ((routed, first), ids) in routed.iter_mut().zip(&firsts).zip(ids) {
            routed.ids.extend_from_slice(&chosen[first * width..(first + ids.len()) * width]);
        }
        let h = self.config.hidden_size;
        let last: Vec<f32> =
            firsts.iter().zip(ids).flat_map(|(first, ids)| &x[(first + ids.len() - 1) * h..][..h]).copied().collect();
        self.logits(&last)
    }

    /// Returns the residual stream `[N, H]` after the last layer, and the experts `[N, L, k]` of the rows if they are recorded. `attend` computes
    /// the attention `[N, A D]` of a layer from queries, keys and values after the rotary embedding, `recur` the output `[N, Hv Dv]` of a Gated
    /// DeltaNet from its projected input. Both get the index of the layer among the layers with the same mixer.
    fn run(
        &self,
        ids: &[u32],
        positions: &[usize],
        mut attend: impl FnMut(usize, &LayerAttention, Vec<f32>) -> Result<Vec<f32>>,
        mut recur: impl FnMut(usize, &LayerDeltaNet, Vec<f32>) -> Result<Vec<f32>>,
    ) -> Result<(Vec<f32>, Vec<u16>)> {
        let (kernels, h) = (self.kernels, self.config.hidden_size);
        let mut x: Vec<f32> = match &self.embed_tokens {
            Embedding::Stored(table) => table.rows(ids)?,
            Embedding::Parameter(table) => {
                let table = read(table)?;
                ids.iter().flat_map(|id| &table[*id as usize * h..(*id as usize + 1) * h]).copied().collect()
            }
        };
        scale(&mut x, self.config.embedding_multiplier);
        let width = self.recorded_width();
        let mut recorded = vec![0; ids.len() * width];
        let ropes = self.ropes.tables(positions.iter().max().map_or(0, |position| position + 1))?;
        for (number, layer) in self.layers.iter().enumerate() {
            let normed = self.optionally_normalised(&x, &layer.input_norm)?;
            let (mixed, project) = match &layer.mixer {
                LayerMixer::Attention { index, attention } => {
                    let heads = attention.heads;
                    let mut qkv = self.linear(&normed, &attention.qkv, None)?;
                    let gates = attention.has_gates.then(|| take_gates(&mut qkv, heads));
                    if let Some(values) = attention.values {
                        qkv = values.forward(&qkv)?.0;
                    }
                    if let Some([query, key]) = &attention.head_norms {
                        let norms = HeadNorms { query: &query.weight, key: &key.weight, eps: query.eps };
                        qkv = kernels.norm_heads(&qkv, heads, norms)?.0;
                    }
                    if let Some(rope) = ropes.get(attention.rope) {
                        kernels.rotate(&mut qkv, heads, rope, positions)?;
                    }
                    let mut values = attend(*index, attention, qkv)?;
                    if let Some(gates) = gates {
                        values.iter_mut().zip(gates).for_each(|(value, gate)| *value /= 1.0 + (-gate).exp());
                    }
                    (values, &attention.o)
                }
                LayerMixer::GatedDeltaNet { index, net } => {
                    (recur(*index, net, self.linear(&normed, &net.in_proj, None)?)?, &net.out_proj)
                }
            };
            drop(normed);
            x = self.added(x, mixed, project, &layer.attn_output_norm)?;
            let normed = self.optionally_normalised(&x, &layer.post_norm)?;
            match &layer.mlp {
                LayerMlp::Dense { gate_up, down } => {
                    let gate_up = self.linear(&normed, gate_up, None)?;
                    let mixed = kernels.gated(&gate_up, self.activation, self.config.intermediate_size)?;
                    drop(normed);
                    x = self.added(x, mixed, down, &layer.mlp_output_norm)?;
                }
                LayerMlp::Experts { router, gate_up, down, spec } => {
                    let logits = self.linear(&normed, router, None)?;
                    let routing =
                        kernels.route(&logits, spec.num_experts, spec.num_experts_per_tok, spec.norm_topk_prob)?;
                    if width > 0 {
                        let top = spec.num_experts_per_tok;
                        let rows = recorded.chunks_exact_mut(width).zip(routing.chosen().chunks_exact(top));
                        rows.for_each(|(row, chosen)| {
                            let of_layer = &mut row[number * top..(number + 1) * top];
                            // A model has at most 2^12 experts.
                            of_layer.iter_mut().zip(chosen).for_each(|(to, id)| *to = *id as u16);
                        });
                    }
                    let (update, _) =
                        kernels.experts(&normed, &routing, &gate_up.view(), &down.view(), self.activation)?;
                    drop(normed);
                    x = self.plus(x, update, &layer.mlp_output_norm)?;
                }
            }
            scale(&mut x, layer.factor);
        }
        Ok((x, recorded))
    }

    /// Returns the residual stream plus the normalised `update` times the multiplier.
    fn plus(&self, mut x: Vec<f32>, update: Vec<f32>, norm: &Option<Norm>) -> Result<Vec<f32>> {
        let mut update = if let Some(norm) = norm { self.normalised(&update, norm)? } else { update };
        scale(&mut update, self.config.residual_multiplier);
        x.iter_mut().zip(update).for_each(|(x, update)| *x += update);
        Ok(x)
    }

    /// Returns the residual stream plus the normalised projection of `mixed`, times the multiplier.
    fn added(&self, x: Vec<f32>, mut mixed: Vec<f32>, project: &Weight, norm: &Option<Norm>) -> Result<Vec<f32>> {
        if norm.is_none() && project.bias.is_none() {
            // The projection is linear.
            scale(&mut mixed, self.config.residual_multiplier);
            return self.linear(&mixed, project, Some(&x));
        }
        let update = self.linear(&mixed, project, None)?;
        self.plus(x, update, norm)
    }

    /// Applies the final norm and the head.
    fn logits(&self, x: &[f32]) -> Result<Vec<f32>> {
        let n = x.len() / self.config.hidden_size;
        let mut hidden = self.normalised(x, &self.norm)?;
        scale(&mut hidden, 1.0 / self.config.logits_scaling);
        let mut logits = self.kernels.linear_packed(&hidden, &self.head, Add::Nothing, n)?;
        cap(&mut logits, self.config.final_logit_softcapping);
        Ok(logits)
    }

    fn optionally_normalised<'a>(&self, x: &'a [f32], norm: &Option<Norm>) -> Result<Cow<'a, [f32]>> {
        match norm {
            Some(norm) => Ok(Cow::Owned(self.normalised(x, norm)?)),
            None => Ok(Cow::Borrowed(x)),
        }
    }

    fn normalised(&self, x: &[f32], norm: &Norm) -> Result<Vec<f32>> {
        Ok(self.kernels.rms_norm(x, &norm.weight, norm.eps)?.0)
    }

    fn linear(&self, x: &[f32], of: &Weight, residual: Option<&[f32]>) -> Result<Vec<f32>> {
        let n = x.len() / of.matrix.dims()[0];
        let add = match (&of.bias, residual) {
            (Some(bias), _) => Add::Rows(bias),
            (None, Some(residual)) => Add::Residual(residual),
            (None, None) => Add::Nothing,
        };
        let mut y = match &of.matrix {
            Matrix::Packed(weight) => self.kernels.linear_packed(x, weight, add, n)?,
            Matrix::Quantized(weight) => self.kernels.linear_stored(x, &weight.view()?, add, n)?,
        };
        of.adapters.iter().try_for_each(|adapter| adapter.add_to(self.kernels, x, &mut y, n))?;
        Ok(y)
    }
}

/// Removes the gates behind the query heads from rows `[N, (2A + 2K) D]`, which become `[N, (A + 2K) D]`, and returns them, `[N, A D]`.
fn take_gates(rows: &mut Vec<f32>, heads: Heads) -> Vec<f32> {
    let (d, queries) = (heads.width, heads.query * heads.width);
    let (mut gates, mut qkv) = (Vec::new(), Vec::new());
    for row in rows.chunks_exact((heads.row() + queries).max(1)) {
        let (of_queries, rest) = row.split_at(2 * queries);
        for head in of_queries.chunks_exact(2 * d) {
            qkv.extend_from_slice(&head[..d]);
            gates.extend_from_slice(&head[d..]);
        }
        qkv.extend_from_slice(rest);
    }
    *rows = qkv;
    gates
}

/// Applies the softcap to logits, if there is one.
pub(crate) fn cap(logits: &mut [f32], cap: Option<f64>) {
    if let Some(cap) = cap.map(|cap| cap as f32) {
        logits.iter_mut().for_each(|logit| *logit = cap * (*logit / cap).tanh());
    }
}

/// Multiplies `x` by `factor`, unless it is 1.
fn scale(x: &mut [f32], factor: f64) {
    if factor != 1.0 {
        x.iter_mut().for_each(|x| *x *= factor as f32);
    }
}
