//! The gradient of the hidden states of a chunk.

use super::head::LmHead;
use super::slot::{Slot, TILES_PER_SLOT};
use crate::gemm::{MatMut, Packed};
use std::ops::Range;

/// The product of the dlogits of a panel and the head.
pub(super) struct HiddenGradient<'a> {
    pub(super) lm_head: &'a LmHead<'a>,
    /// The panel's dlogits, packed as lhs along V, a block per tile.
    pub(super) dlogits: &'a [u32],
    /// The tiles of the panel.
    pub(super) tiles: Range<usize>,
    /// The number of tokens, L.
    pub(super) tokens: usize,
    /// The number of words of a tile's block.
    pub(super) block: usize,
    /// The number of words of a token within a block.
    pub(super) row: usize,
}

impl HiddenGradient<'_> {
    /// Adds the product for the hidden units `units` to the block `out` `[L, units]`.
    pub(super) fn add(&self, units: Range<usize>, out: &mut MatMut<'_>, slot: &mut Slot) {
        let Self { lm_head: head, dlogits, ref tiles, tokens, block, row } = *self;
        let gemm = head.gemm;
        let mut out = out.columns(0..units.len());
        let most = gemm.near_rows().unwrap_or(tokens);
        for first in tiles.clone().step_by(TILES_PER_SLOT) {
            let some = first..tiles.end.min(first + TILES_PER_SLOT);
            // The words per tile, if whole tiles are packed.
            let words = if head.packs_tiles { gemm.rhs_words(units.len(), head.tile(first).len()) } else { 0 };
            for index in some.clone() {
                head.pack_for_hidden(index, units.clone(), &mut slot.head[(index - first) * words..]);
            }
            for token in (0..tokens).step_by(most) {
                let mut out = out.some_rows(token..tokens.min(token + most));
                let dlogits = |index: usize| {
                    let words = &dlogits[(index - tiles.start) * block + token * row..];
                    Packed { words, stride: gemm.lhs_panel() * row }
                };
                head.hidden_gradient(some.clone(), units.clone(), dlogits, &mut out, &mut slot.head, words);
            }
        }
    }
}
