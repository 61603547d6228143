//! Buffers of the tasks that run at a time, and how tasks are handed to them.
//!
//! Legend: H hidden, V vocabulary, T entries of a vocabulary tile.

use crate::gemm::{Gemm, RHS_PANEL};
use crate::pages::{Aligned, zeros};
use crate::softmax::TILE;
use crate::threads::for_each_slot;
use grpo_core::HeadLayout;
use std::sync::Mutex;

/// Most hidden units of a block of dH: what is packed of a tile for it stays in a core's own cache.
const UNITS: usize = 512;
/// Vocabulary entries that are packed at a time for logits.
pub(super) const ENTRIES: usize = 4 * RHS_PANEL;

/// The buffers of one task at a time.
#[derive(Debug)]
pub(crate) struct Slot {
    /// A part of the head, packed.
    pub(crate) head: Aligned<u32>,
    /// dlogits of a tile for a piece of tokens, packed to be multiplied into the head's gradient.
    pub(crate) dlogits: Aligned<u32>,
    /// `[lhs panel, T]`: dlogits of a few tokens.
    pub(crate) rows: Vec<f32>,
}

impl Slot {
    /// Words of `head`, words of `dlogits`, elements of `rows`, for chunks of `c` tokens.
    fn sizes(gemm: Gemm, c: usize, h: usize, v: usize, layout: HeadLayout) -> [usize; 3] {
        let (t, depth) = (v.min(TILE), gemm.depth());
        let logits = gemm.rhs_words(t.min(ENTRIES), h.min(depth));
        let hidden = gemm.rhs_words(h.min(UNITS), t.min(depth));
        let dlogits = match layout {
            HeadLayout::VocabHidden => gemm.lhs_words(t, c.min(depth)),
            HeadLayout::HiddenVocab => gemm.rhs_words(t, c.min(depth)),
        };
        [logits.max(hidden), dlogits, gemm.lhs_panel() * t]
    }

    /// Allocates a slot for chunks of `c` tokens.
    pub(crate) fn new(gemm: Gemm, c: usize, h: usize, v: usize, layout: HeadLayout) -> Self {
        let [head, dlogits, rows] = Self::sizes(gemm, c, h, v, layout);
        Self { head: zeros(head), dlogits: zeros(dlogits), rows: vec![0.0; rows] }
    }

    /// Bytes of a slot.
    pub(crate) fn bytes(gemm: Gemm, c: usize, h: usize, v: usize, layout: HeadLayout) -> usize {
        Self::sizes(gemm, c, h, v, layout).into_iter().sum::<usize>() * 4 + size_of::<Self>()
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

/// Blocks of hidden units for that many tasks at a time: equal but for the last, each whole panels.
pub(crate) fn unit_block(h: usize, slots: usize) -> usize {
    let panels = h.div_ceil(RHS_PANEL);
    let rounds = panels.div_ceil(slots * (UNITS / RHS_PANEL));
    panels.div_ceil(slots * rounds) * RHS_PANEL
}
