//! The LM head as tiles, and the products with it.
//!
//! There is no copy of the whole head in another dtype or layout: products pack what they use, once per chunk of tokens
//! and product. They pack a part of a tile at a time, or the whole tile first if a chunk's tokens are processed in
//! several steps.
//!
//! Legend: L rows (tokens of a chunk), H hidden, V vocabulary, T entries of a vocabulary tile (the last tile may be
//! narrower).

use super::slot::ENTRIES;
use crate::gemm::{Gemm, KAxis, MatMut, Order, Packed, Product, RHS_PANEL, Rows};
use crate::host::Slice;
use crate::softmax::TILE;
use grpo_core::HeadLayout;
use std::ops::Range;

/// The weight and bias of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LmHead<'a> {
    pub(crate) gemm: Gemm,
    pub(crate) weight: Slice<'a>,
    pub(crate) bias: Option<Slice<'a>>,
    pub(crate) layout: HeadLayout,
    pub(crate) h: usize,
    pub(crate) v: usize,
    /// `true` if [`LmHead::pack_for_logits`] and [`LmHead::pack_for_hidden`] pack whole tiles before the products.
    /// Otherwise products pack a part of a tile at a time.
    pub(crate) packs_tiles: bool,
}

impl<'a> LmHead<'a> {
    /// Returns the vocabulary entries of tile `index`.
    pub(crate) fn tile(&self, index: usize) -> Range<usize> {
        let start = index * TILE;
        start..self.v.min(start + TILE)
    }

    /// Returns the weight's `entries` and `units`, with the axis of `units` as K.
    fn part(&self, entries: Range<usize>, units: Range<usize>) -> (Rows<'a>, KAxis) {
        match self.layout {
            HeadLayout::VocabHidden => (Rows::new(self.weight, self.h, entries, units), KAxis::Columns),
            HeadLayout::HiddenVocab => (Rows::new(self.weight, self.v, units, entries), KAxis::Rows),
        }
    }

    /// Returns the weight's `entries` and `units`, with the axis of `entries` as K.
    fn transposed(&self, entries: Range<usize>, units: Range<usize>) -> (Rows<'a>, KAxis) {
        let (source, along) = self.part(entries, units);
        (source, if along == KAxis::Rows { KAxis::Columns } else { KAxis::Rows })
    }

    /// Packs tile `index` into `words` for [`LmHead::logits`], if tiles are packed as a whole.
    pub(crate) fn pack_for_logits(&self, index: usize, words: &mut [u32]) {
        let (gemm, tile) = (self.gemm, self.tile(index));
        if !self.packs_tiles {
            return;
        }
        // Panel by panel, which reads contiguous memory in most layouts.
        for (panel, start) in tile.clone().step_by(RHS_PANEL).enumerate() {
            for units in gemm.pieces(self.h) {
                let stride = gemm.rhs_stride(units.len());
                let at = gemm.rhs_words(tile.len(), units.start) + panel * stride;
                let (source, along) = self.part(start..tile.end.min(start + RHS_PANEL), units);
                gemm.pack_rhs(source, along, 0, &mut words[at..], stride);
            }
        }
    }

    /// Packs the `units` of tile `index` into `words` for [`LmHead::hidden_gradient`], if tiles are packed as a whole.
    pub(crate) fn pack_for_hidden(&self, index: usize, units: Range<usize>, words: &mut [u32]) {
        let (gemm, tile) = (self.gemm, self.tile(index));
        if !self.packs_tiles {
            return;
        }
        for piece in gemm.pieces(tile.len()) {
            let at = gemm.rhs_words(units.len(), piece.start);
            let (source, along) = self.transposed(tile.start + piece.start..tile.start + piece.end, units.clone());
            gemm.pack_rhs(source, along, 0, &mut words[at..], gemm.rhs_stride(piece.len()));
        }
    }

    /// Computes `out: [_, T]` = logits of tile `index` for the tokens from `first`, which starts a lhs panel, out of
    /// `l` tokens. `x` has the hidden states of all `l` tokens, packed as lhs along H. `words` is the packed tile, or a
    /// buffer for a part of it.
    pub(crate) fn logits(
        &self,
        index: usize,
        x: &[u32],
        l: usize,
        first: usize,
        out: &mut MatMut<'_>,
        words: &mut [u32],
    ) {
        let (gemm, tile) = (self.gemm, self.tile(index));
        if let Some(bias) = self.bias {
            for row in 0..out.rows() {
                let row = out.row(row);
                match bias {
                    Slice::F32(b) => row.copy_from_slice(&b[tile.clone()]),
                    Slice::Bf16(b) => row.iter_mut().zip(&b[tile.clone()]).for_each(|(z, b)| *z = b.to_f32()),
                }
            }
        }
        let lhs = |units: &Range<usize>| {
            let stride = gemm.lhs_stride(units.len());
            let panels = gemm.lhs_words(l, units.start) + first / gemm.lhs_panel() * stride;
            Packed { words: &x[panels..], stride }
        };
        if self.packs_tiles {
            let products = gemm.pieces(self.h).map(|units| {
                let words = &words[gemm.rhs_words(tile.len(), units.start)..];
                let rhs = Packed { words, stride: gemm.rhs_stride(units.len()) };
                Product { k: units.len(), lhs: lhs(&units), rhs }
            });
            return gemm.multiply_sum(products, out, self.bias.is_some(), Order::ByColumns);
        }
        for units in gemm.pieces(self.h) {
            let (k, add) = (units.len(), self.bias.is_some() || units.start > 0);
            let (lhs, stride) = (lhs(&units), gemm.rhs_stride(k));
            for start in tile.clone().step_by(ENTRIES) {
                let entries = start..tile.end.min(start + ENTRIES);
                let (source, along) = self.part(entries.clone(), units.clone());
                gemm.pack_rhs(source, along, 0, words, stride);
                let mut out = out.columns(entries.start - tile.start..entries.end - tile.start);
                gemm.multiply(k, lhs, Packed { words, stride }, &mut out, add, Order::ByColumns);
            }
        }
    }

    /// Computes `out: [L, units]` (+)= the sum over `tiles` of dlogits `[L, T]` times the weight. `dlogits` returns those
    /// of a tile, packed as lhs; the pieces of a panel are contiguous, panels are `stride` words apart. `words` has the
    /// packed units of the tiles, `tile_words` words apart, or is a buffer for a part of them.
    pub(crate) fn hidden_gradient<'b>(
        &self,
        tiles: Range<usize>,
        units: Range<usize>,
        dlogits: impl Fn(usize) -> Packed<'b>,
        out: &mut MatMut<'_>,
        words: &mut [u32],
        tile_words: usize,
    ) {
        let gemm = self.gemm;
        let pieces =
            tiles.clone().flat_map(|index| gemm.pieces(self.tile(index).len()).map(move |piece| (index, piece)));
        let lhs = |index: usize, piece: &Range<usize>| {
            let dlogits = dlogits(index);
            Packed { words: &dlogits.words[gemm.lhs_stride(piece.start)..], ..dlogits }
        };
        if self.packs_tiles {
            let products = pieces.map(|(index, piece)| {
                let at = (index - tiles.start) * tile_words + gemm.rhs_words(units.len(), piece.start);
                let rhs = Packed { words: &words[at..], stride: gemm.rhs_stride(piece.len()) };
                Product { k: piece.len(), lhs: lhs(index, &piece), rhs }
            });
            return gemm.multiply_sum(products, out, tiles.start > 0, Order::ByColumns);
        }
        for (index, piece) in pieces {
            let (first, stride) = (self.tile(index).start, gemm.rhs_stride(piece.len()));
            let (source, along) = self.transposed(first + piece.start..first + piece.end, units.clone());
            gemm.pack_rhs(source, along, 0, words, stride);
            let (rhs, add) = (Packed { words, stride }, index > 0 || piece.start > 0);
            gemm.multiply(piece.len(), lhs(index, &piece), rhs, out, add, Order::ByColumns);
        }
    }
}
