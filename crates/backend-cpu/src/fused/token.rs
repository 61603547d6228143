//! Tokens in the fused loops.

use crate::softmax::{RowGrad, RowSums, Scales};
use std::ops::Range;

/// A token of a chunk.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Token {
    /// The position of the token in the batch.
    pub(super) row: usize,
    /// The row of the panel that holds the token's logits.
    pub(super) place: usize,
    /// The index of the target in the vocabulary.
    pub(super) target: usize,
    pub(super) scales: Scales,
    pub(super) row_grad: RowGrad,
}

/// The bytes of a token in a plan's workspace, without tensors.
pub(super) const TOKEN_BYTES: usize = size_of::<RowSums>() + size_of::<Token>() + size_of::<usize>();

/// Returns the index of `target` within a tile.
pub(super) fn within(target: usize, tile: &Range<usize>) -> Option<usize> {
    tile.contains(&target).then(|| target - tile.start)
}
