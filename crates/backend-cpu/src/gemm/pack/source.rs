//! The tensors that operands are packed from.

use crate::host::Slice;
use std::ops::Range;

/// Rows of a row-major tensor, some of its columns.
#[derive(Clone, Debug)]
pub(crate) struct Rows<'a> {
    pub(super) data: Slice<'a>,
    stride: usize,
    pick: Pick<'a>,
    pub(super) columns: Range<usize>,
}

#[derive(Clone, Debug)]
enum Pick<'a> {
    Range(Range<usize>),
    List(&'a [usize]),
}

impl<'a> Rows<'a> {
    /// `columns` of the rows `rows`, which are `stride` elements apart.
    pub(crate) fn new(data: Slice<'a>, stride: usize, rows: Range<usize>, columns: Range<usize>) -> Self {
        Self { data, stride, pick: Pick::Range(rows), columns }
    }

    /// `columns` of the rows that `rows` names.
    pub(crate) fn list(data: Slice<'a>, stride: usize, rows: &'a [usize], columns: Range<usize>) -> Self {
        Self { data, stride, pick: Pick::List(rows), columns }
    }

    /// The number of rows.
    pub(super) fn rows(&self) -> usize {
        match &self.pick {
            Pick::Range(range) => range.len(),
            Pick::List(list) => list.len(),
        }
    }

    /// The range of the data in which row `i` lies.
    #[inline(always)]
    pub(super) fn place(&self, i: usize) -> Range<usize> {
        let row = match &self.pick {
            Pick::Range(range) => range.start + i,
            Pick::List(list) => list[i],
        };
        row * self.stride + self.columns.start..row * self.stride + self.columns.end
    }
}

/// Which axis of a source is K.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KAxis {
    /// K is the rows: `source: [k, outer]`.
    Rows,
    /// K is the columns: `source: [outer, k]`.
    Columns,
}
