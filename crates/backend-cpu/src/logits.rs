//! The loss of given logits, in tiles.
//!
//! Avoids any tensor of the size of the logits beside the logits: statistics need one pass over a row, its gradient
//! another, written over the logits in their own dtype or added to the caller's f32 buffer. bf16 is widened a tile at a
//! time. Rows of masked tokens are never read.
//!
//! Blocking: chunks of tokens small enough to still be in cache for the second pass (`token_chunk`, by default
//! [`CHUNK_BYTES`] of logits); a task is a row, or a block of `vocab_block` entries of one. Softmax sums run over the
//! fixed tiles of [`crate::softmax`], so a token's results do not depend on any of this. A loss whose chunks cannot be
//! cut at sequences (sequence-level ratios) makes all statistics first and reads the logits twice.
//!
//! Memory: per token of a chunk a [`Partial`] per tile and ~100 bytes; at sequence level 72 bytes for every token.
//!
//! Legend: N tokens, C tokens of a chunk, V vocabulary.

use crate::convert::{narrow, widen};
use crate::host::{Grads, Policy, Slice, SliceMut};
use crate::isa::Level;
use crate::plan::{Kernel, evaluator_bytes, inputs_bytes, outputs_bytes};
use crate::softmax::{Partial, RowSums, Scales, TILE, gradient};
use crate::tokens::{Chunks, TokenState, empty_scores};
use grpo_core::batch::TokenBatch;
use grpo_core::error::Result;
use grpo_core::evaluate::Evaluator;
use grpo_core::{LossConfig, LossOutput, MemoryReport, PlanRequest, Scores};
use half::bf16;
use rayon::prelude::*;
use std::ops::Range;

/// Logits of a chunk unless `token_chunk` says otherwise: what a shared cache holds.
const CHUNK_BYTES: usize = 8 << 20;
/// Fewer tokens than this per chunk would leave threads idle.
const LEAST_CHUNK: usize = 16;
/// Entries of a task's part of a row, unless `vocab_block` says otherwise.
const VOCAB_BLOCK: usize = 64 * TILE;

/// A dtype that logits come in.
trait Element: Copy + Send + Sync {
    fn load(level: Level, from: &[Self], to: &mut [f32]);
    fn store(level: Level, from: &[f32], to: &mut [Self]);
}

impl Element for f32 {
    fn load(_: Level, from: &[Self], to: &mut [f32]) {
        to.copy_from_slice(from);
    }
    fn store(_: Level, from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }
}

impl Element for bf16 {
    fn load(level: Level, from: &[Self], to: &mut [f32]) {
        widen(level, from, to);
    }
    fn store(level: Level, from: &[f32], to: &mut [Self]) {
        narrow(level, from, to);
    }
}

/// Sizes, and the state of a chunk.
struct LogitsKernel {
    level: Level,
    loss: LossConfig,
    scales: Scales,
    v: usize,
    chunk: usize,
    /// A multiple of [`TILE`].
    vocab_block: usize,
    kept: usize,
    /// `[C, tiles]`.
    partials: Vec<Partial>,
    /// `[C]`.
    sums: Vec<RowSums>,
    state: TokenState,
}

impl LogitsKernel {
    fn new(request: &PlanRequest, level: Level) -> Self {
        let (v, n) = (request.policy.vocab(), request.max_tokens);
        let tiles = v.div_ceil(TILE);
        let chunk = request.tiling.token_chunk.unwrap_or((CHUNK_BYTES / (4 * v)).max(LEAST_CHUNK)).min(n);
        let vocab_block =
            request.tiling.vocab_block.unwrap_or(VOCAB_BLOCK).min(v.next_multiple_of(TILE)).next_multiple_of(TILE);
        let kept = if request.loss.is_token_level() { chunk } else { n };
        Self {
            level,
            loss: request.loss.clone(),
            scales: Scales::new(&request.loss),
            v,
            chunk,
            vocab_block,
            kept,
            partials: vec![Partial::default(); chunk * tiles],
            sums: vec![RowSums::EMPTY; chunk],
            state: TokenState::new(kept),
        }
    }

    fn workspace(&self) -> usize {
        self.partials.len() * size_of::<Partial>() + self.chunk * size_of::<RowSums>() + self.kept * TokenState::BYTES
    }

    /// Statistics of the tokens `rows`, recorded from `at` on. Row `rows[i]` of the batch is row `places[i]` of `logits`.
    fn statistics<E: Element>(
        &mut self,
        logits: &[E],
        rows: &[usize],
        places: &[usize],
        batch: &TokenBatch,
        at: usize,
    ) {
        let (v, level) = (self.v, self.level);
        let (scale, tiles, per_task) = (self.scales.logit, self.v.div_ceil(TILE), self.vocab_block / TILE);
        let partials = self.partials.par_chunks_mut(tiles).zip(&mut self.sums).zip(rows.par_iter().zip(places));
        partials.for_each(|((partials, sums), (row, place))| {
            let z = &logits[place * v..(place + 1) * v];
            let target = batch.targets()[*row] as usize;
            partials.par_chunks_mut(per_task).zip(z.par_chunks(per_task * TILE)).enumerate().for_each(
                |(task, (partials, z))| {
                    let mut tile = [0.0; TILE];
                    for (i, (partial, z)) in partials.iter_mut().zip(z.chunks(TILE)).enumerate() {
                        let tile = &mut tile[..z.len()];
                        E::load(level, z, tile);
                        *partial = Partial::new(level, tile, place_in_tile(target, task * per_task + i), scale);
                    }
                },
            );
            *sums = RowSums::EMPTY;
            for (i, partial) in partials.iter().enumerate() {
                sums.merge(partial, place_in_tile(target, i).is_some(), scale);
            }
        });
        self.state.record(at, &self.sums[..rows.len()], &self.scales);
    }

    /// Adds the gradient of the tokens `rows` (state from `at` on) to `grad: [N, V]`.
    fn add_gradient<E: Element>(&self, logits: &[E], rows: &[usize], batch: &TokenBatch, at: usize, grad: &mut [f32]) {
        let (Some(first), Some(last), v) = (rows.first(), rows.last(), self.v) else { return };
        grad[first * v..(last + 1) * v].par_chunks_mut(v).enumerate().for_each(|(i, out)| {
            let row = first + i;
            let Ok(position) = rows.binary_search(&row) else { return };
            if !self.state.is_live(at + position) {
                return;
            }
            let (slope, scale) = (self.state.slope(at + position, &self.scales), self.scales.logit);
            let (target, block) = (batch.targets()[row] as usize, self.vocab_block);
            let z = &logits[row * v..(row + 1) * v];
            out.par_chunks_mut(block).zip(z.par_chunks(block)).enumerate().for_each(|(task, (out, z))| {
                let mut tile = [0.0; TILE];
                for (i, (out, z)) in out.chunks_mut(TILE).zip(z.chunks(TILE)).enumerate() {
                    let tile = &mut tile[..z.len()];
                    E::load(self.level, z, tile);
                    gradient(self.level, tile, place_in_tile(target, task * block / TILE + i), &slope, scale);
                    out.iter_mut().zip(tile).for_each(|(out, dz)| *out += *dz);
                }
            });
        });
    }

    /// Overwrites the logits of the tokens `rows` with their gradient; `places` as in [`Self::statistics`], ascending.
    fn overwrite<E: Element>(&self, logits: &mut [E], rows: &[usize], places: &[usize], batch: &TokenBatch, at: usize) {
        let (Some(first), Some(last), v) = (places.first(), places.last(), self.v) else { return };
        logits[first * v..(last + 1) * v].par_chunks_mut(v).enumerate().for_each(|(i, z)| {
            let Ok(position) = places.binary_search(&(first + i)) else { return };
            let (slope, scale) = (self.state.slope(at + position, &self.scales), self.scales.logit);
            let (target, live) = (batch.targets()[rows[position]] as usize, self.state.is_live(at + position));
            z.par_chunks_mut(self.vocab_block).enumerate().for_each(|(block, z)| {
                let mut tile = [0.0; TILE];
                for (i, z) in z.chunks_mut(TILE).enumerate() {
                    let tile = &mut tile[..z.len()];
                    if live {
                        E::load(self.level, z, tile);
                        gradient(
                            self.level,
                            tile,
                            place_in_tile(target, block * self.vocab_block / TILE + i),
                            &slope,
                            scale,
                        );
                    }
                    E::store(self.level, tile, z);
                }
            });
        });
    }

    fn score<E: Element>(&mut self, logits: &[E], batch: &TokenBatch) -> Scores {
        let mut scores = empty_scores(batch);
        for rows in batch.active_rows().chunks(self.chunk) {
            self.statistics(logits, rows, rows, batch, 0);
            self.state.publish(0..rows.len(), rows, &mut scores);
        }
        scores
    }

    /// Loss and gradient of logits behind `access`; row `active_rows[i]` of the batch is row `places[i]` there.
    fn value_and_grad<E: Element>(
        &mut self,
        access: &mut Access<'_, E>,
        places: &[usize],
        batch: &TokenBatch,
    ) -> Result<LossOutput> {
        let loss = self.loss.clone();
        let evaluator = Evaluator::new(&loss, batch)?;
        let rows = batch.active_rows();
        let (mut scores, mut totals) = (empty_scores(batch), evaluator.totals());
        let chunks = Chunks::new(&loss, evaluator.sequence_starts(), self.chunk);
        let score_first = matches!(chunks, Chunks::ScoreFirst);
        let mut start = 0;
        while start < rows.len() {
            let span = chunks.next(start, rows.len(), self.chunk);
            let at = if score_first { start } else { 0 };
            self.statistics(access.logits(), &rows[span.clone()], &places[span.clone()], batch, at);
            self.state.publish(at..at + span.len(), &rows[span.clone()], &mut scores);
            if !score_first {
                self.state.evaluate(&evaluator, span.clone(), 0, &mut totals);
                self.write(access, span.clone(), places, batch, 0);
            }
            start = span.end;
        }
        if score_first {
            self.state.evaluate(&evaluator, 0..rows.len(), 0, &mut totals);
            self.write(access, 0..rows.len(), places, batch, 0);
        }
        let (loss, metrics) = evaluator.finish(totals);
        Ok(LossOutput { loss, scores, metrics })
    }

    fn write<E: Element>(
        &self,
        access: &mut Access<'_, E>,
        span: Range<usize>,
        places: &[usize],
        batch: &TokenBatch,
        at: usize,
    ) {
        let rows = &batch.active_rows()[span.clone()];
        match access {
            Access::Separate(logits, Some(grad)) => self.add_gradient(logits, rows, batch, at, grad),
            Access::Separate(_, None) => {}
            Access::InPlace(logits) => self.overwrite(logits, rows, &places[span], batch, at),
        }
    }
}

/// Where logits are and where their gradient goes.
enum Access<'a, E> {
    Separate(&'a [E], Option<&'a mut [f32]>),
    InPlace(&'a mut [E]),
}

impl<E> Access<'_, E> {
    fn logits(&self) -> &[E] {
        match self {
            Self::Separate(logits, _) => logits,
            Self::InPlace(logits) => logits,
        }
    }
}

/// Index of the target within tile `index`, if it lies there.
fn place_in_tile(target: usize, index: usize) -> Option<usize> {
    target.checked_sub(index * TILE).filter(|place| *place < TILE)
}

/// The loss of logits that the policy hands over.
pub(crate) struct LogitsPlan {
    request: PlanRequest,
    kernel: LogitsKernel,
}

impl LogitsPlan {
    pub(crate) fn new(request: &PlanRequest, level: Level) -> Self {
        Self { request: request.clone(), kernel: LogitsKernel::new(request, level) }
    }

    fn in_place<E: Element>(&mut self, logits: &mut [E], zero: E, batch: &TokenBatch) -> Result<LossOutput> {
        let out = self.kernel.value_and_grad(&mut Access::InPlace(&mut *logits), batch.active_rows(), batch)?;
        let v = self.kernel.v;
        logits.par_chunks_mut(v).enumerate().filter(|(i, _)| !batch.is_active(*i)).for_each(|(_, z)| z.fill(zero));
        Ok(out)
    }
}

impl Kernel for LogitsPlan {
    fn score(&mut self, policy: Policy<'_>, batch: &TokenBatch) -> Result<Scores> {
        Ok(match policy {
            Policy::Logits(Slice::F32(logits)) => self.kernel.score(logits, batch),
            Policy::Logits(Slice::Bf16(logits)) => self.kernel.score(logits, batch),
            Policy::LogitsInPlace(SliceMut::F32(logits)) => self.kernel.score(logits, batch),
            Policy::LogitsInPlace(SliceMut::Bf16(logits)) => self.kernel.score(logits, batch),
            Policy::Hidden { .. } => unreachable!("the wrapper has checked the policy against the plan"),
        })
    }

    fn value_and_grad(&mut self, policy: Policy<'_>, batch: &TokenBatch, grads: Grads<'_>) -> Result<LossOutput> {
        let (kernel, rows) = (&mut self.kernel, batch.active_rows());
        match policy {
            Policy::Logits(Slice::F32(logits)) => {
                kernel.value_and_grad(&mut Access::Separate(logits, grads.logits), rows, batch)
            }
            Policy::Logits(Slice::Bf16(logits)) => {
                kernel.value_and_grad(&mut Access::Separate(logits, grads.logits), rows, batch)
            }
            Policy::LogitsInPlace(SliceMut::F32(logits)) => self.in_place(logits, 0.0, batch),
            Policy::LogitsInPlace(SliceMut::Bf16(logits)) => self.in_place(logits, bf16::ZERO, batch),
            Policy::Hidden { .. } => unreachable!("the wrapper has checked the policy against the plan"),
        }
    }

    fn memory(&self) -> MemoryReport {
        MemoryReport {
            inputs: inputs_bytes(&self.request),
            outputs: outputs_bytes(&self.request),
            workspace: self.kernel.workspace() + evaluator_bytes(self.request.max_tokens),
        }
    }
}
