//! The gradient of one tile of the vocabulary: dL/dlogits, and from it that of the head.
//!
//! Legend: L live tokens of a chunk, H hidden, T entries of the tile.

use super::slot::Slot;
use super::token::{Token, within};
use crate::convert::rounded;
use crate::gemm::{Gemm, KAxis, MatMut, Order, Packed, Rows};
use crate::host::Slice;
use crate::profile::{Work, timed};
use crate::softmax::{Transform, gradient_to};
use bytemuck::cast_slice_mut;
use grpo_core::HeadLayout;
use std::ops::Range;

/// What makes dlogits of a tile, and the head's gradient from them.
pub(super) struct TileGradient<'a> {
    pub(super) gemm: Gemm,
    pub(super) layout: HeadLayout,
    pub(super) h: usize,
    /// The live tokens, `[L]`.
    pub(super) tokens: &'a [Token],
    /// `[L, H]`, packed along L.
    pub(super) x: &'a [u32],
    pub(super) transform: Option<Transform>,
    /// Elements between rows of logits.
    pub(super) stride: usize,
    /// Whether dlogits are rounded to bf16.
    pub(super) round: bool,
    /// Whether dH needs dlogits.
    pub(super) hidden: bool,
}

impl TileGradient<'_> {
    /// `block`: logits after [`Transform`], replaced by dlogits packed as lhs along the tile, if dH needs them.
    pub(super) fn run(
        &self,
        tile: Range<usize>,
        block: &mut [f32],
        mut head_gradient: Option<MatMut<'_>>,
        mut bias: Option<&mut [f32]>,
        slot: &mut Slot,
    ) {
        let (gemm, t, height) = (self.gemm, tile.len(), self.gemm.lhs_panel());
        for piece in gemm.panel_pieces(self.tokens.len()) {
            let k = piece.len();
            for first in piece.clone().step_by(height) {
                let tokens = &self.tokens[first..piece.end.min(first + height)];
                timed(Work::Gradients, || {
                    for (token, out) in tokens.iter().zip(slot.rows.chunks_mut(t)) {
                        let z = &block[token.place * self.stride..][..t];
                        let target = within(token.target, &tile);
                        // The bias takes them as they are: its gradient is a sum, not a product.
                        let round_now = self.round && bias.is_none();
                        let (isa, row_grad, scale) = (gemm.isa(), &token.row_grad, token.scales.logit);
                        match &self.transform {
                            None => gradient_to(isa, z, target, row_grad, scale, out, round_now),
                            Some(transform) => transform.gradient_to(isa, z, target, row_grad, scale, out, round_now),
                        }
                        if let Some(bias) = &mut bias {
                            for (b, z) in bias.iter_mut().zip(out) {
                                *b += *z;
                                *z = if self.round { rounded(*z) } else { *z };
                            }
                        }
                    }
                });
                let rows = || Rows::new(Slice::F32(&slot.rows), t, 0..tokens.len(), 0..t);
                if self.hidden {
                    // Logits of later tokens lie behind those of the first `first + height`.
                    let words: &mut [u32] = cast_slice_mut(&mut block[first * self.stride..]);
                    for entries in gemm.pieces(t) {
                        let (at, stride) = (gemm.lhs_stride(entries.start), gemm.lhs_stride(entries.len()));
                        let source = Rows::new(Slice::F32(&slot.rows), t, 0..tokens.len(), entries);
                        gemm.pack_lhs(source, KAxis::Columns, 0, &mut words[at..], stride);
                    }
                }
                if head_gradient.is_some() {
                    let from = first - piece.start;
                    match self.layout {
                        HeadLayout::VocabHidden => {
                            let stride = gemm.lhs_stride(k);
                            gemm.pack_lhs(rows(), KAxis::Rows, from, &mut slot.dlogits, stride);
                        }
                        HeadLayout::HiddenVocab => {
                            let stride = gemm.rhs_stride(k);
                            gemm.pack_rhs(rows(), KAxis::Rows, from, &mut slot.dlogits, stride);
                        }
                    }
                }
            }
            let Some(out) = &mut head_gradient else { continue };
            let (lhs_stride, rhs_stride) = (gemm.lhs_stride(k), gemm.rhs_stride(k));
            let (lhs, rhs) = match self.layout {
                HeadLayout::VocabHidden => (&slot.dlogits[..], &self.x[gemm.rhs_words(self.h, piece.start)..]),
                HeadLayout::HiddenVocab => (&self.x[gemm.lhs_words(self.h, piece.start)..], &slot.dlogits[..]),
            };
            let (lhs, rhs) = (Packed { words: lhs, stride: lhs_stride }, Packed { words: rhs, stride: rhs_stride });
            gemm.multiply(k, lhs, rhs, out, true, Order::ByRows);
        }
    }
}
