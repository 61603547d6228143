//! Splits the sequences of an optimizer step into micro-batches.

use crate::error::Result;
use grpo_core::TokenBatch;
use grpo_policy::{RoutedExperts, Sequence, SequenceBatch};
use std::ops::Range;

/// Returns a micro-batch of `sequences` for each range of `parts`; `tokens` has their completion tokens, `routed_experts` the experts that are
/// replayed, or nothing. Tokens without weights are for scores, or for a loss without an average.
pub(crate) fn sequence_batches<'a>(
    sequences: &'a [Sequence],
    routed_experts: &'a [RoutedExperts],
    tokens: &TokenBatch,
    parts: impl Iterator<Item = Range<usize>>,
) -> Result<Vec<SequenceBatch<'a>>> {
    let batch = |rows: Range<usize>| {
        let routed_experts = if routed_experts.is_empty() { routed_experts } else { &routed_experts[rows.clone()] };
        let (sequences, tokens) = match tokens.weights() {
            Some(_) => (&sequences[rows.clone()], tokens.select_sequences(rows)?),
            None => (&sequences[rows.clone()], tokens.select_independent(rows)?),
        };
        Ok(SequenceBatch { sequences, tokens, routed_experts })
    };
    parts.map(batch).collect()
}

/// Splits `count` items into at most `parts` ranges whose lengths differ by at most one.
pub(crate) fn split_evenly(count: usize, parts: usize) -> impl Iterator<Item = Range<usize>> {
    let parts = parts.clamp(1, count.max(1));
    (0..parts).map(move |i| count * i / parts..count * (i + 1) / parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_splits_cover_everything_once() {
        let ranges: Vec<_> = split_evenly(10, 3).collect();
        assert_eq!(ranges, [0..3, 3..6, 6..10]);
        assert_eq!(split_evenly(2, 5).collect::<Vec<_>>(), [0..1, 1..2]);
    }
}
