//! The LM head as tiles, and the three products over them.
//!
//! Avoids a widened copy of the head (a bf16 tile is widened where it is used) and any sum shared between threads.
//!
//! Legend: L rows (tokens of a chunk), H hidden, V vocabulary, T entries of a vocabulary tile (the last one of a head
//! may be narrower). A panel is a run of tiles, each stored as its own `[L, T]` block, so that tasks own whole blocks
//! and rows of a tile lie close together.

use crate::gemm::{K_PIECE, View, ViewMut, packing_bytes, pieces, product};
use crate::host::Slice;
use crate::softmax::TILE;
use grpo_core::HeadLayout;
use std::ops::Range;
use std::sync::Mutex;

/// Hidden units of a dH block.
pub(crate) const HIDDEN_BLOCK: usize = 512;

/// What one task at a time needs for itself: a widened piece of the head, if the head is bf16.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    widened: Vec<f32>,
}

/// Bytes that a running task holds in its [`Slot`] and lets the `gemm` crate allocate, for chunks of `c` tokens.
pub(crate) fn slot_bytes(c: usize, h: usize, v: usize, bf16: bool, layout: HeadLayout) -> usize {
    let (t, k, units) = (v.min(TILE), h.min(K_PIECE), h.min(HIDDEN_BLOCK));
    let packed = match layout {
        HeadLayout::VocabHidden => [
            packing_bytes(t, c, h, false, true),
            packing_bytes(units, c, t, true, true),
            packing_bytes(h, t, c, true, false),
        ],
        HeadLayout::HiddenVocab => [
            packing_bytes(t, c, h, true, true),
            packing_bytes(units, c, t, false, true),
            packing_bytes(t, units, c, true, false),
        ],
    };
    let widened = if bf16 { 4 * t * k } else { 0 };
    widened + packed.into_iter().max().unwrap_or(0)
}

impl Slot {
    pub(crate) fn new(h: usize, v: usize, bf16: bool) -> Self {
        Self { widened: vec![0.0; if bf16 { v.min(TILE) * h.min(K_PIECE) } else { 0 }] }
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

/// Weight and bias of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head<'a> {
    pub(crate) weight: Slice<'a>,
    pub(crate) bias: Option<Slice<'a>>,
    pub(crate) layout: HeadLayout,
    pub(crate) h: usize,
    pub(crate) v: usize,
}

impl Head<'_> {
    /// The entries of tile `index`.
    pub(crate) fn tile(&self, index: usize) -> Range<usize> {
        tile_range(index, self.v)
    }

    /// `[tile, units]` of the weight in f32.
    fn weights<'s>(&'s self, tile: Range<usize>, units: Range<usize>, slot: &'s mut Slot) -> View<'s> {
        let (rows, cols, stride) = match self.layout {
            HeadLayout::VocabHidden => (tile, units, self.h),
            HeadLayout::HiddenVocab => (units, tile, self.v),
        };
        let view = match self.weight {
            Slice::F32(w) => View::new(&w[rows.start * stride + cols.start..], rows.len(), cols.len(), stride),
            Slice::Bf16(w) => {
                for (to, row) in slot.widened.chunks_exact_mut(cols.len()).zip(rows.clone()) {
                    widen(&w[row * stride + cols.start..][..cols.len()], to);
                }
                View::new(&slot.widened, rows.len(), cols.len(), cols.len())
            }
        };
        match self.layout {
            HeadLayout::VocabHidden => view,
            HeadLayout::HiddenVocab => view.transposed(),
        }
    }

    /// Logits of tile `index` for the rows of `x: [L, H]`, into rows of `out` that are `stride` apart.
    pub(crate) fn logits(&self, index: usize, x: View<'_>, out: &mut [f32], stride: usize, slot: &mut Slot) {
        let (tile, rows) = (self.tile(index), x.rows());
        if let Some(bias) = self.bias {
            for row in out.chunks_mut(stride).take(rows) {
                match bias {
                    Slice::F32(b) => row[..tile.len()].copy_from_slice(&b[tile.clone()]),
                    Slice::Bf16(b) => widen(&b[tile.clone()], row),
                }
            }
        }
        for units in pieces(self.h) {
            let add = self.bias.is_some() || units.start > 0;
            let weights = self.weights(tile.clone(), units.clone(), slot).transposed();
            product(ViewMut::new(out, rows, tile.len(), stride), x.columns(units), weights, add);
        }
    }

    /// `out: [L, units]` (+)= dlogits `[L, T]` of tile `index` times the weight.
    pub(crate) fn hidden_gradient(
        &self,
        index: usize,
        units: Range<usize>,
        dlogits: View<'_>,
        out: &mut [f32],
        add: bool,
        slot: &mut Slot,
    ) {
        let out = ViewMut::new(out, dlogits.rows(), units.len(), units.len());
        product(out, dlogits, self.weights(self.tile(index), units, slot), add);
    }
}

/// The entries of tile `index` of a vocabulary of `v`.
pub(crate) fn tile_range(index: usize, v: usize) -> Range<usize> {
    let start = index * TILE;
    start..v.min(start + TILE)
}

/// `grad += dlogits^T x` for the tiles `first..` that `panel` holds: `panel`: blocks of `block` elements, each
/// `[L, T]` with rows `stride` apart; `x: [L, H]`; `grad`: shaped as the head.
pub(crate) struct HeadGradient<'a> {
    pub(crate) layout: HeadLayout,
    pub(crate) h: usize,
    pub(crate) v: usize,
    pub(crate) tiles: Range<usize>,
    pub(crate) panel: &'a [f32],
    pub(crate) block: usize,
    pub(crate) stride: usize,
    pub(crate) x: View<'a>,
}

impl HeadGradient<'_> {
    pub(crate) fn add_to(&self, grad: &mut [f32], slots: &mut [Slot]) {
        let dlogits = |index: usize| {
            let data = &self.panel[(index - self.tiles.start) * self.block..];
            View::new(data, self.x.rows(), tile_range(index, self.v).len(), self.stride)
        };
        match self.layout {
            HeadLayout::VocabHidden => {
                let rows = &mut grad[self.tiles.start * TILE * self.h..];
                let blocks = self.tiles.clone().zip(rows.chunks_mut(TILE * self.h));
                drain(slots, blocks, |_, (index, rows)| {
                    let p = dlogits(index).transposed();
                    product(ViewMut::new(rows, p.rows(), self.h, self.h), p, self.x, true);
                });
            }
            HeadLayout::HiddenVocab => {
                // Columns of a tile are not a slice, so tasks own hidden units. Four blocks per slot even out the load.
                let units = self.h.div_ceil(4 * slots.len()).next_multiple_of(16).clamp(16, HIDDEN_BLOCK).min(self.h);
                drain(slots, grad.chunks_mut(units * self.v).enumerate(), |_, (i, rows)| {
                    let x = self.x.columns(i * units..self.h.min((i + 1) * units)).transposed();
                    for index in self.tiles.clone() {
                        let tile = tile_range(index, self.v);
                        let out = ViewMut::new(&mut rows[tile.start..], x.rows(), tile.len(), self.v);
                        product(out, x, dlogits(index), true);
                    }
                });
            }
        }
    }
}

/// Copies the rows of `tensor: [N, H]` that `rows` names to `out: [L, H]`, widened.
pub(crate) fn gather(tensor: Slice<'_>, rows: &[usize], h: usize, out: &mut [f32]) {
    for (to, row) in out.chunks_exact_mut(h).zip(rows) {
        match tensor {
            Slice::F32(t) => to.copy_from_slice(&t[row * h..(row + 1) * h]),
            Slice::Bf16(t) => widen(&t[row * h..(row + 1) * h], to),
        }
    }
}

/// Widens exactly; `to` may be longer.
pub(crate) fn widen(from: &[half::bf16], to: &mut [f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = f32::from_bits(u32::from(from.to_bits()) << 16);
    }
}
