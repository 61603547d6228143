//! The loss of hidden states x LM head without logits.
//!
//! Avoids the `[N, V]` logits and their gradient, masked rows altogether, and the backward products of rows through
//! which nothing flows (clipped, zero advantage).
//!
//! Blocking: a chunk of C active tokens (gathered, widened to f32) meets panels of the vocabulary ([`crate::tiling`]):
//!
//! * token chunks: logits of the chunk for the whole vocabulary are made once, turned into dlogits where they lie, and
//!   multiplied into dH and dW: three products;
//! * vocabulary panels: panels are made for the statistics, and made again for the gradient: four products, but chunks
//!   are so large that the head and its gradient hardly travel.
//!
//! A token's results do not depend on its neighbours, on the blocking or on the number of threads, to the bit:
//! products have position-independent sums ([`crate::gemm`]), softmax sums run over fixed tiles ([`crate::softmax`]).
//! The head's gradient depends on the chunks, over which it is summed. Where the workspace budget binds, more threads
//! leave less of it for tokens, so that the chosen chunk, and with it the last bits of that gradient, depends on the
//! number of threads; a given `token_chunk` settles it.
//!
//! Memory: [`crate::tiling::Problem::workspace`], allocated with the plan; never more than the budget.
//!
//! Legend: N tokens, L live rows of a chunk of C, H hidden, V vocabulary, T entries of a tile, P tiles of a panel.

use crate::gemm::View;
use crate::head::{HIDDEN_BLOCK, Head, HeadGradient, Slot, drain, gather};
use crate::host::{Grads, Policy, Slice};
use crate::plan::{Kernel, inputs_bytes, outputs_bytes};
use crate::softmax::{Partial, RowSums, Scales, Slope, TILE, gradient};
use crate::tiling::{Blocking, Problem, choose};
use crate::tokens::{Chunks, TokenState, empty_scores};
use grpo_core::batch::TokenBatch;
use grpo_core::error::Result;
use grpo_core::evaluate::Evaluator;
use grpo_core::{HeadLayout, LoopOrder, LossOutput, MemoryReport, PlanRequest, Scores};
use std::ops::Range;

/// A planned fused loss: sizes and workspace.
pub(crate) struct FusedPlan {
    request: PlanRequest,
    problem: Problem,
    blocking: Blocking,
    scales: Scales,
    work: Workspace,
    state: TokenState,
    /// State indices of tokens through which something flows.
    live: Vec<usize>,
}

/// Buffers of one chunk.
struct Workspace {
    /// `[C, H]`.
    x: Vec<f32>,
    /// P blocks `[C, T]`: logits, then dlogits.
    panel: Vec<f32>,
    /// Blocks `[L, <= HIDDEN_BLOCK]`.
    dh: Vec<f32>,
    /// `[P, C]`.
    partials: Vec<Partial>,
    /// `[C]`.
    sums: Vec<RowSums>,
    /// `[C]`.
    slopes: Vec<Slope>,
    /// `[C]`.
    targets: Vec<usize>,
    slots: Vec<Slot>,
}

impl FusedPlan {
    /// # Errors
    /// [`grpo_core::Error::Budget`] when no blocking fits.
    pub(crate) fn new(request: &PlanRequest, h: usize, layout: HeadLayout, threads: usize) -> Result<Self> {
        let problem = Problem::new(request, h, layout);
        let blocking = choose(request, &problem, threads)?;
        let (c, p) = (blocking.chunk, blocking.panel_tiles);
        let kept = if problem.keeps_all { problem.n } else { c };
        let work = Workspace {
            x: vec![0.0; c * h],
            panel: vec![0.0; c * p * problem.stride()],
            dh: vec![0.0; if problem.hidden_gradient { c * h } else { 0 }],
            partials: vec![Partial::default(); c * p],
            sums: vec![RowSums::EMPTY; c],
            slopes: vec![Slope::default(); c],
            targets: vec![0; c],
            slots: (0..blocking.slots).map(|_| Slot::new(h, problem.v, problem.bf16)).collect(),
        };
        Ok(Self {
            request: request.clone(),
            problem,
            blocking,
            scales: Scales::new(&request.loss),
            work,
            state: TokenState::new(kept),
            live: Vec::with_capacity(kept),
        })
    }

    /// Hidden states and head of a call. The wrapper has checked that the policy hands over both.
    fn inputs<'a>(&self, policy: Policy<'a>) -> (Slice<'a>, Head<'a>) {
        let Policy::Hidden { hidden, lm_head, bias } = policy else {
            unreachable!("the wrapper has checked the policy against the plan")
        };
        let Problem { h, v, layout, .. } = self.problem;
        (hidden, Head { weight: lm_head, bias, layout, h, v })
    }

    /// Panels as runs of tiles.
    fn panels(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (tiles, p) = (self.problem.tiles(), self.blocking.panel_tiles);
        (0..tiles).step_by(p).map(move |first| first..tiles.min(first + p))
    }

    /// Gathers the tokens `rows` as the chunk.
    fn load(&mut self, hidden: Slice<'_>, batch: &TokenBatch, rows: &[usize]) {
        gather(hidden, rows, self.problem.h, &mut self.work.x);
        for (target, row) in self.work.targets.iter_mut().zip(rows) {
            // Checked to be an index of the vocabulary.
            *target = batch.targets()[*row] as usize;
        }
    }

    /// Statistics of the chunk's `c` tokens, recorded from `at` on. Token chunks leave the logits in the panel.
    fn forward(&mut self, head: &Head<'_>, c: usize, at: usize) {
        let (stride, scale, panels) = (self.problem.stride(), self.scales.logit, self.panels());
        let Workspace { x, panel, partials, sums, targets, slots, .. } = &mut self.work;
        let (x, targets) = (View::new(x, c, self.problem.h, self.problem.h), &targets[..c]);
        sums[..c].fill(RowSums::EMPTY);
        for tiles in panels {
            let blocks = panel.chunks_mut(c * stride).zip(partials.chunks_mut(c));
            drain(slots, tiles.clone().zip(blocks), |slot, (index, (block, partials))| {
                let tile = head.tile(index);
                head.logits(index, x, block, stride, slot);
                for ((z, partial), target) in block.chunks(stride).zip(partials).zip(targets) {
                    *partial = Partial::new(&z[..tile.len()], within(*target, &tile), scale);
                }
            });
            for (index, partials) in tiles.zip(partials.chunks(c)) {
                let tile = head.tile(index);
                for ((sums, partial), target) in sums.iter_mut().zip(partials).zip(targets) {
                    sums.merge(partial, tile.contains(target), scale);
                }
            }
        }
        self.state.record(at, &sums[..c], &self.scales);
    }

    /// Adds the gradients of the chunk's rows `live` (ascending state indices, `at` being that of row 0) to `grads`.
    /// `forwarded` tells how many rows the panel still holds the logits of, if it does. `rows`: the chunk's tokens.
    fn backward(
        &mut self,
        head: &Head<'_>,
        live: Range<usize>,
        at: usize,
        forwarded: Option<usize>,
        rows: &[usize],
        grads: &mut Grads<'_>,
    ) {
        let (h, stride, scale) = (self.problem.h, self.problem.stride(), self.scales.logit);
        let panels = self.panels();
        let (live, work) = (&self.live[live], &mut self.work);
        let l = live.len();
        if l == 0 {
            return;
        }
        // Rows move up over those that nothing flows through; the panel's follow tile by tile.
        for (slot, index) in live.iter().enumerate() {
            let row = index - at;
            work.slopes[slot] = self.state.slope(*index, &self.scales);
            work.targets[slot] = work.targets[row];
            if slot != row {
                work.x.copy_within(row * h..(row + 1) * h, slot * h);
            }
        }
        let Workspace { x, panel, dh, slopes, targets, slots, .. } = work;
        let (x, block) = (View::new(x, l, h, h), forwarded.unwrap_or(l) * stride);
        for tiles in panels {
            let bias = grads.bias.as_mut().map(|b| b[tiles.start * TILE..].chunks_mut(TILE));
            let blocks = panel.chunks_mut(block).zip(optional(bias));
            drain(slots, tiles.clone().zip(blocks), |slot, (index, (block, bias))| {
                let tile = head.tile(index);
                if forwarded.is_none() {
                    head.logits(index, x, block, stride, slot);
                }
                for (to, from) in live.iter().map(|index| index - at).enumerate() {
                    if forwarded.is_some() && to != from {
                        block.copy_within(from * stride..from * stride + tile.len(), to * stride);
                    }
                    let z = &mut block[to * stride..to * stride + tile.len()];
                    gradient(z, within(targets[to], &tile), &slopes[to], scale);
                }
                if let Some(bias) = bias {
                    for z in block.chunks(stride).take(l) {
                        bias.iter_mut().zip(z).for_each(|(b, z)| *b += z);
                    }
                }
            });
            if let Some(grad) = &mut grads.lm_head {
                let (layout, v, tiles) = (head.layout, head.v, tiles.clone());
                HeadGradient { layout, h, v, tiles, panel, block, stride, x }.add_to(grad, slots);
            }
            if grads.hidden.is_some() {
                let blocks = dh[..l * h].chunks_mut(l * HIDDEN_BLOCK).enumerate();
                drain(slots, blocks, |slot, (i, out)| {
                    let units = i * HIDDEN_BLOCK..h.min((i + 1) * HIDDEN_BLOCK);
                    for (i, index) in tiles.clone().enumerate() {
                        let dlogits = View::new(&panel[i * block..], l, head.tile(index).len(), stride);
                        head.hidden_gradient(index, units.clone(), dlogits, out, index > 0, slot);
                    }
                });
            }
        }
        if let Some(grad) = &mut grads.hidden {
            for (i, out) in dh[..l * h].chunks(l * HIDDEN_BLOCK).enumerate() {
                let width = out.len() / l;
                for (from, index) in out.chunks(width).zip(live) {
                    let to = &mut grad[rows[index - at] * h + i * HIDDEN_BLOCK..][..width];
                    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
                }
            }
        }
    }

    /// Fills `live` from the state of `range`.
    fn find_live(&mut self, range: Range<usize>) {
        self.live.clear();
        self.live.extend(range.filter(|at| self.state.is_live(*at)));
    }
}

impl Kernel for FusedPlan {
    fn score(&mut self, policy: Policy<'_>, batch: &TokenBatch) -> Result<Scores> {
        let (hidden, head) = self.inputs(policy);
        let mut scores = empty_scores(batch);
        for rows in batch.active_rows().chunks(self.blocking.chunk) {
            self.load(hidden, batch, rows);
            self.forward(&head, rows.len(), 0);
            self.state.publish(0..rows.len(), rows, &mut scores);
        }
        Ok(scores)
    }

    fn value_and_grad(&mut self, policy: Policy<'_>, batch: &TokenBatch, mut grads: Grads<'_>) -> Result<LossOutput> {
        // The plan's own configuration, out of the way of `&mut self`.
        let loss = self.request.loss.clone();
        let evaluator = Evaluator::new(&loss, batch)?;
        let (hidden, head) = self.inputs(policy);
        let (rows, chunk) = (batch.active_rows(), self.blocking.chunk);
        let (mut scores, mut totals) = (empty_scores(batch), evaluator.totals());
        let chunks = Chunks::new(&loss, evaluator.sequence_starts(), chunk);
        let score_first = matches!(chunks, Chunks::ScoreFirst);
        let kept = self.blocking.order == LoopOrder::TokenChunks;

        let mut start = 0;
        while start < rows.len() {
            let span = chunks.next(start, rows.len(), chunk);
            let (c, at) = (span.len(), if score_first { start } else { 0 });
            self.load(hidden, batch, &rows[span.clone()]);
            self.forward(&head, c, at);
            self.state.publish(at..at + c, &rows[span.clone()], &mut scores);
            if !score_first {
                self.state.evaluate(&evaluator, span.clone(), 0, &mut totals);
                self.find_live(0..c);
                self.backward(&head, 0..self.live.len(), 0, kept.then_some(c), &rows[span.clone()], &mut grads);
            }
            start = span.end;
        }
        if score_first {
            self.state.evaluate(&evaluator, 0..rows.len(), 0, &mut totals);
            self.find_live(0..rows.len());
            // Chunks of positions; the rows among them that nothing flows through are gathered with the others.
            let mut start = 0;
            while start < self.live.len() {
                let first = self.live[start];
                let end = self.live.partition_point(|at| *at < first + chunk);
                let span = first..self.live[end - 1] + 1;
                self.load(hidden, batch, &rows[span.clone()]);
                self.backward(&head, start..end, first, None, &rows[span], &mut grads);
                start = end;
            }
        }
        let (loss, metrics) = evaluator.finish(totals);
        Ok(LossOutput { loss, scores, metrics })
    }

    fn memory(&self) -> MemoryReport {
        MemoryReport {
            inputs: inputs_bytes(&self.request),
            outputs: outputs_bytes(&self.request),
            workspace: self.problem.workspace(&self.blocking),
        }
    }
}

/// Index of `target` within a tile.
pub(crate) fn within(target: usize, tile: &Range<usize>) -> Option<usize> {
    tile.contains(&target).then(|| target - tile.start)
}

/// The items of an iterator that may not be there, then `None` for ever.
fn optional<I: Iterator>(mut items: Option<I>) -> impl Iterator<Item = Option<I::Item>> {
    std::iter::from_fn(move || Some(items.as_mut().and_then(Iterator::next)))
}
