//! The LM head as tiles, and the products with it.
//!
//! Avoids a copy of the head in another dtype or layout: what a product needs of it is packed where it is used, once per
//! chunk of tokens and product.
//!
//! Legend: L rows (tokens of a chunk), H hidden, V vocabulary, T entries of a vocabulary tile (the last one of a head
//! may be narrower).

use crate::gemm::{Arithmetic, Depth, Order, Packed, RHS_PANEL, Rows, Target};
use crate::host::Slice;
use crate::softmax::TILE;
use grpo_core::HeadLayout;
use std::ops::Range;
use std::sync::Mutex;

/// Most hidden units of a block of dH: what is packed of a tile for it stays in a core's own cache.
const UNITS: usize = 512;
/// Vocabulary entries that are packed at a time for logits.
const ENTRIES: usize = 4 * RHS_PANEL;

/// What one task at a time needs for itself.
#[derive(Debug)]
pub(crate) struct Slot {
    /// A part of the head, packed.
    pub(crate) head: Vec<u32>,
    /// dlogits of a tile for a piece of tokens, packed to be multiplied into the head's gradient.
    pub(crate) dlogits: Vec<u32>,
    /// `[lhs panel, T]`: dlogits of a few tokens.
    pub(crate) rows: Vec<f32>,
}

impl Slot {
    /// Words of `head`, words of `dlogits`, elements of `rows`, for chunks of `c` tokens.
    fn sizes(arithmetic: Arithmetic, c: usize, h: usize, v: usize, layout: HeadLayout) -> [usize; 3] {
        let (t, depth) = (v.min(TILE), arithmetic.depth());
        let logits = arithmetic.rhs_words(t.min(ENTRIES), h.min(depth));
        let hidden = arithmetic.rhs_words(h.min(UNITS), t.min(depth));
        let dlogits = match layout {
            HeadLayout::VocabHidden => arithmetic.lhs_words(t, c.min(depth)),
            HeadLayout::HiddenVocab => arithmetic.rhs_words(t, c.min(depth)),
        };
        [logits.max(hidden), dlogits, arithmetic.lhs_panel() * t]
    }

    pub(crate) fn new(arithmetic: Arithmetic, c: usize, h: usize, v: usize, layout: HeadLayout) -> Self {
        let [head, dlogits, rows] = Self::sizes(arithmetic, c, h, v, layout);
        Self { head: vec![0; head], dlogits: vec![0; dlogits], rows: vec![0.0; rows] }
    }

    /// Bytes of a slot.
    pub(crate) fn bytes(arithmetic: Arithmetic, c: usize, h: usize, v: usize, layout: HeadLayout) -> usize {
        Self::sizes(arithmetic, c, h, v, layout).into_iter().sum::<usize>() * 4 + size_of::<Self>()
    }
}

/// Runs `f` over `items`, as many at a time as there are slots. Which slot gets which item is left to chance; results
/// do not depend on it, because every item owns its output.
pub(crate) fn drain<I: Iterator + Send>(slots: &mut [Slot], items: I, f: impl Fn(&mut Slot, I::Item) + Sync)
where
    I::Item: Send,
{
    let queue = Mutex::new(items);
    // A poisoned queue means that another task has panicked; rayon hands that panic on.
    let next = || queue.lock().ok().and_then(|mut items| items.next());
    let work = |slot: &mut Slot| {
        while let Some(item) = next() {
            f(slot, item);
        }
    };
    match slots {
        [slot] => work(slot),
        slots => rayon::scope(|scope| {
            for slot in slots {
                scope.spawn(|_| work(slot));
            }
        }),
    }
}

/// Blocks of hidden units for that many tasks at a time: equal but for the last, each whole panels.
pub(crate) fn unit_block(h: usize, slots: usize) -> usize {
    let panels = h.div_ceil(RHS_PANEL);
    let rounds = panels.div_ceil(slots * (UNITS / RHS_PANEL));
    panels.div_ceil(slots * rounds) * RHS_PANEL
}

/// Weight and bias of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head<'a> {
    pub(crate) arithmetic: Arithmetic,
    pub(crate) weight: Slice<'a>,
    pub(crate) bias: Option<Slice<'a>>,
    pub(crate) layout: HeadLayout,
    pub(crate) h: usize,
    pub(crate) v: usize,
}

impl<'a> Head<'a> {
    /// The entries of tile `index`.
    pub(crate) fn tile(&self, index: usize) -> Range<usize> {
        let start = index * TILE;
        start..self.v.min(start + TILE)
    }

    /// The weight's `entries` and `units`, and which axis `units` are.
    fn part(&self, entries: Range<usize>, units: Range<usize>) -> (Rows<'a>, Depth) {
        match self.layout {
            HeadLayout::VocabHidden => (Rows::new(self.weight, self.h, entries, units), Depth::Columns),
            HeadLayout::HiddenVocab => (Rows::new(self.weight, self.v, units, entries), Depth::Rows),
        }
    }

    /// Logits of tile `index` for `l` tokens, into rows of `out` that are `stride` apart. `x`: their hidden states, packed
    /// as lhs along H.
    pub(crate) fn logits(&self, index: usize, x: &[u32], l: usize, out: &mut [f32], stride: usize, slot: &mut Slot) {
        let (arithmetic, tile) = (self.arithmetic, self.tile(index));
        if let Some(bias) = self.bias {
            for row in out.chunks_mut(stride).take(l) {
                match bias {
                    Slice::F32(b) => row[..tile.len()].copy_from_slice(&b[tile.clone()]),
                    Slice::Bf16(b) => row.iter_mut().zip(&b[tile.clone()]).for_each(|(z, b)| *z = b.to_f32()),
                }
            }
        }
        for units in arithmetic.pieces(self.h) {
            let (k, add) = (units.len(), self.bias.is_some() || units.start > 0);
            let lhs = Packed { words: &x[arithmetic.lhs_words(l, units.start)..], stride: arithmetic.lhs_stride(k) };
            let stride_of_panels = arithmetic.rhs_stride(k);
            for start in tile.clone().step_by(ENTRIES) {
                let entries = start..tile.end.min(start + ENTRIES);
                let (source, along) = self.part(entries.clone(), units.clone());
                arithmetic.pack_rhs(source, along, 0, &mut slot.head, stride_of_panels);
                let rhs = Packed { words: &slot.head, stride: stride_of_panels };
                let mut out = Target::new(&mut out[start - tile.start..], l, entries.len(), stride);
                arithmetic.multiply(k, lhs, rhs, &mut out, add, Order::ByColumns);
            }
        }
    }

    /// `out: [L, units]` (+)= dlogits `[L, T]` of tile `index` times the weight. `dlogits`: as lhs, the pieces of a panel one
    /// after the other, panels `stride` words apart.
    pub(crate) fn hidden_gradient(
        &self,
        index: usize,
        units: Range<usize>,
        dlogits: Packed<'_>,
        out: &mut Target<'_>,
        add: bool,
        slot: &mut Slot,
    ) {
        let (arithmetic, tile) = (self.arithmetic, self.tile(index));
        for piece in arithmetic.pieces(tile.len()) {
            let (k, entries) = (piece.len(), tile.start + piece.start..tile.start + piece.end);
            let stride = arithmetic.rhs_stride(k);
            let (source, along) = self.part(entries, units.clone());
            // Here the entries are what is summed over.
            let along = if along == Depth::Rows { Depth::Columns } else { Depth::Rows };
            arithmetic.pack_rhs(source, along, 0, &mut slot.head, stride);
            let words = &dlogits.words[arithmetic.lhs_stride(piece.start)..];
            let (lhs, rhs) = (Packed { words, ..dlogits }, Packed { words: &slot.head, stride });
            arithmetic.multiply(k, lhs, rhs, out, add || piece.start > 0, Order::ByColumns);
        }
    }
}
