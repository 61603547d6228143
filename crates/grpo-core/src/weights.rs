//! Aggregation: how much each token counts.
//!
//! Every `loss_type` is "sum over tokens of weight x token loss" with its own weights. They are made here, on the host,
//! once per optimizer step, and travel with the batch through any split into micro-batches, packing or data
//! parallelism; kernels only sum. Gradients then add up to the same bits of meaning however the step was cut, and no
//! division by a number of accumulation steps is ever needed (so there is no `gradient_accumulation_steps` here).

use crate::batch::TokenBatch;
use crate::config::{LossConfig, LossType};

/// Per-token weights of one optimizer step. Masked tokens have weight 0.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenWeights {
    /// Weight of the token's loss: `[N]`.
    pub policy: Vec<f64>,
    /// Weight of the token's entropy in the bonus, before entropy_coef: `[N]`, 1 / active tokens of the step.
    pub entropy: Vec<f64>,
}

/// The weights of `batch`, taken as one whole optimizer step.
///
/// Fully masked sequences count in the number of sequences B (TRL's meaning: the mean runs over all rows).
pub fn token_weights(config: &LossConfig, batch: &TokenBatch) -> TokenWeights {
    let sequences = batch.sequences() as f64;
    let active = batch.active_tokens() as f64;
    let tokens = active.max(1.0);
    let mut weights = TokenWeights { policy: vec![0.0; batch.tokens()], entropy: vec![0.0; batch.tokens()] };
    for sequence in 0..batch.sequences() {
        let length = batch.active_in(sequence).max(1) as f64;
        let weight = match config.loss_type {
            LossType::Grpo | LossType::Gspo => 1.0 / (sequences * length),
            LossType::Bnpo => 1.0 / tokens,
            LossType::DrGrpo => 1.0 / (sequences * config.max_completion_length.unwrap_or(1) as f64),
            LossType::Dapo | LossType::Cispo => 1.0 / config.num_items_in_batch.unwrap_or(active).max(1.0),
        };
        for token in batch.range(sequence).filter(|t| batch.is_active(*t)) {
            weights.policy[token] = weight;
            weights.entropy[token] = 1.0 / tokens;
        }
    }
    weights
}
