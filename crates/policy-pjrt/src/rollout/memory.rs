//! Memory of sampling on each device.

use super::sampling::Sampler;
use super::sizes::RolloutSizes;
use super::state::Shape;
use crate::bytes::{SINGLE, mask_bytes, product};
use crate::decoder::{Axis, DeltaStates};
use crate::pjrt_policy::PjrtPolicyOptions;
use crate::sharding::AxisRules;
use crate::train::TrainShape;
use grpo_models::{LayerSpec, MemoryTable, ModelConfig};
use grpo_policy::Sampling;

/// The phase of sampling in memory tables.
const PHASE: &str = "sampling";

impl RolloutSizes {
    /// Adds caches, records and logits of a rollout of these sizes on a mesh with these rules. It records what micro-batches of `shape` take.
    pub(crate) fn memory(
        &self,
        config: &ModelConfig,
        options: &PjrtPolicyOptions,
        rules: &AxisRules,
        shape: TrainShape,
        table: &mut MemoryTable,
    ) {
        let (sampler, ..) = Sampler::of(&Sampling::Greedy, 0, false);
        let Shape { slots, columns, .. } = self.shape(options.rollout, sampler, rules);
        let slots = slots / rules.parts(Axis::Batch);
        let operand = options.compute.dtype().bytes() as u64;
        let of_layer = |layer: LayerSpec| {
            let keys = config.heads(layer).key_columns() / rules.parts(Axis::Kv);
            product(&[2, slots, columns.of(layer.sliding_window), keys]).saturating_mul(operand)
        };
        let of_layers = config.attention_layers().map(of_layer);
        table.push_in(PHASE, "keys and values", of_layers.fold(0, u64::saturating_add));
        if let Some(types) = DeltaStates::types(config, slots, options.compute) {
            let states: u64 = types.iter().map(|ty| product(&[ty.elements(), ty.dtype.bytes()])).sum();
            table.push_in(PHASE, "states of Gated DeltaNets", states / rules.parts(Axis::LinearHeads) as u64);
        }
        let tokens = slots.saturating_mul(options.rollout.tokens_per_call);
        if shape.sampling_mask {
            table.push_in(PHASE, "sampling masks of a call", mask_bytes(tokens, config.vocab_size));
        }
        if let Some(experts) = config.experts.as_ref().filter(|_| shape.routed_experts) {
            let ids = product(&[tokens, config.routers(), experts.num_experts_per_tok]);
            table.push_in(PHASE, "recorded experts of a call", ids.saturating_mul(SINGLE));
        }
        let columns = rules.padded_vocab(config.vocab_size) / rules.parts(Axis::Vocab);
        table.push_in(PHASE, "logits", product(&[slots, columns]).saturating_mul(SINGLE));
    }
}
