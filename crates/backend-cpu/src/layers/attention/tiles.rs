//! Tiles of queries, and groups of spans that run in parallel.

use super::{Scores, Span};
use crate::gemm::KAxis;
use crate::layers::product::Operand;
use std::ops::Range;

/// The maximum of queries in a tile.
const TILE: usize = 60;

/// Queries of a span and the keys that at least one of them attends to, in order; query i of t does not attend to the
/// last t - 1 - i keys, nor to keys before its window.
pub(super) struct Tile {
    pub(super) rows: Range<usize>,
    pub(super) keys: Vec<usize>,
    pub(super) scores: Scores,
}

impl Tile {
    /// Makes a tile of these rows of a span. It lists all of its keys, so tiles live only while they are computed.
    pub(super) fn new(span: &Span, rows: Range<usize>, scores: Scores) -> Self {
        let start = rows.start;
        let skipped = scores.first(span.prefix.len() + start - span.rows.start + 1);
        let keys = span.prefix.clone().chain(span.rows.start..rows.end).skip(skipped).collect();
        Self { keys, rows, scores }
    }

    /// Returns the number of keys up to the first query's own.
    pub(super) fn first(&self) -> usize {
        self.keys.len() + 1 - self.rows.len()
    }

    /// Returns the keys that query i attends to.
    pub(super) fn visible(&self, i: usize) -> Range<usize> {
        let end = self.first() + i;
        self.scores.first(end)..end
    }

    /// Selects `columns` of the rows of the keys.
    pub(super) fn of_keys<'a>(
        &'a self,
        data: &'a [f32],
        stride: usize,
        columns: Range<usize>,
        along: KAxis,
    ) -> Operand<'a> {
        Operand::list(data, stride, &self.keys, columns, along)
    }

    /// Selects `columns` of the rows of the queries.
    pub(super) fn of_rows<'a>(
        &self,
        data: &'a [f32],
        stride: usize,
        columns: Range<usize>,
        along: KAxis,
    ) -> Operand<'a> {
        Operand::part(data, stride, self.rows.clone(), columns, along)
    }
}

/// Iterates over the rows of all tiles, in order, with their spans.
pub(super) fn tiles(spans: &[Span]) -> impl Iterator<Item = (&Span, Range<usize>)> {
    spans.iter().flat_map(|span| {
        let starts = span.rows.clone().step_by(TILE);
        starts.map(move |start| (span, start..span.rows.end.min(start + TILE)))
    })
}

/// Consecutive spans that attend to no rows of other spans, such as a prompt and its completions.
pub(super) struct Group<'a> {
    pub(super) spans: &'a [Span],
    pub(super) rows: Range<usize>,
}

/// Divides spans into the smallest groups, in order.
pub(super) fn groups(spans: &[Span]) -> Vec<Group<'_>> {
    let (mut groups, mut end) = (Vec::new(), spans.len());
    // The first row that the spans from here to `end` attend to.
    let mut first = usize::MAX;
    for (i, span) in spans.iter().enumerate().rev() {
        first = first.min(if span.prefix.is_empty() { span.rows.start } else { span.prefix.start });
        if first >= span.rows.start {
            groups.push(Group { spans: &spans[i..end], rows: span.rows.start..spans[end - 1].rows.end });
            (end, first) = (i, usize::MAX);
        }
    }
    groups.reverse();
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_that_attend_to_each_other_are_one_group() {
        let rows = |ranges: &[(Range<usize>, Range<usize>)]| {
            let span =
                |(rows, prefix): &(Range<usize>, Range<usize>)| Span { rows: rows.clone(), prefix: prefix.clone() };
            let spans: Vec<Span> = ranges.iter().map(span).collect();
            groups(&spans).into_iter().map(|group| (group.rows, group.spans.len())).collect::<Vec<_>>()
        };
        // Two prompts with completions, one of them empty, and a sequence alone.
        let prompts = [(0..5, 0..0), (5..8, 0..5), (8..8, 0..5), (8..10, 0..0), (10..13, 8..10), (13..20, 0..0)];
        assert_eq!(rows(&prompts), [(0..8, 3), (8..13, 2), (13..20, 1)]);
        // The last span attends to a row of the first one.
        assert_eq!(rows(&[(0..3, 0..0), (3..6, 0..0), (6..9, 2..4)]), [(0..9, 3)]);
        assert_eq!(rows(&[(0..3, 0..0), (3..6, 0..0), (6..9, 3..4)]), [(0..3, 1), (3..9, 2)]);
        assert_eq!(rows(&[]), []);
    }
}
