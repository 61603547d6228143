//! The loss of precomputed logits, in tiles.
//!
//! No other tensor has the size of the logits, and each entry needs one exponential: statistics store the
//! exponentials of a chunk for its gradient, which replaces the logits in their own dtype or is added to the caller's
//! f32 accumulator. bf16 is converted in registers. Rows of masked tokens are never read. With a softcap, logits stay
//! unchanged: instead of exponentials, the transformed logits of a chunk are stored, in f32, for the gradient.
//!
//! Blocking: chunks of tokens are small enough to stay in cache for the second pass (`token_chunk`, by default
//! [`CHUNK_BYTES`] of logits); a task is a row, or a block of `vocab_block` entries of one. Softmax sums use the fixed
//! tiles of [`crate::softmax`], so a token's results do not depend on the blocking. A loss whose chunks cannot end at
//! sequences (with ratios per sequence) computes all statistics first, and recomputes them for the gradient.
//!
//! Memory: per token of a chunk, V exponentials (or transformed logits) in f32, a [`Partial`] per tile and ~100 bytes;
//! with ratios per sequence, 72 bytes for every token.
//!
//! Legend: N tokens, C tokens of a chunk, V vocabulary.

use crate::arch::IsaToken;
use crate::convert::Element;
use crate::host::{Slice, SliceMut, Tensors};
use crate::pages::{Aligned, zeros};
use crate::plan::evaluator_bytes;
use crate::softmax::{
    Partial, RowGrad, RowSums, Scales, TILE, Transform, add_gradient, gradient, keep_only, transform_to,
};
use crate::threads::slices::*;
use crate::tokens::{Chunks, TokenState, empty_scores};
use grpo_core::backend_api::evaluate::Evaluator;
use grpo_core::backend_api::plan::Head;
use grpo_core::backend_api::token_columns::LossSums;
use grpo_core::batch::TokenBatch;
use grpo_core::error::{Error, Result};
use grpo_core::{LossConfig, PlanRequest, PolicyOutput, Scores};
use std::sync::Arc;

/// The logits of a chunk in bytes, unless `token_chunk` is set; they fit into a shared cache.
const CHUNK_BYTES: usize = 2 << 20;
/// The minimum tokens per chunk; with fewer, threads would idle.
const LEAST_CHUNK: usize = 4;
/// The entries of a row per task, unless `vocab_block` is set.
const VOCAB_BLOCK: usize = 16 * TILE;

/// The passes over a chunk of tokens: sizes, and the state of the chunk.
struct ChunkPasses {
    isa: IsaToken,
    loss: Arc<LossConfig>,
    transform: Option<Transform>,
    v: usize,
    chunk: usize,
    /// A multiple of [`TILE`].
    vocab_block: usize,
    /// The statistics of every tile of the chunk, `[C, tiles]`.
    partials: Vec<Partial>,
    /// The exponentials of the chunk, or transformed logits, `[C, V]`.
    kept: Aligned<f32>,
    /// The statistics of every row of the chunk, `[C]`.
    sums: Vec<RowSums>,
    state: TokenState,
}

/// The block sizes of a plan.
struct Sizes {
    v: usize,
    /// The tokens C of a chunk.
    chunk: usize,
    /// A multiple of [`TILE`].
    vocab_block: usize,
    /// The tokens whose state is stored at a time.
    tokens: usize,
}

impl Sizes {
    fn new(request: &PlanRequest) -> Self {
        let (v, n) = (request.policy.vocab(), request.max_tokens);
        // The plan has checked that 8 N V does not overflow.
        let chunk = request.tiling.token_chunk.unwrap_or((CHUNK_BYTES / (4 * v)).max(LEAST_CHUNK)).min(n);
        let vocab_block =
            request.tiling.vocab_block.unwrap_or(VOCAB_BLOCK).min(v.next_multiple_of(TILE)).next_multiple_of(TILE);
        let tokens = if request.loss.is_token_level() { chunk } else { n };
        Self { v, chunk, vocab_block, tokens }
    }

    fn partials(&self) -> usize {
        self.chunk * self.v.div_ceil(TILE)
    }
}

/// Returns the bytes that the plan of `request` and its evaluator allocate; saturates on overflow.
pub(crate) fn workspace(request: &PlanRequest) -> usize {
    let sizes = Sizes::new(request);
    [
        (sizes.partials(), size_of::<Partial>()),
        (sizes.chunk * sizes.v, size_of::<f32>()),
        (sizes.chunk, size_of::<RowSums>()),
        (sizes.tokens, TokenState::BYTES),
    ]
    .into_iter()
    .map(|(elements, bytes)| elements.saturating_mul(bytes))
    .fold(evaluator_bytes(request.max_tokens), usize::saturating_add)
}

impl ChunkPasses {
    fn new(request: &PlanRequest, isa: IsaToken) -> Self {
        let sizes = Sizes::new(request);
        let Sizes { v, chunk, vocab_block, tokens } = sizes;
        Self {
            isa,
            loss: Arc::clone(&request.loss),
            transform: Transform::new(&request.loss),
            v,
            chunk,
            vocab_block,
            partials: vec![Partial::default(); sizes.partials()],
            kept: zeros(chunk * v),
            sums: vec![RowSums::EMPTY; chunk],
            state: TokenState::new(tokens),
        }
    }

    /// Computes the statistics of the tokens `rows` and records them from state index `at`. If `keep`, [`Self::write`]
    /// will follow.
    fn statistics<E: Element>(&mut self, logits: &[E], rows: &[usize], batch: &TokenBatch, at: usize, keep: bool) {
        let Self { v, isa, vocab_block: block, transform, ref loss, .. } = *self;
        let scales = |row: &usize| Scales::new(loss, batch.temperature(*row));
        let buffers = self.partials.par_chunks_mut(v.div_ceil(TILE)).zip(self.kept.par_chunks_mut(v));
        buffers.zip(&mut self.sums).zip(rows).for_each(|(((partials, kept), sums), row)| {
            let (z, target, scale) = (&logits[row * v..][..v], batch.targets()[*row] as usize, scales(row).logit);
            let ids = batch.kept(*row);
            let blocks = partials.par_chunks_mut(block / TILE).zip(z.par_chunks(block)).zip(kept.par_chunks_mut(block));
            blocks.enumerate().for_each(|(task, ((partials, z), kept))| {
                let tiles = partials.iter_mut().zip(z.chunks(TILE)).zip(kept.chunks_mut(TILE));
                for (i, ((partial, z), kept)) in (task * block / TILE..).zip(tiles) {
                    let target = place_in_tile(target, i);
                    *partial = match (&transform, ids) {
                        (Some(transform), ids) => {
                            transform_to(isa, z, transform, kept);
                            if let Some(ids) = ids {
                                keep_only(kept, i * TILE, ids);
                            }
                            Partial::new(isa, kept, target, scale)
                        }
                        (None, Some(ids)) => {
                            let mut masked = [0.0; TILE];
                            masked.iter_mut().zip(z).for_each(|(masked, z)| *masked = z.widened());
                            let masked = &mut masked[..z.len()];
                            keep_only(masked, i * TILE, ids);
                            Partial::keeping(isa, masked, target, scale, kept)
                        }
                        (None, None) if keep => Partial::keeping(isa, z, target, scale, kept),
                        (None, None) => Partial::new(isa, z, target, scale),
                    };
                }
            });
            *sums = RowSums::EMPTY;
            for (i, partial) in partials.iter().enumerate() {
                sums.merge(partial, place_in_tile(target, i).is_some(), scale);
            }
        });
        for (at, (sums, row)) in (at..).zip(self.sums.iter().zip(rows)) {
            self.state.record(at, sums, &scales(row));
        }
    }

    /// Computes the gradient of the tokens `rows`, whose state starts at `at`, if `access` needs it. The latest
    /// call of [`Self::statistics`] must have been for these tokens.
    fn write<E: Element>(&self, access: &mut Access<'_, E>, rows: &[usize], batch: &TokenBatch, at: usize) {
        let (Some(first), Some(last), v, block) = (rows.first(), rows.last(), self.v, self.vocab_block) else { return };
        let token = |row: usize| {
            let i = rows.binary_search(&row).ok()?;
            let scales = Scales::new(&self.loss, batch.temperature(row));
            let row_grad = self.state.is_live(at + i).then(|| self.state.row_grad(at + i, &scales));
            Some(Token { i, target: batch.targets()[row] as usize, scale: scales.logit, row_grad })
        };
        let span = first * v..(last + 1) * v;
        match access {
            Access::Separate(_, None) => {}
            Access::Separate(logits, Some(grad)) => grad[span].par_chunks_mut(v).enumerate().for_each(|(row, out)| {
                let Some((token, row_grad)) = token(first + row).and_then(|t| Some((t, t.row_grad?))) else { return };
                let blocks = out.par_chunks_mut(block).zip(logits[(first + row) * v..][..v].par_chunks(block));
                blocks.enumerate().for_each(|(task, (out, z))| {
                    for (index, (out, z)) in (task * block / TILE..).zip(out.chunks_mut(TILE).zip(z.chunks(TILE))) {
                        self.add_tile(&token, &row_grad, index, z, out);
                    }
                });
            }),
            Access::InPlace(logits) => logits[span].par_chunks_mut(v).enumerate().for_each(|(row, z)| {
                let Some(token) = token(first + row) else { return };
                z.par_chunks_mut(block).enumerate().for_each(|(task, z)| {
                    let Some(row_grad) = &token.row_grad else { return z.fill(E::nearest(0.0)) };
                    for (index, z) in (task * block / TILE..).zip(z.chunks_mut(TILE)) {
                        self.replace_tile(&token, row_grad, index, z);
                    }
                });
            }),
        }
    }

    /// Returns the stored values of tile `index` of a token, the tile's row_grad, and the target's index in it.
    fn kept(&self, token: &Token, row_grad: &RowGrad, index: usize) -> (&[f32], RowGrad, Option<usize>) {
        let partial = &self.partials[token.i * self.v.div_ceil(TILE) + index];
        // Exponentials are relative to the tile's maximum; for transformed logits, they are computed relative to the row's.
        let row_grad = if self.transform.is_some() { *row_grad } else { row_grad.for_tile(partial, token.scale) };
        (&self.kept[token.i * self.v + index * TILE..], row_grad, place_in_tile(token.target, index))
    }

    /// Adds the gradient of a tile of logits `z` to `out`.
    fn add_tile<E: Element>(&self, token: &Token, row_grad: &RowGrad, index: usize, z: &[E], out: &mut [f32]) {
        let (kept, row_grad, target) = self.kept(token, row_grad, index);
        let Some(transform) = &self.transform else {
            return add_gradient(self.isa, z, kept, target, &row_grad, token.scale, out);
        };
        let gradient = &mut [0.0; TILE][..z.len()];
        transform.gradient_to(self.isa, &kept[..z.len()], target, &row_grad, token.scale, gradient, false);
        out.iter_mut().zip(gradient).for_each(|(out, gradient)| *out += *gradient);
    }

    /// Replaces a tile of logits by its gradient.
    fn replace_tile<E: Element>(&self, token: &Token, row_grad: &RowGrad, index: usize, z: &mut [E]) {
        let (kept, row_grad, target) = self.kept(token, row_grad, index);
        let Some(transform) = &self.transform else {
            return gradient(self.isa, z, kept, target, &row_grad, token.scale);
        };
        let gradient = &mut [0.0; TILE][..z.len()];
        transform.gradient_to(self.isa, &kept[..z.len()], target, &row_grad, token.scale, gradient, false);
        z.iter_mut().zip(gradient).for_each(|(z, gradient)| *z = E::nearest(*gradient));
    }

    fn score<E: Element>(&mut self, logits: &[E], batch: &TokenBatch) -> Scores {
        let mut scores = empty_scores(batch);
        for rows in batch.active_rows().chunks(self.chunk) {
            self.statistics(logits, rows, batch, 0, false);
            self.state.publish(0..rows.len(), rows, &mut scores);
        }
        scores
    }

    /// Computes the loss and the gradient of the logits in `access`.
    fn gradient<E: Element>(&mut self, access: &mut Access<'_, E>, loss: &Evaluator<'_>) -> (LossSums<f64>, Scores) {
        let (batch, rows) = (loss.batch(), loss.batch().active_rows());
        let (mut scores, mut totals) = (empty_scores(batch), loss.totals());
        let chunks = Chunks::new(loss.config(), loss.sequence_starts(), self.chunk);
        let score_first = matches!(chunks, Chunks::ScoreFirst);
        let mut start = 0;
        while start < rows.len() {
            let span = chunks.next(start, rows.len(), self.chunk);
            let (rows, at) = (&rows[span.clone()], if score_first { start } else { 0 });
            start = span.end;
            self.statistics(access.logits(), rows, batch, at, !score_first);
            self.state.publish(at..at + rows.len(), rows, &mut scores);
            if !score_first {
                self.state.evaluate(loss, span, 0, &mut totals);
                self.write(access, rows, batch, 0);
            }
        }
        if score_first {
            self.state.evaluate(loss, 0..rows.len(), 0, &mut totals);
            for (chunk, rows) in rows.chunks(self.chunk).enumerate() {
                // Recompute the stored values; the recorded statistics do not change.
                self.statistics(access.logits(), rows, batch, chunk * self.chunk, true);
                self.write(access, rows, batch, chunk * self.chunk);
            }
        }
        (loss.finish(totals), scores)
    }
}

/// A token whose gradient is computed.
#[derive(Clone, Copy)]
struct Token {
    /// The position of the token in the chunk.
    i: usize,
    target: usize,
    /// The factor of the token's logits, [`Scales::logit`].
    scale: f32,
    /// `None` if the token has no gradient.
    row_grad: Option<RowGrad>,
}

/// The logits of a call and the destination of their gradient: a separate accumulator, none, or the logits themselves.
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

/// Returns the index of the target within tile `index`, if it is in this tile.
fn place_in_tile(target: usize, index: usize) -> Option<usize> {
    target.checked_sub(index * TILE).filter(|place| *place < TILE)
}

/// The head of logits that the policy passes.
pub(crate) struct LogitsHead {
    passes: ChunkPasses,
}

impl LogitsHead {
    pub(crate) fn new(request: &PlanRequest, isa: IsaToken) -> Self {
        Self { passes: ChunkPasses::new(request, isa) }
    }

    /// Also writes zeros to the rows of masked tokens.
    fn in_place<E: Element>(&mut self, logits: &mut [E], loss: &Evaluator<'_>) -> (LossSums<f64>, Scores) {
        let made = self.passes.gradient(&mut Access::InPlace(&mut *logits), loss);
        let is_masked = |(i, _): &(usize, &mut [E])| !loss.batch().is_active(*i);
        logits.par_chunks_mut(self.passes.v).enumerate().filter(is_masked).for_each(|(_, z)| z.fill(E::nearest(0.0)));
        made
    }
}

impl Head for LogitsHead {
    type Tensors<'a> = Tensors<'a>;
    type Scores = Scores;
    type Error = Error;

    fn score(&mut self, tensors: &Tensors<'_>, batch: &TokenBatch) -> Result<Scores> {
        Ok(match tensors.policy() {
            PolicyOutput::Logits(Slice::F32(logits)) => self.passes.score(logits, batch),
            PolicyOutput::Logits(Slice::Bf16(logits)) => self.passes.score(logits, batch),
            PolicyOutput::Hidden { .. } => unreachable!("the plan has checked the policy"),
        })
    }

    fn gradient(&mut self, tensors: Tensors<'_>, loss: &Evaluator<'_>) -> Result<(LossSums<f64>, Scores)> {
        let passes = &mut self.passes;
        Ok(match tensors {
            Tensors::Separate(PolicyOutput::Logits(Slice::F32(logits)), grads) => {
                passes.gradient(&mut Access::Separate(logits, grads.logits), loss)
            }
            Tensors::Separate(PolicyOutput::Logits(Slice::Bf16(logits)), grads) => {
                passes.gradient(&mut Access::Separate(logits, grads.logits), loss)
            }
            Tensors::Separate(PolicyOutput::Hidden { .. }, _) => unreachable!("the plan has checked the policy"),
            Tensors::InPlace(SliceMut::F32(logits)) => self.in_place(logits, loss),
            Tensors::InPlace(SliceMut::Bf16(logits)) => self.in_place(logits, loss),
        })
    }
}
