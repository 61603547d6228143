//! Buffers of the tasks that run at a time, and how tasks are handed to them.
//!
//! Legend: C tokens of a chunk, H hidden, V vocabulary, T entries of a vocabulary tile.

use super::tiling::{Blocking, Problem};
use crate::gemm::{Gemm, RHS_PANEL};
use crate::pages::{Aligned, zeros};
use crate::softmax::TILE;
use crate::threads::for_each_slot;
use grpo_core::HeadLayout;
use std::sync::Mutex;

/// Most hidden units of a block of dH: what is packed of a tile for it stays in a core's own cache.
const UNITS: usize = 512;
/// Tiles per slot whose dlogits are made before any of them meets the head: few enough to stay in a shared cache.
pub(super) const TILES_PER_SLOT: usize = 8;
/// Vocabulary entries that are packed at a time for logits.
pub(super) const ENTRIES: usize = 4 * RHS_PANEL;

/// Pieces of tokens whose dlogits for a tile are packed before they meet the hidden states: some, where a block of the head's gradient
/// stays near while they are added to it.
pub(super) fn pieces_at_a_time(gemm: Gemm) -> usize {
    if gemm.near_rows().is_some() { 8 } else { 1 }
}

/// Elements between rows of `cols` elements of output: an odd number of cache lines where they are to stay near, because rows at a
/// multiple of a power of two would compete for few places of the caches.
pub(super) fn stride(gemm: Gemm, cols: usize) -> usize {
    const LINE: usize = 16;
    if gemm.near_rows().is_some() { (cols.div_ceil(LINE) | 1) * LINE } else { cols }
}

/// The buffers of one task at a time.
#[derive(Debug)]
pub(crate) struct Slot {
    /// A part of the head, packed; whole tiles where [`Problem::packs_tiles`] says so.
    pub(crate) head: Aligned<u32>,
    /// dlogits of a tile for a few pieces of tokens, packed to be multiplied into the head's gradient.
    pub(crate) dlogits: Aligned<u32>,
    /// `[lhs panel, T]`: dlogits of a few tokens.
    pub(crate) rows: Vec<f32>,
    /// What stays near, of [`Gemm::near_rows`]: logits of some tokens for a tile, then some hidden units of the tile's part of the
    /// head's gradient. Empty where nothing does.
    pub(crate) near: Aligned<f32>,
}

impl Slot {
    /// Words of `head` and of `dlogits`, elements of `rows` and of `near`.
    fn sizes(problem: &Problem, blocking: &Blocking) -> [usize; 4] {
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
        [head, dlogits, gemm.lhs_panel() * t, near]
    }

    /// Allocates a slot.
    pub(crate) fn new(problem: &Problem, blocking: &Blocking) -> Self {
        let [head, dlogits, rows, near] = Self::sizes(problem, blocking);
        Self { head: zeros(head), dlogits: zeros(dlogits), rows: vec![0.0; rows], near: zeros(near) }
    }

    /// Bytes of a slot; saturates where they do not fit.
    pub(crate) fn bytes(problem: &Problem, blocking: &Blocking) -> usize {
        let elements = Self::sizes(problem, blocking).into_iter().fold(0_usize, usize::saturating_add);
        elements.saturating_mul(4).saturating_add(size_of::<Self>())
    }
}

/// Runs `f` over `items`, as many at a time as there are slots. Which slot gets which item is left to chance; results
/// do not depend on it, because every item owns its output.
pub(crate) fn for_each_with_slot<I: Iterator + Send>(
    slots: &mut [Slot],
    items: I,
    f: impl Fn(&mut Slot, I::Item) + Sync,
) where
    I::Item: Send,
{
    let queue = Mutex::new(items);
    // A poisoned queue means that another task has panicked, and that panic is handed on.
    let next = || queue.lock().ok().and_then(|mut items| items.next());
    for_each_slot(slots, |slot| {
        while let Some(item) = next() {
            f(slot, item);
        }
    });
}

/// Blocks of hidden units of dH for that many tasks at a time: equal but for the last, each whole panels.
pub(crate) fn unit_block(h: usize, slots: usize) -> usize {
    let panels = h.div_ceil(RHS_PANEL);
    let rounds = panels.div_ceil(slots * (UNITS / RHS_PANEL));
    panels.div_ceil(slots * rounds) * RHS_PANEL
}
