//! Per-token state between the softmax and the loss, and the division of tokens into chunks.

use crate::softmax::{Row, RowGrad, RowSums, Scales};
use grpo_core::backend_api::evaluate::{Evaluator, Totals};
use grpo_core::batch::TokenBatch;
use grpo_core::{LossConfig, Scores};
use std::ops::Range;

/// The statistics of some tokens, and their logp, entropy and the loss's derivatives. They are rounded to the caller's
/// f32, but stored in f64, because the loss is evaluated in f64.
#[derive(Debug)]
pub(crate) struct TokenState {
    rows: Vec<Row>,
    logp: Vec<f64>,
    entropy: Vec<f64>,
    dlogp: Vec<f64>,
    dentropy: Vec<f64>,
}

impl TokenState {
    pub(crate) const BYTES: usize = size_of::<Row>() + 4 * size_of::<f64>();

    /// Allocates the state of `tokens` tokens.
    pub(crate) fn new(tokens: usize) -> Self {
        let zeros = || vec![0.0; tokens];
        let rows = vec![Row::default(); tokens];
        Self { rows, logp: zeros(), entropy: zeros(), dlogp: zeros(), dentropy: zeros() }
    }

    /// Finishes the sums of the token with state index `at`.
    pub(crate) fn record(&mut self, at: usize, sums: &RowSums, scales: &Scales) {
        let row = sums.finish(scales.logit);
        self.rows[at] = row;
        self.logp[at] = f64::from((scales.logp * row.logp) as f32);
        self.entropy[at] = f64::from(row.entropy as f32);
    }

    /// Writes the values of `range` to the rows `rows` of the results.
    pub(crate) fn publish(&self, range: Range<usize>, rows: &[usize], scores: &mut Scores) {
        for (at, row) in range.zip(rows) {
            scores.logp[*row] = self.logp[at] as f32;
            scores.entropy[*row] = self.entropy[at] as f32;
        }
    }

    /// Evaluates the loss of the active positions `span`, whose state starts at `at`.
    pub(crate) fn evaluate(&mut self, evaluator: &Evaluator<'_>, span: Range<usize>, at: usize, totals: &mut Totals) {
        let r = at..at + span.len();
        let (dlogp, dentropy) = (&mut self.dlogp[r.clone()], &mut self.dentropy[r.clone()]);
        evaluator.evaluate(span, &self.logp[r.clone()], &self.entropy[r], dlogp, dentropy, totals);
    }

    /// Returns `true` if the token has a gradient. NaN counts as a gradient.
    pub(crate) fn is_live(&self, at: usize) -> bool {
        self.dlogp[at] != 0.0 || self.dentropy[at] != 0.0
    }

    /// Returns the gradient's coefficients of a token whose loss has been evaluated.
    pub(crate) fn row_grad(&self, at: usize, scales: &Scales) -> RowGrad {
        self.rows[at].row_grad(scales, self.dlogp[at], self.dentropy[at])
    }
}

/// The division of a batch's active positions into chunks whose gradients depend on one chunk only.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Chunks<'a> {
    /// Anywhere: the loss is per token.
    Anywhere,
    /// At sequences, given their first positions `[B + 1]`; each sequence fits into a chunk.
    Sequences(&'a [usize]),
    /// Not possible, because a sequence is longer than a chunk: all log-probabilities must be computed first.
    ScoreFirst,
}

impl<'a> Chunks<'a> {
    pub(crate) fn new(loss: &LossConfig, starts: &'a [usize], chunk: usize) -> Self {
        if loss.is_token_level() {
            Self::Anywhere
        } else if starts.windows(2).all(|s| s[1] - s[0] <= chunk) {
            Self::Sequences(starts)
        } else {
            Self::ScoreFirst
        }
    }

    /// Returns the chunk of at most `chunk` positions that starts at `start < total`.
    pub(crate) fn next(&self, start: usize, total: usize, chunk: usize) -> Range<usize> {
        let end = total.min(start + chunk);
        match self {
            Self::Anywhere | Self::ScoreFirst => start..end,
            Self::Sequences(starts) => start..starts[starts.partition_point(|s| *s <= end) - 1],
        }
    }
}

/// Returns zeros for every token of the batch.
pub(crate) fn empty_scores(batch: &TokenBatch) -> Scores {
    Scores { logp: vec![0.0; batch.tokens()], entropy: vec![0.0; batch.tokens()] }
}
