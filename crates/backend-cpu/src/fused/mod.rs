//! The loss of hidden states x LM head without a full logits tensor.
//!
//! It never stores the `[N, V]` logits and their gradient, skips masked rows, and skips the backward products of rows
//! without a gradient (clipped, or with zero advantage). Tokens with a sampling mask of few ids use only the rows of the head for these ids
//! ([`self::gathered`]); the rest of this page is about all other tokens.
//!
//! Blocking: a chunk of C active tokens is multiplied with panels of the vocabulary ([`self::tiling`]):
//!
//! * token chunks: the logits of a chunk for the whole vocabulary are computed once, replaced by dlogits in place, and
//!   multiplied into dH and dW: three products;
//! * vocabulary panels: logits are computed for the statistics, and recomputed for the gradient: four products, but
//!   chunks are so large that the head and its gradient cause little memory traffic.
//!
//! A task is a tile of the vocabulary: its softmax runs while its logits are in a core's cache. Its dlogits are packed
//! immediately: for dW, and for dH in place of the logits. After that, tasks are blocks of hidden units.
//!
//! A token's results are bit-identical for any neighbours, blocking and number of threads: products have
//! position-independent sums ([`crate::gemm`]), and softmax sums use fixed tiles ([`crate::softmax`]). The head's
//! gradient is summed over chunks, so it depends on the chunk size. With a limited workspace budget, more threads leave
//! less memory for tokens, so that the chosen chunk, and the last bits of that gradient, depend on the number of
//! threads; setting `token_chunk` avoids this.
//!
//! Memory: [`self::tiling::Problem::workspace`], allocated with the plan and never above the budget.
//!
//! Legend: N tokens, L live rows of a chunk of C, H hidden, V vocabulary, T entries of a tile, P tiles of a panel.

mod gathered;
mod head;
mod hidden_gradient;
mod slot;
mod tile_gradient;
mod tiling;
mod token;

pub(crate) use tiling::{Problem, choose};

use crate::gemm::{Cut, Gemm, KAxis, MatMut, Rows};
use crate::host::{Grads, Slice, Tensors};
use crate::pages::{Aligned, zeros};
use crate::profile::{Work, timed};
use crate::softmax::{Partial, RowSums, TILE, Transform, keep_only};
use crate::tokens::{Chunks, TokenState, empty_scores};
use gathered::Gathered;
use grpo_core::backend_api::evaluate::Evaluator;
use grpo_core::backend_api::plan::Head;
use grpo_core::backend_api::token_columns::LossSums;
use grpo_core::batch::TokenBatch;
use grpo_core::error::{Error, Result};
use grpo_core::{HeadLayout, LoopOrder, PlanRequest, PolicyOutput, Scores};
use head::LmHead;
use hidden_gradient::HiddenGradient;
use slot::{Slot, TILES_PER_SLOT, for_each_with_slot, unit_block};
use std::ops::Range;
use tile_gradient::TileGradient;
use tiling::Blocking;
use token::{Token, within};

/// A planned fused loss: sizes and workspace.
pub(crate) struct FusedHead {
    request: PlanRequest,
    problem: Problem,
    blocking: Blocking,
    transform: Option<Transform>,
    work: Workspace,
    state: TokenState,
    /// The state indices of tokens with a gradient.
    live: Vec<usize>,
}

/// The buffers of one chunk.
struct Workspace {
    /// `[C, H]`, packed as lhs along H, for logits.
    x: Aligned<u32>,
    /// `[C, H]`, packed along C, for dW.
    x_for_head: Aligned<u32>,
    /// P blocks `[C', T']`: logits, then dlogits packed as lhs along V. C' and T' are multiples of lhs panels.
    panel: Aligned<f32>,
    /// The gradient of the chunk's hidden states, `[C, H]`.
    dh: Aligned<f32>,
    /// The statistics of every tile of the panel, `[P, C]`.
    partials: Vec<Partial>,
    /// The statistics of every row over the tiles so far, `[C]`.
    sums: Vec<RowSums>,
    /// The dlogits of a group of gathered tokens.
    gathered_dlogits: Vec<f32>,
    /// The tokens of the chunk, `[C]`: first tokens with tile products, then gathered tokens.
    tokens: Vec<Token>,
    /// The positions in the batch of tokens with tile products.
    tiled_rows: Vec<usize>,
    slots: Vec<Slot>,
}

impl FusedHead {
    pub(crate) fn new(request: &PlanRequest, problem: Problem, blocking: Blocking) -> Self {
        let (c, p) = (blocking.chunk, blocking.panel_tiles);
        let kept = problem.kept(&blocking);
        let [x, x_for_head, panel, dh] = problem.buffers(&blocking);
        let work = Workspace {
            x: zeros(x),
            x_for_head: zeros(x_for_head),
            panel: zeros(panel),
            dh: zeros(dh),
            partials: vec![Partial::default(); c * p],
            sums: vec![RowSums::EMPTY; c],
            gathered_dlogits: vec![0.0; problem.gathered_dlogits(c)],
            tokens: vec![Token::default(); c],
            tiled_rows: Vec::with_capacity(c),
            slots: (0..blocking.slots).map(|_| Slot::new(&problem, &blocking)).collect(),
        };
        Self {
            request: request.clone(),
            problem,
            blocking,
            transform: Transform::new(&request.loss),
            work,
            state: TokenState::new(kept),
            live: Vec::with_capacity(kept),
        }
    }

    /// Returns the hidden states and head of a call.
    fn inputs<'a>(&self, policy: PolicyOutput<Slice<'a>>) -> (Slice<'a>, LmHead<'a>) {
        let PolicyOutput::Hidden { hidden, lm_head, bias } = policy else {
            unreachable!("the plan has checked the policy")
        };
        let Problem { gemm, h, v, layout, .. } = self.problem;
        let packs_tiles = self.problem.packs_tiles(&self.blocking);
        (hidden, LmHead { gemm, weight: lm_head, bias, layout, h, v, packs_tiles })
    }

    /// Returns the inputs of a call for its gathered tokens.
    fn gathered<'a>(&self, hidden: Slice<'a>, head: &'a LmHead<'a>, batch: &'a TokenBatch) -> Gathered<'a> {
        Gathered { hidden, head, batch, transform: self.transform, rounds_dlogits: self.problem.rounds }
    }

    /// Divides tiles into panels of at most `size` tiles.
    fn panels(&self, size: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let tiles = self.problem.tiles();
        (0..tiles).step_by(size).map(move |first| first..tiles.min(first + size))
    }

    /// Computes the statistics of the tokens `rows` and records them from state index `at`. If `keep`, the logits stay
    /// in the panel.
    fn forward(
        &mut self,
        hidden: Slice<'_>,
        head: &LmHead<'_>,
        batch: &TokenBatch,
        rows: &[usize],
        at: usize,
        keep: bool,
    ) {
        let (transform, panels) = (self.transform, self.panels(self.blocking.panel_tiles));
        let (problem, gathered) = (self.problem, self.gathered(hidden, head, batch));
        let (Problem { gemm, h, .. }, stride) = (problem, problem.stride());
        let block = problem.block(self.blocking.chunk, self.blocking.order);
        let Workspace { x, panel, partials, sums, tokens, tiled_rows, slots, .. } = &mut self.work;
        let (tokens, sums) = (&mut tokens[..rows.len()], &mut sums[..rows.len()]);
        tiled_rows.clear();
        tiled_rows.extend(rows.iter().filter(|row| !problem.is_gathered(batch, **row)));
        let c = tiled_rows.len();
        let is_gathered = |i: &usize| problem.is_gathered(batch, rows[*i]);
        let order = (0..rows.len()).filter(|i| !is_gathered(i)).chain((0..rows.len()).filter(is_gathered));
        for (place, (token, index)) in tokens.iter_mut().zip(order).enumerate() {
            *token = Token { place, ..Token::new(&self.request.loss, batch, rows[index], at + index) };
        }
        let ((tiled, others), (tiled_sums, other_sums)) = (tokens.split_at(c), sums.split_at_mut(c));
        gathered.statistics(others, other_sums, slots);
        let (most, in_panel) = (gemm.near_rows().unwrap_or(c.max(1)), keep || gemm.near_rows().is_none());
        pack_for_logits(gemm, hidden, tiled_rows, h, x);
        tiled_sums.fill(RowSums::EMPTY);
        for tiles in panels.take_while(|_| c > 0) {
            let blocks = panel.chunks_mut(block).zip(partials.chunks_mut(c));
            for_each_with_slot(slots, tiles.clone().zip(blocks), |slot, (index, (block, partials))| {
                let tile = head.tile(index);
                head.pack_for_logits(index, &mut slot.head);
                for first in (0..c).step_by(most) {
                    let some = first..c.min(first + most);
                    let logits = if in_panel { &mut block[first * stride..] } else { &mut slot.near[..] };
                    let mut logits = MatMut::new(logits, some.len(), tile.len(), stride);
                    head.logits(index, x, c, first, &mut logits, &mut slot.head);
                    timed(Work::Statistics, || {
                        let tokens = partials[some.clone()].iter_mut().zip(&tiled[some]);
                        for (row, (partial, token)) in tokens.enumerate() {
                            let (isa, z) = (gemm.isa(), logits.row(row));
                            if let Some(transform) = &transform {
                                transform.apply(isa, z);
                            }
                            if let Some(kept) = batch.kept(token.row) {
                                keep_only(z, tile.start, kept);
                            }
                            *partial = Partial::new(isa, z, within(token.target, &tile), token.scales.logit);
                        }
                    });
                }
            });
            for (index, partials) in tiles.zip(partials.chunks(c)) {
                let tile = head.tile(index);
                for ((sums, partial), token) in tiled_sums.iter_mut().zip(partials).zip(tiled) {
                    sums.merge(partial, tile.contains(&token.target), token.scales.logit);
                }
            }
        }
        for (sums, token) in sums.iter().zip(&*tokens) {
            self.state.record(token.index, sums, &token.scales);
        }
    }

    /// Adds the gradients of the tokens `live` (ascending state indices; `rows[0]` has index `at`) to `grads`. If
    /// `forwarded`, the panel still contains the logits of `rows`.
    #[allow(clippy::too_many_arguments)]
    fn backward(
        &mut self,
        hidden: Slice<'_>,
        head: &LmHead<'_>,
        batch: &TokenBatch,
        live: Range<usize>,
        at: usize,
        forwarded: bool,
        rows: &[usize],
        grads: &mut Grads<'_>,
    ) {
        let (problem, transform) = (self.problem, self.transform);
        let Problem { gemm, h, v, layout, .. } = problem;
        let panels = self.panels(self.blocking.panel_tiles.min(TILES_PER_SLOT * self.blocking.slots));
        let (order, stride) = (self.blocking.order, problem.stride());
        let (block, row) = (problem.block(self.blocking.chunk, order), problem.row(order));
        let gathered = self.gathered(hidden, head, batch);
        let (live, state, work) = (&self.live[live], &self.state, &mut self.work);
        let Workspace { x, x_for_head, panel, dh, gathered_dlogits, tokens, tiled_rows, slots, .. } = work;
        let is_gathered = |index: &&usize| problem.is_gathered(batch, rows[**index - at]);
        let in_order = live.iter().filter(|index| !is_gathered(index)).chain(live.iter().filter(is_gathered));
        for (token, index) in tokens.iter_mut().zip(in_order) {
            *token = Token::new(&self.request.loss, batch, rows[index - at], *index);
            token.row_grad = state.row_grad(*index, &token.scales);
        }
        let tokens = &mut tokens[..live.len()];
        let l = tokens.iter().filter(|token| !problem.is_gathered(batch, token.row)).count();
        let (tokens, others) = tokens.split_at_mut(l);
        gathered.gradients(others, gathered_dlogits, grads, slots);
        if l == 0 {
            return;
        }
        set_places(tokens, forwarded.then_some((rows, at)), |row| !problem.is_gathered(batch, row));
        let tokens = &*tokens;
        tiled_rows.clear();
        tiled_rows.extend(tokens.iter().map(|token| token.row));
        if !forwarded {
            pack_for_logits(gemm, hidden, tiled_rows, h, x);
        }
        let pieces: Vec<_> = gemm.panel_pieces(l).collect();
        if grads.lm_head.is_some() {
            pack_for_head(gemm, layout, hidden, tiled_rows, h, x_for_head);
        }
        let tile_gradient = TileGradient {
            lm_head: head,
            tokens,
            pieces: &pieces,
            hidden_states: (!forwarded).then_some(x),
            for_head: x_for_head,
            transform,
            batch,
            stride,
            row,
            round: self.problem.rounds,
            hidden: grads.hidden.is_some(),
        };
        let (units, dh_stride) = (unit_block(h, slots.len()), self.problem.dh_stride());
        for tiles in panels {
            let bias = grads.bias.as_mut().map(|b| b[tiles.start * TILE..].chunks_mut(TILE));
            let targets = grads.lm_head.as_mut().map(|grad| match layout {
                HeadLayout::VocabHidden => MatMut::split(grad, [v, h], Cut::Rows, TILE, tiles.clone()),
                HeadLayout::HiddenVocab => MatMut::split(grad, [h, v], Cut::Columns, TILE, tiles.clone()),
            });
            // Token chunks have a block for every tile, vocabulary panels for the tiles of a panel.
            let held = if forwarded { tiles.start..tiles.end } else { 0..tiles.len() };
            let panel = &mut panel[held.start * block..];
            let blocks = panel.chunks_mut(block).zip(optional(targets).zip(optional(bias)));
            for_each_with_slot(slots, tiles.clone().zip(blocks), |slot, (index, (block, (head_gradient, bias)))| {
                tile_gradient.run(index, block, head_gradient, bias, slot);
            });
            if grads.hidden.is_some() {
                let blocks =
                    MatMut::split(&mut dh[..l * dh_stride], [l, dh_stride], Cut::Columns, units, 0..h.div_ceil(units));
                let dlogits = bytemuck::cast_slice::<f32, u32>(panel);
                let hidden_gradient = HiddenGradient { lm_head: head, dlogits, tiles, tokens: l, block, row };
                for_each_with_slot(slots, blocks.enumerate(), |slot, (i, mut out)| {
                    hidden_gradient.add(i * units..h.min((i + 1) * units), &mut out, slot);
                });
            }
        }
        if let Some(grad) = &mut grads.hidden {
            for (from, token) in dh.chunks(dh_stride).zip(tokens) {
                let to = &mut grad[token.row * h..][..h];
                to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
            }
        }
    }

    /// Fills `live` from the state of `range`.
    fn find_live(&mut self, range: Range<usize>) {
        self.live.clear();
        self.live.extend(range.filter(|at| self.state.is_live(*at)));
    }
}

/// Packs the hidden states of `rows` as lhs along H.
fn pack_for_logits(gemm: Gemm, hidden: Slice<'_>, rows: &[usize], h: usize, out: &mut [u32]) {
    for units in gemm.pieces(h) {
        let out = &mut out[gemm.lhs_words(rows.len(), units.start)..];
        let stride = gemm.lhs_stride(units.len());
        gemm.pack_lhs(Rows::list(hidden, h, rows, units), KAxis::Columns, 0, out, stride);
    }
}

/// Packs the hidden states of `rows` along the rows, as the operand of dW.
fn pack_for_head(gemm: Gemm, layout: HeadLayout, hidden: Slice<'_>, rows: &[usize], h: usize, out: &mut [u32]) {
    for piece in gemm.panel_pieces(rows.len()) {
        let source = Rows::list(hidden, h, &rows[piece.clone()], 0..h);
        match layout {
            HeadLayout::VocabHidden => {
                let (first, stride) = (gemm.rhs_words(h, piece.start), gemm.rhs_stride(piece.len()));
                gemm.pack_rhs(source, KAxis::Rows, 0, &mut out[first..], stride);
            }
            HeadLayout::HiddenVocab => {
                let (first, stride) = (gemm.lhs_words(h, piece.start), gemm.lhs_stride(piece.len()));
                gemm.pack_lhs(source, KAxis::Rows, 0, &mut out[first..], stride);
            }
        }
    }
}

/// Sets the places of tokens in the panel: contiguous, or where the forward pass of `forwarded`, the rows of a chunk and
/// the state index of the first one, has put the logits of all tiled tokens of the chunk.
fn set_places(tokens: &mut [Token], forwarded: Option<(&[usize], usize)>, is_tiled: impl Fn(usize) -> bool) {
    let (mut place, mut seen) = (0, 0);
    for token in tokens {
        token.place = place;
        if let Some((rows, at)) = forwarded {
            let before = &rows[seen..token.index - at];
            token.place += before.iter().filter(|row| is_tiled(**row)).count();
            seen = token.index - at + 1;
        }
        place = token.place + 1;
    }
}

impl Head for FusedHead {
    type Tensors<'a> = Tensors<'a>;
    type Scores = Scores;
    type Error = Error;

    fn score(&mut self, tensors: &Tensors<'_>, batch: &TokenBatch) -> Result<Scores> {
        let (hidden, head) = self.inputs(tensors.policy());
        let mut scores = empty_scores(batch);
        for rows in batch.active_rows().chunks(self.blocking.chunk) {
            self.forward(hidden, &head, batch, rows, 0, false);
            self.state.publish(0..rows.len(), rows, &mut scores);
        }
        Ok(scores)
    }

    fn gradient(&mut self, tensors: Tensors<'_>, loss: &Evaluator<'_>) -> Result<(LossSums<f64>, Scores)> {
        let Tensors::Separate(policy, mut grads) = tensors else { unreachable!("the plan has checked the policy") };
        let (hidden, head) = self.inputs(policy);
        let batch = loss.batch();
        let (rows, chunk) = (batch.active_rows(), self.blocking.chunk);
        let (mut scores, mut totals) = (empty_scores(batch), loss.totals());
        let chunks = Chunks::new(loss.config(), loss.sequence_starts(), chunk);
        let score_first = matches!(chunks, Chunks::ScoreFirst);
        let kept = self.blocking.order == LoopOrder::TokenChunks;

        let mut start = 0;
        while start < rows.len() {
            let span = chunks.next(start, rows.len(), chunk);
            let (c, at) = (span.len(), if score_first { start } else { 0 });
            self.forward(hidden, &head, batch, &rows[span.clone()], at, kept && !score_first);
            self.state.publish(at..at + c, &rows[span.clone()], &mut scores);
            if !score_first {
                self.state.evaluate(loss, span.clone(), 0, &mut totals);
                self.find_live(0..c);
                self.backward(hidden, &head, batch, 0..self.live.len(), 0, kept, &rows[span.clone()], &mut grads);
            }
            start = span.end;
        }
        if score_first {
            self.state.evaluate(loss, 0..rows.len(), 0, &mut totals);
            self.find_live(0..rows.len());
            let mut start = 0;
            while start < self.live.len() {
                let end = self.live.len().min(start + chunk);
                self.backward(hidden, &head, batch, start..end, 0, false, rows, &mut grads);
                start = end;
            }
        }
        Ok((loss.finish(totals), scores))
    }
}

/// Returns the items of an optional iterator, then `None` forever.
fn optional<I: Iterator>(mut items: Option<I>) -> impl Iterator<Item = Option<I::Item>> {
    std::iter::from_fn(move || Some(items.as_mut().and_then(Iterator::next)))
}

#[cfg(test)]
mod tests;
