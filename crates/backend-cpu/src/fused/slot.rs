//! Buffers of concurrent tasks, and their assignment.
//!
//! Legend: C tokens of a chunk, H hidden, V vocabulary, T entries of a vocabulary tile.

use super::tiling::{Blocking, Problem};
use crate::gemm::{Gemm, RHS_PANEL};
use crate::pages::{Aligned, zeros};
use crate::softmax::TILE;
use crate::threads::for_each_slot;
use grpo_core::HeadLayout;
use std::sync::Mutex;

/// The maximum number of hidden units in a block of dH: the packed part of a tile stays in the L2 cache.
const UNITS: usize = 512;
/// The number of tiles per slot whose dlogits are computed before their products with the head; few enough for a shared
/// cache.
pub(super) const TILES_PER_SLOT: usize = 8;
/// The number of vocabulary entries that are packed at a time for logits.
pub(super) const ENTRIES: usize = 4 * RHS_PANEL;

/// Returns the number of token pieces whose dlogits for a tile are packed before their product with the hidden states;
/// several, if a block of the head's gradient stays in cache during these additions.
pub(super) fn pieces_at_a_time(gemm: Gemm) -> usize {
    if gemm.near_rows().is_some() { 8 } else { 1 }
}

/// Returns the distance between output rows of `cols` elements: an odd number of cache lines if the rows should stay in
/// cache, because rows at a multiple of a power of two would conflict in a few cache sets.
pub(super) fn stride(gemm: Gemm, cols: usize) -> usize {
    const LINE: usize = 16;
    if gemm.near_rows().is_some() { (cols.div_ceil(LINE) | 1) * LINE } else { cols }
}

/// The buffers of one running task.
#[derive(Debug)]
pub(crate) struct Slot {
    /// A packed part of the head; whole tiles if [`Problem::packs_tiles`].
    pub(crate) head: Aligned<u32>,
    /// The dlogits of a tile for a few pieces of tokens, packed for the head's gradient.
    pub(crate) dlogits: Aligned<u32>,
    /// `[lhs panel, T]`: dlogits of a few tokens.
    pub(crate) rows: Vec<f32>,
    /// The cached block for [`Gemm::near_rows`]: logits of some tokens for a tile, then a block of hidden units of the
    /// tile's head gradient. Empty if the kernel does not need it.
    pub(crate) near: Aligned<f32>,
    /// The hidden states of a gathered token ([`super::gathered`]), `[H]`, or their gradient.
    pub(crate) gathered_hidden: Vec<f32>,
    /// The logits of a gathered token's kept ids.
    pub(crate) kept_logits: Vec<f32>,
}

impl Slot {
    /// Returns the lengths of the buffers, in the order of the fields.
    fn sizes(problem: &Problem, blocking: &Blocking) -> [usize; 6] {
        let Problem { gemm, h, v, layout, .. } = *problem;
        let (t, c) = (v.min(TILE), blocking.chunk);
        let head = if problem.packs_tiles(blocking) {
            let units = gemm.rhs_words(unit_block(h, blocking.slots).min(h), t);
            gemm.rhs_words(t, h).max(problem.tiles().min(TILES_PER_SLOT).saturating_mul(units))
        } else {
            let logits = gemm.rhs_words(t.min(ENTRIES), h.min(gemm.depth()));
            logits.max(gemm.rhs_words(h.min(UNITS), t.min(gemm.depth())))
        };
        let tokens = c.min(pieces_at_a_time(gemm) * gemm.depth());
        let dlogits = match layout {
            HeadLayout::VocabHidden => gemm.lhs_words(t, tokens),
            HeadLayout::HiddenVocab => gemm.rhs_words(t, tokens),
        };
        let near = gemm.near_rows().map_or(0, |rows| {
            let [gradient_rows, cols] = match layout {
                HeadLayout::VocabHidden => [t, rows.min(h)],
                HeadLayout::HiddenVocab => [rows.min(h), t],
            };
            (rows.min(c) * problem.stride()).max(gradient_rows * stride(gemm, cols))
        });
        let ids = problem.max_gathered_ids();
        [head, dlogits, gemm.lhs_panel() * t, near, if ids > 0 { h } else { 0 }, ids]
    }

    /// Allocates a slot.
    pub(crate) fn new(problem: &Problem, blocking: &Blocking) -> Self {
        let [head, dlogits, rows, near, gathered_hidden, kept_logits] = Self::sizes(problem, blocking);
        Self {
            head: zeros(head),
            dlogits: zeros(dlogits),
            rows: vec![0.0; rows],
            near: zeros(near),
            gathered_hidden: vec![0.0; gathered_hidden],
            kept_logits: vec![0.0; kept_logits],
        }
    }

    /// Returns the bytes of a slot; saturates on overflow.
    pub(crate) fn bytes(problem: &Problem, blocking: &Blocking) -> usize {
        let elements = Self::sizes(problem, blocking).into_iter().fold(0_usize, usize::saturating_add);
        elements.saturating_mul(4).saturating_add(size_of::<Self>())
    }
}

/// Runs `f` on `items`, one at a time per slot. The assignment of items to slots is not deterministic; results do not
/// depend on it, because every item has its own output.
pub(crate) fn for_each_with_slot<I: Iterator + Send>(
    slots: &mut [Slot],
    items: I,
    f: impl Fn(&mut Slot, I::Item) + Sync,
) where
    I::Item: Send,
{
    let queue = Mutex::new(items);
    // A poisoned queue means that another task has panicked; that panic propagates.
    let next = || queue.lock().ok().and_then(|mut items| items.next());
    for_each_slot(slots, |slot| {
        while let Some(item) = next() {
            f(slot, item);
        }
    });
}

/// Returns the number of hidden units in the blocks of dH for that many concurrent tasks: blocks are equal except for
/// the last one, and multiples of panels.
pub(crate) fn unit_block(h: usize, slots: usize) -> usize {
    let panels = h.div_ceil(RHS_PANEL);
    let rounds = panels.div_ceil(slots * (UNITS / RHS_PANEL));
    panels.div_ceil(slots * rounds) * RHS_PANEL
}
