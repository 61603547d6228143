//! The tensors that operands are packed from.

use crate::host::Slice;
use std::ops::Range;

/// Some rows and columns of a row-major tensor.
#[derive(Clone, Debug)]
pub(crate) struct Rows<'a> {
    pub(super) data: Slice<'a>,
    stride: usize,
    pick: Pick<'a>,
    pub(crate) columns: Range<usize>,
}

#[derive(Clone, Debug)]
enum Pick<'a> {
    Range(Range<usize>),
    List(&'a [usize]),
}

impl<'a> Rows<'a> {
    /// Selects `columns` of the rows `rows`, which are `stride` elements apart.
    pub(crate) fn new(data: Slice<'a>, stride: usize, rows: Range<usize>, columns: Range<usize>) -> Self {
        Self { data, stride, pick: Pick::Range(rows), columns }
    }

    /// Selects `columns` of the rows listed in `rows`.
    pub(crate) fn list(data: Slice<'a>, stride: usize, rows: &'a [usize], columns: Range<usize>) -> Self {
        Self { data, stride, pick: Pick::List(rows), columns }
    }

    /// Selects some of these rows and columns.
    pub(crate) fn part(&self, rows: Range<usize>, columns: Range<usize>) -> Self {
        let pick = match &self.pick {
            Pick::Range(range) => Pick::Range(range.start + rows.start..range.start + rows.end),
            Pick::List(list) => Pick::List(&list[rows]),
        };
        let first = self.columns.start;
        Self { pick, columns: first + columns.start..first + columns.end, ..*self }
    }

    /// Returns the number of rows.
    pub(crate) fn rows(&self) -> usize {
        match &self.pick {
            Pick::Range(range) => range.len(),
            Pick::List(list) => list.len(),
        }
    }

    /// Returns the range of row `i` in the data.
    #[inline(always)]
    pub(super) fn place(&self, i: usize) -> Range<usize> {
        let row = match &self.pick {
            Pick::Range(range) => range.start + i,
            Pick::List(list) => list[i],
        };
        row * self.stride + self.columns.start..row * self.stride + self.columns.end
    }
}

/// The axis of a source that is K.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KAxis {
    /// The rows are K: `source: [k, outer]`.
    Rows,
    /// The columns are K: `source: [outer, k]`.
    Columns,
}
