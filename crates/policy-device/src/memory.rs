//! What a training on a device takes, said before anything is loaded.
//!
//! Legend: L layers, B rows, T tokens of a row, N completion tokens, V vocabulary, H residual stream, K key/value heads, D width of a
//! head.

use crate::decoder::Compute;
use crate::device_policy::DevicePolicyOptions;
use crate::rollout::{RolloutSizes, cache_columns};
use crate::train::TrainShape;
use models::{MemoryTable, ModelConfig, TrainingMemory};

/// What makes a run take less memory of its device.
pub const KNOBS: &str = "grpo.gradient_accumulation_steps (more micro-batches of fewer rows), rollout.max_completion_length and \
    data.max_prompt_length (shorter rows), rollout.batch_size (fewer sequences that decode side by side), policy.dtype bfloat16, \
    policy.attention blockwise (no scores of all pairs of tokens), and policy.can_roll_back false (weights and moments once) need less";

const MICRO_BATCH: &str = "grpo.gradient_accumulation_steps (more micro-batches of fewer rows), rollout.max_completion_length and \
    data.max_prompt_length (shorter rows), policy.dtype bfloat16, and policy.attention blockwise (no scores of all pairs of tokens) need \
    less";
const ROLLOUT: &str = "rollout.batch_size (fewer sequences that decode side by side), rollout.max_completion_length and \
    data.max_prompt_length (shorter sequences), and policy.dtype bfloat16 need less";
const UPDATE: &str = "policy.can_roll_back false (weights and moments once) and a smaller model need less";

/// What makes the program of this name take less.
pub(crate) fn knobs_of(program: &str) -> &'static str {
    match program {
        "gradient" | "score" => MICRO_BATCH,
        "adamw" => UPDATE,
        name if name.starts_with("rollout") => ROLLOUT,
        _ => KNOBS,
    }
}

/// The sizes of a training, which say how much memory it takes beside its weights.
///
/// ```
/// use models::ModelConfig;
/// use policy_device::{DevicePolicyOptions, RolloutSizes, TrainShape, TrainingSizes};
///
/// let sizes = TrainingSizes {
///     micro_batch: TrainShape { rows: 8, length: 256, tokens: 1024 },
///     rollout: RolloutSizes { prompts: 8, longest_prompt: 128, num_generations: 8, max_completion_length: 128 },
///     ref_policy: false,
/// };
/// let table = sizes.memory(&ModelConfig::default(), &DevicePolicyOptions::default());
/// assert!(table.to_string().contains("first moments (float32)"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrainingSizes {
    /// Rows and tokens of a micro-batch.
    pub micro_batch: TrainShape,
    /// The sizes of a rollout.
    pub rollout: RolloutSizes,
    /// Whether there is a reference policy.
    pub ref_policy: bool,
}

impl TrainingSizes {
    /// The least that the training takes, part by part: what a compiler adds for its own temporaries is not in it.
    pub fn memory(&self, config: &ModelConfig, options: &DevicePolicyOptions) -> MemoryTable {
        let (single, count) = (size_of::<f32>() as u64, config.parameter_count());
        let operand = options.compute.dtype().bytes() as u64;
        let reference = self.ref_policy.then_some(models::Dtype::F32);
        let trained = TrainingMemory { reference, ..TrainingMemory::full(config, models::Dtype::F32) }.table();
        let mut table = MemoryTable::new();
        // The sums of gradients stay on the device between updates.
        let of_updates = trained.phases().iter().flat_map(|(_, rows)| rows);
        trained.rows().iter().chain(of_updates).for_each(|(part, bytes)| table.push(part.as_str(), *bytes));
        if options.compute == Compute::Bf16 {
            table.push("weights for sampling (bfloat16)", count * operand);
        }
        let product = |sizes: &[usize]| sizes.iter().fold(1, |product: u64, size| product.saturating_mul(*size as u64));
        let TrainShape { rows, length, tokens } = self.micro_batch;
        let (layers, vocab) = (config.num_hidden_layers, config.vocab_size);
        // Of every layer at least what goes into it is kept.
        let carried = product(&[layers, rows, length, config.hidden_size]).saturating_mul(operand);
        table.push_in("micro-batches", "activations between layers", carried);
        let budget = options.tiling.workspace_budget as u64;
        table.push_in("micro-batches", "logits", product(&[tokens, vocab]).saturating_mul(single).min(budget));
        if options.can_roll_back {
            table.push_in("updates", "weights and moments to go back to (float32)", count.saturating_mul(3 * single));
        }
        let (slots, columns) = cache_columns(&self.rollout, options.rollout);
        let heads = config.num_key_value_heads * config.head_dim();
        let cache = product(&[2, layers, slots, columns, heads]).saturating_mul(operand);
        table.push_in("sampling", "keys and values", cache);
        table.push_in("sampling", "logits", product(&[slots, vocab]).saturating_mul(single));
        table
    }
}
