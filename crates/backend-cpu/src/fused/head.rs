//! The LM head as tiles, and the products with it.
//!
//! Avoids a copy of the head in another dtype or layout: what a product needs of it is packed where it is used, once per
//! chunk of tokens and product.
//!
//! Legend: L rows (tokens of a chunk), H hidden, V vocabulary, T entries of a vocabulary tile (the last one of a head
//! may be narrower).

use super::slot::{ENTRIES, Slot};
use crate::gemm::{Gemm, KAxis, MatMut, Order, Packed, Rows};
use crate::host::Slice;
use crate::softmax::TILE;
use grpo_core::HeadLayout;
use std::ops::Range;

/// Weight and bias of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head<'a> {
    pub(crate) gemm: Gemm,
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
    fn part(&self, entries: Range<usize>, units: Range<usize>) -> (Rows<'a>, KAxis) {
        match self.layout {
            HeadLayout::VocabHidden => (Rows::new(self.weight, self.h, entries, units), KAxis::Columns),
            HeadLayout::HiddenVocab => (Rows::new(self.weight, self.v, units, entries), KAxis::Rows),
        }
    }

    /// Logits of tile `index` for `l` tokens, into rows of `out` that are `stride` apart. `x`: their hidden states, packed
    /// as lhs along H.
    pub(crate) fn logits(&self, index: usize, x: &[u32], l: usize, out: &mut [f32], stride: usize, slot: &mut Slot) {
        let (gemm, tile) = (self.gemm, self.tile(index));
        if let Some(bias) = self.bias {
            for row in out.chunks_mut(stride).take(l) {
                match bias {
                    Slice::F32(b) => row[..tile.len()].copy_from_slice(&b[tile.clone()]),
                    Slice::Bf16(b) => row.iter_mut().zip(&b[tile.clone()]).for_each(|(z, b)| *z = b.to_f32()),
                }
            }
        }
        for units in gemm.pieces(self.h) {
            let (k, add) = (units.len(), self.bias.is_some() || units.start > 0);
            let lhs = Packed { words: &x[gemm.lhs_words(l, units.start)..], stride: gemm.lhs_stride(k) };
            let stride_of_panels = gemm.rhs_stride(k);
            for start in tile.clone().step_by(ENTRIES) {
                let entries = start..tile.end.min(start + ENTRIES);
                let (source, along) = self.part(entries.clone(), units.clone());
                gemm.pack_rhs(source, along, 0, &mut slot.head, stride_of_panels);
                let rhs = Packed { words: &slot.head, stride: stride_of_panels };
                let mut out = MatMut::new(&mut out[start - tile.start..], l, entries.len(), stride);
                gemm.multiply(k, lhs, rhs, &mut out, add, Order::ByColumns);
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
        out: &mut MatMut<'_>,
        add: bool,
        slot: &mut Slot,
    ) {
        let (gemm, tile) = (self.gemm, self.tile(index));
        for piece in gemm.pieces(tile.len()) {
            let (k, entries) = (piece.len(), tile.start + piece.start..tile.start + piece.end);
            let stride = gemm.rhs_stride(k);
            let (source, along) = self.part(entries, units.clone());
            // Here the entries are what is summed over.
            let along = if along == KAxis::Rows { KAxis::Columns } else { KAxis::Rows };
            gemm.pack_rhs(source, along, 0, &mut slot.head, stride);
            let words = &dlogits.words[gemm.lhs_stride(piece.start)..];
            let (lhs, rhs) = (Packed { words, ..dlogits }, Packed { words: &slot.head, stride });
            gemm.multiply(k, lhs, rhs, out, add || piece.start > 0, Order::ByColumns);
        }
    }
}
