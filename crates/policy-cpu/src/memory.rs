//! Memory estimate of a step, apart from weights and optimizer state, available before weights are loaded.

use crate::decoder::gated_delta_net::delta_heads;
use crate::loss::PolicyLoss;
use crate::micro_batch::at_once_of;
use grpo_backend_cpu::layers::Layers;
use grpo_core::{Dtype as Products, GradientSpec, GrpoLoss, HeadLayout, PolicySpec};
use grpo_models::{Dtype, LayerSpec, LinearAttention, MemoryTable, ModelConfig, Trained, TrainingMemory, UPDATES};
use grpo_policy::{Error, Result};

const SAMPLING: &str = "sampling";
/// Most freed bytes that the process keeps.
const KEPT: u64 = 1 << 30;
/// The allowance for free memory between blocks of other sizes, in activations of the widest matrix. Without it, processes exceeded the table by
/// 0.3 to 2.5 of them (docs/notes/host-trainer.md).
const HOLES: u64 = 3;
const SINGLE: u64 = size_of::<f32>() as u64;
/// The most tokens of a loss that is planned as a whole.
const MOST_PLANNED: u64 = 1 << 20;

/// Sizes of a step that determine its memory, apart from the weights.
#[derive(Clone, Copy, Debug)]
pub struct StepMemory {
    /// Largest number of tokens of a prompt.
    pub prompt: usize,
    /// Largest number of tokens of a completion.
    pub completion: usize,
    /// Number of sampled completions.
    pub samples: usize,
    /// Number of completions per prompt.
    pub per_prompt: usize,
    /// Largest number of sequences that decode together.
    pub batch: usize,
    /// Number of sequences of a micro-batch.
    pub micro_batch: usize,
    /// The dtype of the operands of matrix products.
    pub products: Products,
    /// `true` if the LM head has an adapter: every micro-batch then computes the merged head.
    pub head_adapter: bool,
    /// `true` if completions have the experts of their tokens ([`grpo_policy::Completion::routed_experts`]).
    pub records_experts: bool,
}

impl StepMemory {
    /// Adds the memory of a step to the table of `weights`: packed weights, KV cache and logits during sampling; gradients and activations
    /// during updates; workspaces of products and loss at all times.
    ///
    /// # Errors
    /// [`Error::Other`] if the loss cannot be planned.
    pub fn table(&self, config: &ModelConfig, weights: &TrainingMemory, loss: &PolicyLoss) -> Result<MemoryTable> {
        let mut table = weights.table();
        self.sampling(config, weights, &mut table);
        if let (Some(experts), true) = (&config.experts, self.records_experts) {
            let tokens = product([self.samples as u64, sum([self.prompt as u64, self.completion as u64])]);
            let of_token = product([config.routers() as u64, experts.num_experts_per_tok as u64, 2]);
            // The completions have them in addition to the caches during sampling, and to the sequences of the step during updates.
            table.push("recorded experts (16 bits)", product([2, tokens, of_token]));
        }
        self.updates(config, weights, loss, &mut table)?;
        // The process keeps freed memory for the next step, up to a limit (`grpo_backend_cpu::keep_freed_memory`). If micro-batches run
        // concurrently, other threads than the sampling ones allocated it, and sampling cannot reuse it; otherwise it can.
        let of = |phase| {
            let rows = table.phases().iter().filter(|(name, _)| name == phase).flat_map(|(_, rows)| rows);
            sum(rows.map(|(_, bytes)| *bytes))
        };
        let used_again = if self.at_once(weights) == 1 { of(SAMPLING) } else { 0 };
        let freed = of(UPDATES).saturating_sub(used_again);
        table.push_in(SAMPLING, "freed memory of updates, kept for the next step", freed.min(KEPT));
        Ok(table)
    }

    fn micro_batches(&self) -> usize {
        self.samples.div_ceil(self.micro_batch.max(1)).max(1)
    }

    /// Returns the number of micro-batches that run concurrently.
    fn at_once(&self, weights: &TrainingMemory) -> usize {
        at_once_of(usize::try_from(weights.trained_weights()).unwrap_or(usize::MAX)).min(self.micro_batches())
    }

    fn sampling(&self, config: &ModelConfig, weights: &TrainingMemory, table: &mut MemoryTable) {
        let threads = rayon::current_num_threads();
        let (vocab, h) = (config.vocab_size as u64, config.hidden_size as u64);
        // Large weights that are bf16 in their file are packed in 12 or 16 bits per value, except a head with an adapter.
        let in_files = weights.dtype == Dtype::Bf16 && weights.trained != Trained::All;
        let kernels = Layers::new().with_products(self.products);
        let bytes = |[input, output]: &[u64; 2], is_sum: bool| {
            kernels.packed_bytes([*input as usize, *output as usize], in_files && !is_sum) as u64
        };
        // Quantised matrices are not packed.
        let of_layers = if weights.quantized.is_some() { Vec::new() } else { all_matrices(config) };
        let of_layers = of_layers.into_iter().map(|(matrix, count)| product([bytes(&matrix, false), count]));
        let packed = sum(of_layers.chain([bytes(&[h, vocab], self.head_adapter)]));
        table.push_in(SAMPLING, "weights packed for products", packed);
        let are_separate =
            in_files || kernels.rounds_operands() || config.experts.is_some() || weights.quantized.is_some();
        if let (Trained::Adapters { weights: count, .. }, true) = (weights.trained, are_separate) {
            // Adapters of experts stay separate in every dtype. Matrices with few columns are padded to panels of 32, about twice their size.
            table.push_in(SAMPLING, "packed adapters", product([2, count, SINGLE]));
        }
        // Every thread runs a batch of sequences.
        let together = self.samples.min(self.batch.max(self.per_prompt).saturating_mul(threads)) as u64;
        let prompts = together.div_ceil(self.per_prompt.max(1) as u64);
        let of_layer = |layer: LayerSpec| {
            // A layer stores the positions inside its window.
            let within = |tokens: usize, window: usize| tokens.min(window) as u64;
            let window = layer.sliding_window.unwrap_or(usize::MAX);
            let of_prompts = product([prompts, within(self.prompt, window - 1)]);
            let positions = sum([of_prompts, product([together, within(self.completion, window)])]);
            product([2, positions, config.heads(layer).key_columns() as u64, SINGLE])
        };
        table.push_in(SAMPLING, "keys and values", sum(config.attention_layers().map(of_layer)));
        let state = |of: LinearAttention| of.state() + (of.linear_conv_kernel_dim - 1) * of.conv_channels();
        let states = config.linear_attention.map_or(0, |of| state(of) as u64);
        let states = product([together, config.linear_attention_layers() as u64, states, SINGLE]);
        table.push_in(SAMPLING, "states of linear attention", states);
        // f32 logits of all sequences, and two f64 copies for one sequence per thread.
        let logits = sum([product([together, vocab, SINGLE]), product([threads as u64, vocab, 16])]);
        table.push_in(SAMPLING, "logits", logits);
    }

    fn updates(
        &self,
        config: &ModelConfig,
        weights: &TrainingMemory,
        loss: &PolicyLoss,
        table: &mut MemoryTable,
    ) -> Result<()> {
        let (vocab, h) = (config.vocab_size as u64, config.hidden_size as u64);
        let (trained, all) = (weights.trained_weights(), weights.trained == Trained::All);
        let at_once = self.at_once(weights) as u64;
        // The first gradient becomes the accumulator.
        let sets = if self.micro_batches() as u64 > at_once { at_once } else { at_once - 1 };
        table.push_in(UPDATES, "gradients of micro-batches (float32)", product([sets, trained, SINGLE]));
        if self.head_adapter {
            table.push_in(UPDATES, "the adapted head and its gradient", product([at_once, 2, vocab, h, SINGLE]));
        }
        let prompts = self.micro_batch.div_ceil(self.per_prompt.max(1)) as u64;
        let tokens = product([self.micro_batch as u64, self.completion as u64]);
        let rows = sum([product([prompts, self.prompt as u64]), tokens]);
        // The backward pass frees activations layer by layer, and gradients reuse their memory.
        let activations = product([rows, row_values(config)]).saturating_sub(trained);
        table.push_in(UPDATES, "activations beyond gradients", product([at_once, activations, SINGLE]));
        // A product packs all rows, but only a few columns of the weight at a time.
        let widest = all_matrices(config).into_iter().flat_map(|(matrix, _)| matrix).max().unwrap_or(0);
        let holes = product([at_once, HOLES, rows, widest, SINGLE]);
        table.push_in(UPDATES, "free memory between activations", holes);
        let scratch = product([rows, widest, SINGLE, rayon::current_num_threads() as u64]);
        let planned = tokens.clamp(1, MOST_PLANNED);
        let workspace = workspace(config, loss, planned as usize, all || self.head_adapter)?;
        // Every further chunk of tokens needs at most the same again.
        let workspace = product([workspace, tokens.div_ceil(planned)]);
        // Workspaces are kept between steps.
        table.push("workspace of products and loss", sum([scratch, product([at_once, workspace])]));
        Ok(())
    }
}

/// A product that is `u64::MAX` where it is larger: more than any memory.
fn product(factors: impl IntoIterator<Item = u64>) -> u64 {
    factors.into_iter().fold(1, u64::saturating_mul)
}

/// A sum that is `u64::MAX` where it is larger.
fn sum(terms: impl IntoIterator<Item = u64>) -> u64 {
    terms.into_iter().fold(0, u64::saturating_add)
}

/// Returns `[in, out]` of the matrices of all layers, and how many of each a layer has.
fn all_matrices(config: &ModelConfig) -> Vec<([u64; 2], u64)> {
    (0..config.num_hidden_layers).flat_map(|layer| matrices(config, layer)).collect()
}

/// Returns `[in, out]` of the matrices of layer `index`, and how many the layer has.
fn matrices(config: &ModelConfig, index: usize) -> Vec<([u64; 2], u64)> {
    let (h, layer) = (config.hidden_size as u64, config.layer(index));
    let heads = config.heads(layer);
    let (queries, keys) = (heads.query_columns() as u64, heads.key_columns() as u64);
    let gates = if config.attention_output_gate { queries } else { 0 };
    let values = if layer.keys_are_values { 0 } else { keys };
    let mut matrices = match config.linear_attention_of(index) {
        Some(of) => vec![([h, projected(of)], 1), ([of.values() as u64, h], 1)],
        None => vec![([h, queries + gates + keys + values], 1), ([queries, h], 1)],
    };
    let (i, count) = match config.experts_of(index) {
        Some(experts) => {
            matrices.push(([h, experts.num_experts as u64], 1));
            if let Some(shared) = experts.shared_expert {
                let wide = shared.intermediate_size as u64;
                matrices.extend([([h, 2 * wide], 1), ([wide, h], 1), ([h, u64::from(shared.is_gated)], 1)]);
            }
            (experts.moe_intermediate_size as u64, experts.num_experts as u64)
        }
        None => (config.intermediate_size as u64, 1),
    };
    matrices.extend([([h, 2 * i], count), ([i, h], count)]);
    matrices
}

/// Returns the number of values that a row of a micro-batch saves for the backward pass, plus the gradients of the layer in progress. Saved
/// per layer: residual stream and norms; queries, keys and values (after the rotary embedding, and before it if they are normalised);
/// attention output, and its gates; gate, up and their product, or, for each of a token's experts, gate and up. A Gated DeltaNet saves its
/// projected input and its output; its backward pass holds the chunks of one key head per thread.
fn row_values(config: &ModelConfig) -> u64 {
    let h = config.hidden_size as u64;
    let columns = config.heads_of_layers().map(|heads| [heads.query_columns(), heads.key_columns()].map(|n| n as u64));
    let columns: Vec<_> = columns.map(|[queries, keys]| (queries, queries + 2 * keys)).collect();
    let of_mlp = |index| match config.experts_of(index) {
        Some(experts) => {
            let [top, wide] = [experts.num_experts_per_tok, experts.moe_intermediate_size].map(|n| n as u64);
            let shared = experts.shared_expert.map_or(0, |shared| 4 * shared.intermediate_size as u64 + 2 * h);
            // In addition to gate and up: the logits of the router, and the rows of the experts in the pass in progress. A shared expert saves
            // gate, up, their product before and after its gate, and two sums.
            (2 * top * wide + shared, experts.num_experts as u64 + top * (wide + h))
        }
        None => (2 * config.intermediate_size as u64, config.intermediate_size as u64),
    };
    let mlps = (0..config.num_hidden_layers).map(of_mlp).map(|(gate_up, i)| gate_up + i);
    let widest_mlp = mlps.clone().max().unwrap_or(0);
    // Values that are normalised or copied are made before queries and keys are normalised.
    let copies = 1 + u64::from(config.qk_norm) + u64::from(config.value_norm);
    let norms = config.norm_placement.names();
    // The input of every norm, without the two of the residual stream that layers share with the norms before attention and MLP.
    let streams = 2 + norms.iter().flatten().count() + [norms[1], norms[3]].iter().flatten().count();
    let streams = streams as u64 + u64::from(config.layer_scalars);
    let attention = |(mixed, qkv): &(u64, u64)| {
        let gates = if config.attention_output_gate { 2 * mixed } else { 0 };
        copies * qkv + mixed + gates + config.num_attention_heads as u64
    };
    let linear = config.linear_attention;
    let of_linear = linear.map_or(0, |of| projected(of) + of.values() as u64);
    let mixers = columns.iter().map(attention).sum::<u64>() + config.linear_attention_layers() as u64 * of_linear;
    let widest = columns.iter().map(|(_, qkv)| *qkv).max().unwrap_or(0);
    let in_progress = linear.map_or(widest, |of| widest.max(projected(of) + chunk_values(of)));
    let layers = mlps.map(|mlp| streams * h + mlp).sum::<u64>();
    layers + mixers + 2 * (h + widest_mlp) + 2 * in_progress
}

/// Returns the number of columns of the input projection of a Gated DeltaNet.
fn projected(of: LinearAttention) -> u64 {
    delta_heads(of).row() as u64
}

/// Returns the number of values of a row that the backward pass of a Gated DeltaNet holds, for the key heads of all threads: inputs and
/// outputs of the convolution, keys and queries, seven rows of values, five rows of 64 products, and a state for 64 rows.
fn chunk_values(of: LinearAttention) -> u64 {
    let (keys, per_key) = (of.linear_num_key_heads, of.linear_num_value_heads / of.linear_num_key_heads.max(1));
    let (key, value) = (of.linear_key_head_dim, of.linear_value_head_dim);
    let of_value = 7 * value + 3 * 64 + key * value / 64;
    let of_key = 2 * (2 * key + per_key * value) + 2 * key + 2 * 64 + per_key * of_value;
    (of_key * keys.min(rayon::current_num_threads())) as u64
}

/// Returns the bytes of the loss's workspace for a micro-batch of `tokens` tokens.
fn workspace(config: &ModelConfig, loss: &PolicyLoss, tokens: usize, trains_head: bool) -> Result<u64> {
    let plan = GrpoLoss::builder(loss.config.clone())
        .policy(PolicySpec::Hidden {
            hidden: config.hidden_size,
            vocab: config.vocab_size,
            dtype: grpo_core::Dtype::F32,
            layout: HeadLayout::VocabHidden,
            bias: false,
        })
        .gradients(GradientSpec { hidden: true, lm_head: trains_head, bias: false })
        .implementation(loss.implementation)
        .max_tokens(tokens)
        .build(&loss.backend)
        .map_err(Error::other)?;
    Ok(plan.memory().map_or(0, |memory| memory.workspace as u64))
}
