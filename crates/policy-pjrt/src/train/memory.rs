//! Memory of a micro-batch on each device.

use super::{TrainShape, saved_on_device};
use crate::bytes::{SINGLE, mask_bytes, product};
use crate::decoder::Axis;
use crate::pjrt_policy::PjrtPolicyOptions;
use crate::sharding::AxisRules;
use grpo_models::{MemoryTable, ModelConfig};
use grpo_stablehlo::Save;

/// The phase of micro-batches in memory tables.
const PHASE: &str = "micro-batches";

impl TrainShape {
    /// Adds activations, records and logits of a micro-batch of this shape on a mesh with these rules, whose layers save `saved_bytes` for a row
    /// ([`saved_bytes`](super::saved_bytes)).
    pub(crate) fn memory(
        self,
        config: &ModelConfig,
        options: &PjrtPolicyOptions,
        rules: &AxisRules,
        saved_bytes: u64,
        table: &mut MemoryTable,
    ) {
        let Self { rows, length, tokens, sampling_mask, routed_experts, .. } = self.sharded(rules);
        let rows = rows / rules.parts(Axis::Batch);
        let inputs = saved_inputs(config, &options.save);
        let carried = product(&[inputs, rows, length / rules.parts(Axis::Length), config.hidden_size]);
        let operand = options.compute.dtype().bytes() as u64;
        table.push_in(PHASE, "activations between layers", carried.saturating_mul(operand));
        table.push_in(PHASE, "saved activations of layers", saved_on_device(saved_bytes, self, rules));
        if sampling_mask {
            // Every device has all of them.
            table.push_in(PHASE, "sampling masks", mask_bytes(tokens, config.vocab_size));
        }
        if let Some(experts) = config.experts.as_ref().filter(|_| routed_experts) {
            let ids = product(&[config.routers(), rows, length, experts.num_experts_per_tok]);
            table.push_in(PHASE, "recorded experts", ids.saturating_mul(SINGLE));
        }
        // A chunk has as many tokens as fit with the whole vocabulary; each device makes the logits of its shard.
        let budget = (options.tiling.workspace_budget / rules.parts(Axis::Vocab)) as u64;
        let columns = rules.padded_vocab(config.vocab_size) / rules.parts(Axis::Vocab);
        table.push_in(PHASE, "logits", product(&[tokens, columns]).saturating_mul(SINGLE).min(budget));
    }
}

/// Returns the number of inputs of layers that are saved: at least the input of every layer; with groups, the input of every group and of the layers of
/// one group. A period of different layers is one iteration of the loop, whose layers are recomputed together.
fn saved_inputs(config: &ModelConfig, save: &Save) -> usize {
    let (layers, (lead, period)) = (config.num_hidden_layers, config.repetition());
    let iterations = lead.min(1) + (layers - lead).div_ceil(period);
    match (save, lead.max(period)) {
        (Save::Every(group @ 2..), longest) => layers.div_ceil((*group).max(longest)) + (*group).max(longest),
        (_, 1) => iterations,
        (_, longest) => iterations + longest,
    }
}
