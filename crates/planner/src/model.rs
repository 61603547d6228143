//! The cost model: predicted time and memory of a run on a mesh, without a compiler.
//!
//! Legend: L layers, M tokens of a micro-batch on a device, T tokens of a row, N completion tokens, H hidden size, I width of the MLP,
//! A query heads, V vocabulary.
//!
//! The time of a program on each device is a sum of three kinds of parts, because the compilers do not overlap them:
//!
//! ```text
//! matmuls              max(flops / peak, bytes of the weights / memory bandwidth)
//! everything else      bytes that it moves / memory bandwidth
//! collectives          received bytes / bandwidth of the links, and the bytes written and read again / memory bandwidth
//! ```
//!
//! A forward pass runs once for the result and again for each recomputation; the backward pass costs two. Per layer and forward pass, a device
//! gathers the weights of the layer over `fsdp`, and over `tensor` the tokens of the residual stream before attention and MLP, whose outputs it
//! reduces and scatters. The backward pass gathers weights once more and reduces gradients in f32, over `fsdp` and over `data`. The chunks of
//! Gated DeltaNets are not counted, only their projections: the predicted times of such models are too short.
//!
//! The constants of traffic and of temporaries are fitted to libtpu's allocations and estimates for updates of Qwen2.5 0.5B, 1.5B and 7B
//! (BENCHMARKS.md). `tests/fast/plan.rs` checks memory and update time against the same programs within 10 %. Times of rollouts, scores and links are
//! not compared with anything; libtpu's estimates leave out the links.

use crate::cost::Cost;
use crate::devices::Devices;
use crate::mesh::MeshRules;
use grpo_models::{LayerSpec, ModelConfig};
use grpo_policy_pjrt::decoder::{Axis, AxisRules, Compute, Parameter, parameters};
use grpo_policy_pjrt::{PjrtPolicyOptions, TrainShape, saved_on_device};
use grpo_run_config::{MeshAxis, PolicyConfig, RecomputeGranularity, TrainConfig};

/// Bytes moved per element of the attention scores `[M, A, T]` in a forward and in a backward pass.
const SCORES: [f64; 2] = [4.0, 20.0];
/// How often an activation `[M, I]` of the MLP is moved per forward pass.
const MLP: f64 = 2.5;
/// How often an activation `[M, H]` of the residual stream is moved per forward pass.
const RESIDUAL: f64 = 4.0;
/// Bytes moved per logit in the loss and its gradient.
const LOGITS: f64 = 12.0;
/// Completion tokens per chunk of logits; every chunk reads the head, and reads and writes its gradient.
const CHUNK: f64 = 2048.0;
/// Bytes that AdamW moves per weight without moments: reads of weight and gradient in f32, and writes of the weight.
const ADAMW: f64 = 12.0;
/// Passes of bf16 matmuls for one matmul of f32 operands.
const F32_PASSES: f64 = 6.0;
/// How often bytes that a collective receives are moved in memory: weights and their gradients, and activations.
const WEIGHTS: f64 = 2.0;
const ACTIVATIONS: f64 = 3.0;
/// Temporaries of the backward pass of a layer, as numbers of activations `[M, I]` and `[M, H]`, and of gathered weights of a layer.
const TEMPORARIES: [f64; 3] = [2.0, 6.0, 2.5];

/// Adds up the cost of a program on a mesh.
struct Meter<'a> {
    devices: &'a Devices,
    rules: &'a AxisRules,
    compute: Compute,
    cost: Cost,
}

impl<'a> Meter<'a> {
    fn new(devices: &'a Devices, rules: &'a AxisRules, compute: Compute) -> Self {
        Self { devices, rules, compute, cost: Cost::default() }
    }

    /// Adds matmuls with weights of this size.
    fn matmuls(&mut self, flops: f64, weight_bytes: f64) {
        let passes = if self.compute == Compute::F32 { F32_PASSES } else { 1.0 };
        let chip = &self.devices.chip;
        self.cost.chip_seconds += (passes * flops / chip.peak_flops).max(weight_bytes / chip.bandwidth);
    }

    /// Adds memory traffic.
    fn moves(&mut self, bytes: f64) {
        self.cost.chip_seconds += bytes / self.devices.chip.bandwidth;
    }

    /// Adds a gather of `bytes` over an axis, or a reduction that scatters them: a device receives all but its own shard.
    fn gathers(&mut self, axis: MeshAxis, bytes: f64) {
        let size = size(self.rules, axis);
        let received = bytes * (size as f64 - 1.0) / size as f64;
        self.cost.link_seconds += received / self.devices.received_per_second(size, stride(self.rules, axis));
        self.moves(if axis == MeshAxis::Tensor { ACTIVATIONS } else { WEIGHTS } * received);
        self.cost.receive(axis, received);
    }

    /// Adds a reduction of `bytes` over an axis whose result is on every device.
    fn reduces(&mut self, axis: MeshAxis, bytes: f64) {
        self.gathers(axis, 2.0 * bytes);
    }
}

/// Returns the number of devices along an axis.
fn size(rules: &AxisRules, axis: MeshAxis) -> usize {
    rules.mesh().size(axis.name()).unwrap_or(1)
}

/// Returns the distance of neighbouring devices along an axis: the last axis is the innermost.
fn stride(rules: &AxisRules, axis: MeshAxis) -> usize {
    let inside = rules.mesh().axes().iter().rev().take_while(|(name, _)| name != axis.name());
    inside.map(|(_, size)| size).product()
}

/// How often a micro-batch runs the layers.
#[derive(Clone, Copy, Debug)]
struct Passes {
    /// Forward passes of matmuls with weights, with recomputation.
    forward: f64,
    /// Forward passes of everything between them.
    elementwise: f64,
    /// Forward passes of attention.
    attention: f64,
    /// Backward passes, in units of forward matmuls.
    backward: f64,
    /// Gathers of all weights over `fsdp`.
    weights: f64,
    /// Passes with collectives of activations over `tensor`.
    activations: f64,
}

impl Passes {
    /// Returns the passes of scoring.
    const SCORE: Self =
        Self { forward: 1.0, elementwise: 1.0, attention: 1.0, backward: 0.0, weights: 1.0, activations: 1.0 };

    /// Returns the passes of a micro-batch in training, with blockwise attention or with materialised scores.
    fn of_training(config: &TrainConfig, is_blockwise: bool) -> Self {
        use RecomputeGranularity::{ExceptAttention, Full, None, Selective};
        let PolicyConfig { recompute_granularity, recompute_num_layers, .. } = config.policy;
        let [forward, elementwise, attention] = match recompute_granularity {
            Full if recompute_num_layers > 1 => [3.0; 3],
            Full => [2.0; 3],
            // Only the output of blockwise attention has a name.
            ExceptAttention => [2.0, 2.0, if is_blockwise { 1.0 } else { 2.0 }],
            // The products of blockwise attention are inside of its loop over blocks, and are not saved.
            Selective => [1.0, 2.0, if is_blockwise { 2.0 } else { 1.0 }],
            None => [1.0; 3],
        };
        Self {
            forward,
            elementwise,
            attention,
            // Frozen weights have no gradient.
            backward: if config.lora.is_some() { 1.0 } else { 2.0 },
            // The backward pass of a layer gathers its weights once, for its recomputation as well.
            weights: f64::max(forward, 2.0),
            activations: forward + 1.0,
        }
    }
}

/// The sizes of a model on each device of a mesh.
struct Model<'a> {
    shape: &'a ModelConfig,
    /// The elements of the layers' matrices, and of all parameters.
    matrices: f64,
    elements: f64,
    /// The elements of the layers' matrices of experts.
    experts: f64,
    /// The number of shards of key/value heads; devices hold copies of a head if there are fewer heads than shards.
    kv_parts: f64,
    /// Bytes of an operand's element.
    operand: f64,
}

impl<'a> Model<'a> {
    fn new(shape: &'a ModelConfig, rules: &AxisRules, compute: Compute) -> Self {
        let (table, own) = (parameters(shape), rules.clone().for_model(shape));
        let count = |is_in: &dyn Fn(&Parameter) -> bool| {
            table.iter().filter(|p| is_in(p)).map(|p| own.elements(p) as f64).sum::<f64>()
        };
        Self {
            shape,
            matrices: count(&|p| p.has_matrices() && p.is_stacked()),
            elements: count(&|_| true),
            experts: count(&|p| p.has_matrices() && p.role.is_of_experts()),
            kv_parts: own.parts(Axis::Kv) as f64,
            operand: compute.dtype().bytes() as f64,
        }
    }

    fn layers(&self) -> f64 {
        self.shape.num_hidden_layers as f64
    }

    fn width(&self) -> f64 {
        self.shape.hidden_size as f64
    }

    /// Returns the elements of the layers' matrices on a device after they were gathered over `fsdp`.
    fn gathered(&self, rules: &AxisRules) -> f64 {
        self.matrices * rules.parts(Axis::Embed) as f64
    }

    /// Returns the weights per token of the gathered matrices of layers. `share` is the share of the products of experts that are computed
    /// ([`grpo_policy_pjrt::decoder::ExpertProducts::share`]).
    fn multiplied(&self, rules: &AxisRules, share: f64) -> f64 {
        (self.matrices - (1.0 - share) * self.experts) * rules.parts(Axis::Embed) as f64
    }
}

/// The cost model of a run on a mesh.
pub(crate) struct CostModel<'a> {
    config: &'a TrainConfig,
    shape: &'a ModelConfig,
    devices: &'a Devices,
    meshes: &'a MeshRules,
    options: &'a PjrtPolicyOptions,
    /// The tokens of the longest prompt.
    prompt: usize,
    of_training: Model<'a>,
    of_rollout: Model<'a>,
    /// The bytes of the activations that the layers save for a row, without their inputs.
    saved_bytes: u64,
}

impl<'a> CostModel<'a> {
    pub(crate) fn new(
        config: &'a TrainConfig,
        shape: &'a ModelConfig,
        prompt: usize,
        meshes: &'a MeshRules,
        devices: &'a Devices,
        options: &'a PjrtPolicyOptions,
    ) -> Self {
        let [of_training, of_rollout] =
            [&meshes.training, &meshes.rollout].map(|rules| Model::new(shape, rules, options.compute));
        Self { config, shape, devices, meshes, options, prompt, of_training, of_rollout, saved_bytes: 0 }
    }

    /// Sets the bytes of the activations that the layers save for a row of a micro-batch.
    pub(crate) fn saving(self, saved_bytes: u64) -> Self {
        Self { saved_bytes, ..self }
    }

    /// Returns the cost of an update: the gradients of its micro-batches, and AdamW.
    pub(crate) fn update(&self) -> Cost {
        let micro_batches = self.config.grpo.gradient_accumulation_steps;
        let is_blockwise = self.options.attention.block(self.micro_batch().length).is_some();
        let passes = Passes::of_training(self.config, is_blockwise);
        let layers = self.layers(passes) + self.saved_activations();
        (layers + self.head(3.0) + self.gradients(micro_batches)) * micro_batches + self.optimizer()
    }

    /// Returns the cost of the log-probabilities of a micro-batch.
    pub(crate) fn score(&self) -> Cost {
        self.layers(Passes::SCORE) + self.head(1.0)
    }

    /// Returns the cost of a rollout of as many sequences as decode in parallel, each of full length.
    pub(crate) fn rollout(&self) -> Cost {
        let completion = self.config.rollout.max_completion_length();
        self.prefill() + self.decode() * completion.saturating_sub(1).max(1)
    }

    /// Returns bytes that the backward pass of a layer needs on each device, in addition to the parts of the memory table.
    pub(crate) fn temporary_bytes(&self) -> u64 {
        let (rules, model) = (self.training(), &self.of_training);
        let tokens = self.tokens(rules);
        let mlp = tokens * self.training_share() * self.mlp_columns() / self.mlp_parts(rules);
        let parts = [mlp, tokens * model.width(), model.gathered(rules) / model.layers()];
        let elements: f64 = parts.into_iter().zip(TEMPORARIES).map(|(part, count)| part * count).sum();
        (model.operand * elements) as u64
    }

    /// Returns the bytes of the gradients of trained weights on each device.
    pub(crate) fn gradient_bytes(&self) -> u64 {
        let elements = self.of_training.elements;
        if self.config.lora.is_some() { 0 } else { (size_of::<f32>() as f64 * elements) as u64 }
    }

    /// Returns the entries of the vocabulary on each device, with padding.
    fn vocab_shard(&self, rules: &AxisRules) -> f64 {
        (rules.padded_vocab(self.shape.vocab_size) / rules.parts(Axis::Vocab)) as f64
    }

    /// Returns the columns of the MLP, or of the MLPs of all experts, in the layer with the most.
    fn mlp_columns(&self) -> f64 {
        let columns = |layer| match self.shape.experts_of(layer) {
            Some(of) => of.num_experts * of.moe_intermediate_size,
            None => self.shape.intermediate_size,
        };
        (0..self.shape.num_hidden_layers).map(columns).max().unwrap_or(0) as f64
    }

    /// Returns the share of the products of all experts that a device computes for a micro-batch.
    fn training_share(&self) -> f64 {
        let TrainShape { rows, length, .. } = self.micro_batch();
        self.expert_share(rows * length, self.training())
    }

    /// Returns the share of the products of all experts that a device computes for `tokens` tokens of all devices, a multiple of the shards of rows.
    fn expert_share(&self, tokens: usize, rules: &AxisRules) -> f64 {
        let experts = self.shape.experts.as_ref();
        experts.map_or(1.0, |of| self.options.expert_products.share(tokens, of, rules))
    }

    /// Returns the number of devices that share the columns of the MLP, or the experts, for the same tokens.
    fn mlp_parts(&self, rules: &AxisRules) -> f64 {
        let axis = if self.shape.experts.is_some() { Axis::Experts } else { Axis::Mlp };
        let sharding = rules.sharding(&[Axis::Batch, axis]);
        let axes = sharding.iter().flat_map(|sharding| sharding.axes(1));
        axes.filter_map(|name| rules.mesh().size(name)).product::<usize>() as f64
    }

    fn training(&self) -> &AxisRules {
        &self.meshes.training
    }

    fn micro_batch(&self) -> TrainShape {
        let sequences = self.config.grpo.micro_batch_sequences();
        let completion = self.config.rollout.max_completion_length();
        TrainShape::uniform(sequences, self.prompt, completion).sharded(self.training())
    }

    /// Returns M: each device has its rows, with empty ones, and all of their tokens in attention and MLP.
    fn tokens(&self, rules: &AxisRules) -> f64 {
        let TrainShape { rows, length, .. } = self.micro_batch();
        (rows / rules.parts(Axis::Batch) * length) as f64
    }

    fn meter<'b>(&'b self, rules: &'b AxisRules) -> Meter<'b> {
        Meter::new(self.devices, rules, self.options.compute)
    }

    /// Returns the cost of the layers for a micro-batch.
    fn layers(&self, passes: Passes) -> Cost {
        let (rules, model) = (self.training(), &self.of_training);
        let mut meter = self.meter(rules);
        let (tokens, length) = (self.tokens(rules), self.micro_batch().length as f64);
        let layers = model.layers();
        let (heads, mlp) = (rules.parts(Axis::Heads) as f64, self.mlp_parts(rules));
        let weights = model.gathered(rules);
        let all = passes.forward + passes.backward;
        let share = self.training_share();
        meter.matmuls(2.0 * all * model.multiplied(rules, share) * tokens, all * model.operand * weights);
        // Causal attention computes half of all pairs.
        let query = self.shape.heads_of_layers().map(|of| of.query_columns() as f64).sum::<f64>() / heads;
        let is_backward = f64::from(u8::from(passes.backward > 0.0));
        let attention = passes.attention + 2.0 * is_backward;
        let with_attention = self.shape.heads_of_layers().count() as f64;
        meter.matmuls(2.0 * attention * tokens * length * query, 0.0);
        let scores = tokens * length * self.shape.num_attention_heads as f64 / heads;
        meter.moves(with_attention * scores * (SCORES[0] * passes.attention + SCORES[1] * is_backward));
        let activations = MLP * share * self.mlp_columns() / mlp + RESIDUAL * model.width();
        meter.moves(layers * tokens * activations * model.operand * (passes.elementwise + 2.0 * is_backward));
        meter.gathers(MeshAxis::Fsdp, passes.weights * model.operand * weights);
        // Two gathers and two reductions of the residual stream per layer.
        meter.gathers(MeshAxis::Tensor, 4.0 * passes.activations * layers * tokens * model.width() * model.operand);
        meter.cost
    }

    /// Returns the cost of activations that the forward pass writes for the backward pass.
    fn saved_activations(&self) -> Cost {
        let rules = self.training();
        let mut meter = self.meter(rules);
        // Written in the forward pass, and read in the backward pass.
        meter.moves(2.0 * saved_on_device(self.saved_bytes, self.micro_batch(), rules) as f64);
        meter.cost
    }

    /// Returns the cost of the loss: `products` matmuls with the head, one for logits and one for each gradient.
    fn head(&self, products: f64) -> Cost {
        let (rules, model) = (self.training(), &self.of_training);
        let mut meter = self.meter(rules);
        // Every device computes the logits of all tokens for its shard of the vocabulary.
        let tokens = self.micro_batch().tokens as f64;
        let head = self.vocab_shard(rules) * model.width();
        let products = if self.config.lora.is_some() { f64::min(products, 2.0) } else { products };
        meter.matmuls(2.0 * products * head * tokens, 0.0);
        let chunks = (tokens / CHUNK).max(1.0);
        meter.moves(chunks * head * (products * model.operand + 4.0 * (products - 1.0)));
        meter.moves(LOGITS * tokens * self.vocab_shard(rules));
        // Hidden states of all rows, and their gradients in f32.
        let gradient = if products > 1.0 { size_of::<f32>() as f64 } else { 0.0 };
        for axis in [MeshAxis::Data, MeshAxis::Fsdp] {
            meter.gathers(axis, tokens * model.width() * (model.operand + gradient));
        }
        meter.cost
    }

    /// Returns the cost of collecting the gradients of a micro-batch.
    fn gradients(&self, micro_batches: usize) -> Cost {
        let (rules, model) = (self.training(), &self.of_training);
        let mut meter = self.meter(rules);
        if self.config.lora.is_none() {
            let single = size_of::<f32>() as f64;
            meter.gathers(MeshAxis::Fsdp, single * model.gathered(rules));
            meter.reduces(MeshAxis::Data, single * model.elements);
            if micro_batches > 1 {
                // The accumulators are read and written.
                meter.moves(2.0 * single * model.elements);
            }
        }
        meter.cost
    }

    /// Returns the cost of the optimizer's step. Adapters are negligible.
    fn optimizer(&self) -> Cost {
        let mut meter = self.meter(self.training());
        if self.config.lora.is_none() {
            let optimizer = self.config.optimizer.settings.name;
            // All moments are read and written.
            let moved = 2.0 * optimizer.moments().len() as f64;
            let moments = moved * optimizer.moment_bytes(self.of_training.elements as u64) as f64;
            meter.moves(ADAMW * self.of_training.elements + moments);
        }
        meter.cost
    }

    /// Returns the number of sequences that decode in parallel, on each device of the rollout's mesh.
    fn slots(&self) -> usize {
        let slots = self.config.grpo.sequences().min(self.config.rollout.batch_size);
        slots.div_ceil(self.meshes.rollout.parts(Axis::Batch))
    }

    /// Returns the cost of the prompts of a rollout.
    fn prefill(&self) -> Cost {
        let rules = &self.meshes.rollout;
        let model = &self.of_rollout;
        let mut meter = self.meter(rules);
        let prompts = self.slots().div_ceil(self.config.grpo.num_generations.max(1)).max(1);
        let share = self.expert_share(prompts * self.prompt * rules.parts(Axis::Batch), rules);
        let (tokens, weights) = ((prompts * self.prompt) as f64, model.gathered(rules));
        meter.matmuls(2.0 * model.multiplied(rules, share) * tokens, model.operand * weights);
        meter.gathers(MeshAxis::Fsdp, model.operand * weights);
        meter.gathers(MeshAxis::Tensor, 4.0 * model.layers() * tokens * model.width() * model.operand);
        meter.cost
    }

    /// Returns the mean cost of a token of every sequence: all weights and the keys and values so far are read.
    fn decode(&self) -> Cost {
        let rules = &self.meshes.rollout;
        let model = &self.of_rollout;
        let mut meter = self.meter(rules);
        let share = self.expert_share(self.slots() * rules.parts(Axis::Batch), rules);
        let slots = self.slots() as f64;
        let head = self.vocab_shard(rules) * model.width();
        let weights = model.gathered(rules);
        let multiplied = model.multiplied(rules, share) + head;
        meter.matmuls(2.0 * multiplied * slots, model.operand * (weights + head));
        let columns = self.prompt as f64 + self.config.rollout.max_completion_length() as f64 / 2.0;
        let of_layer = |layer: LayerSpec| {
            let read = layer.sliding_window.map_or(columns, |window| columns.min(window as f64));
            read * self.shape.heads(layer).key_columns() as f64 / model.kv_parts
        };
        meter.moves(2.0 * slots * self.shape.attention_layers().map(of_layer).sum::<f64>() * model.operand);
        // The states of Gated DeltaNets are read and written.
        let states = self.shape.linear_attention.map_or(0, |sizes| sizes.state()) as f64;
        let with_states = self.shape.linear_attention_layers() as f64;
        let state_bytes = size_of::<f32>() as f64 * states / rules.parts(Axis::LinearHeads) as f64;
        meter.moves(2.0 * with_states * slots * state_bytes);
        meter.gathers(MeshAxis::Fsdp, model.operand * weights);
        // The outputs of attention and MLP are sums over heads and columns.
        meter.reduces(MeshAxis::Tensor, 2.0 * model.layers() * slots * model.width() * model.operand);
        meter.gathers(MeshAxis::Tensor, slots * self.shape.vocab_size as f64 * size_of::<f32>() as f64);
        meter.cost
    }
}
