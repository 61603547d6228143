//! Tokens in the fused loops.

use crate::softmax::{RowGrad, RowSums, Scales};
use grpo_core::{LossConfig, TokenBatch};
use std::ops::Range;

/// A token of a chunk.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Token {
    /// The position of the token in the batch.
    pub(super) row: usize,
    /// The index of the token's state.
    pub(super) index: usize,
    /// The row of the panel that holds the token's logits; not used by gathered tokens.
    pub(super) place: usize,
    /// The index of the target in the vocabulary.
    pub(super) target: usize,
    pub(super) scales: Scales,
    pub(super) row_grad: RowGrad,
}

impl Token {
    /// Returns the token at `row` of the batch, without a place and a gradient.
    pub(super) fn new(loss: &LossConfig, batch: &TokenBatch, row: usize, index: usize) -> Self {
        // The batch has checked that the target is in the vocabulary.
        let target = batch.targets()[row] as usize;
        Self { row, index, target, scales: Scales::new(loss, batch.temperature(row)), ..Self::default() }
    }
}

/// The bytes of a token in a plan's workspace, without tensors.
pub(super) const TOKEN_BYTES: usize = size_of::<RowSums>() + size_of::<Token>() + size_of::<usize>();

/// Returns the index of `target` within a tile.
pub(super) fn within(target: usize, tile: &Range<usize>) -> Option<usize> {
    tile.contains(&target).then(|| target - tile.start)
}
