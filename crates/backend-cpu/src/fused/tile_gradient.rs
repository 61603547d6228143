//! The gradient of one tile of the vocabulary: dL/dlogits, and the tile's part of the head's gradient.
//!
//! Legend: L live tokens of a chunk, H hidden, T entries of the tile.

use super::head::LmHead;
use super::slot::{Slot, pieces_at_a_time, stride};
use super::token::{Token, within};
use crate::convert::rounded;
use crate::gemm::{KAxis, MatMut, Order, Packed, Product, RHS_PANEL, Rows};
use crate::host::Slice;
use crate::profile::{Work, timed};
use crate::softmax::{Transform, gradient_to, keep_only};
use bytemuck::cast_slice_mut;
use grpo_core::{HeadLayout, TokenBatch};
use std::ops::Range;

/// Computes dlogits of tiles, and the head's gradient from them.
pub(super) struct TileGradient<'a> {
    pub(super) lm_head: &'a LmHead<'a>,
    /// The live tokens, `[L]`.
    pub(super) tokens: &'a [Token],
    /// The tokens, divided into pieces of K for the head's gradient.
    pub(super) pieces: &'a [Range<usize>],
    /// `[L, H]`, packed as lhs along H, if logits must be computed; otherwise the panel has them.
    pub(super) hidden_states: Option<&'a [u32]>,
    /// `[L, H]`, packed along L, for the head's gradient.
    pub(super) for_head: &'a [u32],
    pub(super) transform: Option<Transform>,
    pub(super) batch: &'a TokenBatch,
    /// The elements between rows of logits.
    pub(super) stride: usize,
    /// The words per token of a tile's packed dlogits.
    pub(super) row: usize,
    /// `true` if dlogits are rounded to bf16.
    pub(super) round: bool,
    /// `true` if dH needs dlogits.
    pub(super) hidden: bool,
}

/// The buffers of a tile's logits after [`Transform`] and [`keep_only`], and of its dlogits, packed as lhs along the tile, if dH needs
/// them.
enum TileBuffers<'a> {
    /// Logits of all tokens, which are replaced by packed dlogits.
    Panel(&'a mut [f32]),
    /// Logits of the current tokens, and packed dlogits of all tokens.
    Near(&'a mut [f32], &'a mut [f32]),
}

impl TileGradient<'_> {
    /// Computes dlogits of tile `index`, writes them to `block`, packed as lhs along the tile, if dH needs them, and
    /// adds the tile's gradient to `head_gradient` and `bias`. `block` has the tile's logits after [`Transform`]
    /// and [`keep_only`], unless they must be computed.
    pub(super) fn run(
        &self,
        index: usize,
        block: &mut [f32],
        mut head_gradient: Option<MatMut<'_>>,
        mut bias: Option<&mut [f32]>,
        slot: &mut Slot,
    ) {
        let (gemm, tile) = (self.lm_head.gemm, self.lm_head.tile(index));
        let Slot { head: words, dlogits, rows, near, .. } = slot;
        let near_logits = self.hidden_states.filter(|_| gemm.near_rows().is_some());
        if let Some(x) = self.hidden_states {
            self.lm_head.pack_for_logits(index, words);
            if near_logits.is_none() {
                self.logits(index, x, 0..self.tokens.len(), block, words);
            }
        }
        for pieces in self.pieces.chunks(pieces_at_a_time(gemm)) {
            let start = pieces[0].start;
            for piece in pieces {
                let place = match near_logits {
                    Some(x) => {
                        self.logits(index, x, piece.clone(), near, words);
                        TileBuffers::Near(near, block)
                    }
                    None => TileBuffers::Panel(block),
                };
                let out =
                    head_gradient.is_some().then(|| &mut dlogits[self.words_of(tile.len(), piece.start - start)..]);
                self.dlogits(tile.clone(), piece.clone(), place, bias.as_deref_mut(), out, rows);
            }
            if let Some(out) = &mut head_gradient {
                self.multiply(pieces, tile.len(), dlogits, near, out);
            }
        }
    }

    /// Computes logits of tile `index` for `tokens`, whose first one starts a lhs panel, after [`Transform`] and [`keep_only`].
    fn logits(&self, index: usize, x: &[u32], tokens: Range<usize>, out: &mut [f32], words: &mut [u32]) {
        let (l, tile) = (self.tokens.len(), self.lm_head.tile(index));
        let mut out = MatMut::new(out, tokens.len(), tile.len(), self.stride);
        self.lm_head.logits(index, x, l, tokens.start, &mut out, words);
        for (row, token) in self.tokens[tokens].iter().enumerate() {
            if let Some(transform) = &self.transform {
                transform.apply(self.lm_head.gemm.isa(), out.row(row));
            }
            if let Some(kept) = self.batch.kept(token.row) {
                keep_only(out.row(row), tile.start, kept);
            }
        }
    }

    /// Computes dlogits of the tokens of `piece`, and packs them into `out` for the head's gradient, if that is needed.
    /// `rows` is a buffer for a lhs panel of dlogits.
    fn dlogits(
        &self,
        tile: Range<usize>,
        piece: Range<usize>,
        mut place: TileBuffers<'_>,
        mut bias: Option<&mut [f32]>,
        mut out: Option<&mut [u32]>,
        rows: &mut [f32],
    ) {
        let (gemm, layout, t) = (self.lm_head.gemm, self.lm_head.layout, tile.len());
        let height = gemm.lhs_panel();
        for first in piece.clone().step_by(height) {
            let tokens = &self.tokens[first..piece.end.min(first + height)];
            timed(Work::Gradients, || {
                for (i, (token, row)) in tokens.iter().zip(rows.chunks_mut(t)).enumerate() {
                    let z = match &place {
                        TileBuffers::Panel(block) => &block[token.place * self.stride..][..t],
                        TileBuffers::Near(logits, _) => &logits[(first + i - piece.start) * self.stride..][..t],
                    };
                    let target = within(token.target, &tile);
                    // The bias gradient is a sum, not a product, so it uses unrounded dlogits.
                    let round_now = self.round && bias.is_none();
                    let (isa, row_grad, scale) = (gemm.isa(), &token.row_grad, token.scales.logit);
                    match &self.transform {
                        None => gradient_to(isa, z, target, row_grad, scale, row, round_now),
                        Some(transform) => transform.gradient_to(isa, z, target, row_grad, scale, row, round_now),
                    }
                    if let Some(bias) = &mut bias {
                        for (b, z) in bias.iter_mut().zip(row) {
                            *b += *z;
                            *z = if self.round { rounded(*z) } else { *z };
                        }
                    }
                }
            });
            let source = |entries| Rows::new(Slice::F32(&*rows), t, 0..tokens.len(), entries);
            if self.hidden {
                // The words written here precede the logits of later tokens.
                let (TileBuffers::Panel(block) | TileBuffers::Near(_, block)) = &mut place;
                let words: &mut [u32] = cast_slice_mut(&mut block[first * self.row..]);
                for entries in gemm.pieces(t) {
                    let (at, stride) = (gemm.lhs_stride(entries.start), gemm.lhs_stride(entries.len()));
                    gemm.pack_lhs(source(entries), KAxis::Columns, 0, &mut words[at..], stride);
                }
            }
            if let Some(out) = &mut out {
                let (from, k) = (first - piece.start, piece.len());
                match layout {
                    HeadLayout::VocabHidden => gemm.pack_lhs(source(0..t), KAxis::Rows, from, out, gemm.lhs_stride(k)),
                    HeadLayout::HiddenVocab => gemm.pack_rhs(source(0..t), KAxis::Rows, from, out, gemm.rhs_stride(k)),
                }
            }
        }
    }

    /// Adds to `out` the part of the head's gradient that comes from the dlogits of `pieces` for a tile of `t` entries.
    /// `near` is a buffer for a block of it.
    fn multiply(&self, pieces: &[Range<usize>], t: usize, dlogits: &[u32], near: &mut [f32], out: &mut MatMut<'_>) {
        let LmHead { gemm, layout, h, .. } = *self.lm_head;
        let start = pieces[0].start;
        let most = gemm.near_rows().unwrap_or(h).max(1);
        for units in (0..h).step_by(most).map(|first| first..h.min(first + most)) {
            let mut out = match layout {
                HeadLayout::VocabHidden => out.columns(units.clone()),
                HeadLayout::HiddenVocab => out.some_rows(units.clone()),
            };
            let stride = stride(gemm, out.cols());
            let mut sum = gemm.near_rows().map(|_| MatMut::new(near, out.rows(), out.cols(), stride));
            let products = pieces.iter().map(|piece| {
                let k = piece.len();
                let (lhs_stride, rhs_stride) = (gemm.lhs_stride(k), gemm.rhs_stride(k));
                let dlogits = &dlogits[self.words_of(t, piece.start - start)..];
                let (lhs, rhs) = match layout {
                    HeadLayout::VocabHidden => {
                        let panels = gemm.rhs_words(h, piece.start) + units.start / RHS_PANEL * rhs_stride;
                        (dlogits, &self.for_head[panels..])
                    }
                    HeadLayout::HiddenVocab => {
                        let panels = gemm.lhs_words(h, piece.start) + units.start / gemm.lhs_panel() * lhs_stride;
                        (&self.for_head[panels..], dlogits)
                    }
                };
                let (lhs, rhs) = (Packed { words: lhs, stride: lhs_stride }, Packed { words: rhs, stride: rhs_stride });
                Product { k, lhs, rhs }
            });
            match &mut sum {
                Some(sum) => {
                    gemm.multiply_sum(products, sum, false, Order::ByRows);
                    out.add(gemm.isa(), near, stride);
                }
                None => gemm.multiply_sum(products, &mut out, true, Order::ByRows),
            }
        }
    }

    /// Returns the words of packed dlogits of a tile of `t` entries for that many tokens, in whole pieces.
    fn words_of(&self, t: usize, tokens: usize) -> usize {
        match self.lm_head.layout {
            HeadLayout::VocabHidden => self.lm_head.gemm.lhs_words(t, tokens),
            HeadLayout::HiddenVocab => self.lm_head.gemm.rhs_words(t, tokens),
        }
    }
}
