//! Where the result of a product goes.

use crate::isa::{Level, MulAdd, instantiate};
use std::marker::PhantomData;
use std::ops::Range;

/// A row-major matrix to write: rows of `cols` elements, `stride` apart.
#[derive(Debug)]
pub(crate) struct Target<'a> {
    data: *mut f32,
    rows: usize,
    cols: usize,
    stride: usize,
    owner: PhantomData<&'a mut [f32]>,
}

// SAFETY: a target is the only way to its elements for as long as it lives, like the slice it was made of.
unsafe impl Send for Target<'_> {}

/// How a matrix is cut into blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Cut {
    Rows,
    Columns,
}

impl<'a> Target<'a> {
    /// # Panics
    /// When the slice is too short or rows overlap.
    pub(crate) fn new(data: &'a mut [f32], rows: usize, cols: usize, stride: usize) -> Self {
        check(data.len(), rows, cols, stride);
        Self { data: data.as_mut_ptr(), rows, cols, stride, owner: PhantomData }
    }

    /// The blocks `blocks` of a `[rows, cols]` matrix, cut into `size` rows, or columns, each but the last.
    pub(crate) fn split(
        data: &'a mut [f32],
        [rows, cols]: [usize; 2],
        cut: Cut,
        size: usize,
        blocks: Range<usize>,
    ) -> impl Iterator<Item = Self> + Send + 'a {
        check(data.len(), rows, cols, cols);
        let whole = Self { data: data.as_mut_ptr(), rows, cols, stride: cols, owner: PhantomData };
        blocks.map(move |block| {
            // `whole` only tells where blocks are, which share no element.
            let (whole, start) = (&whole, block * size);
            match cut {
                Cut::Rows => {
                    assert!(start < rows, "block {block} of {rows} rows");
                    let data = whole.data.wrapping_add(start * cols);
                    Self { data, rows: size.min(rows - start), cols, stride: cols, owner: PhantomData }
                }
                Cut::Columns => {
                    assert!(start < cols, "block {block} of {cols} columns");
                    let data = whole.data.wrapping_add(start);
                    Self { data, rows, cols: size.min(cols - start), stride: cols, owner: PhantomData }
                }
            }
        })
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// First element and stride of the piece `[rows, cols]` at (i, j).
    pub(super) fn piece(&mut self, i: usize, j: usize, rows: usize, cols: usize) -> (*mut f32, usize) {
        assert!(i + rows <= self.rows && j + cols <= self.cols, "a piece of the output");
        (self.data.wrapping_add(i * self.stride + j), self.stride)
    }

    /// Writes, or adds, the upper left part of `from: [_, 32]` to `rows`, `cols`.
    pub(super) fn store(&mut self, level: Level, rows: Range<usize>, cols: Range<usize>, from: &[f32], add: bool) {
        for (i, from) in rows.zip(from.chunks(super::RHS_PANEL)) {
            let (to, _) = self.piece(i, cols.start, 1, cols.len());
            // SAFETY: `piece` has seen that these elements are there; they are only reached through `self`.
            let to = unsafe { std::slice::from_raw_parts_mut(to, cols.len()) };
            store_row(level, to, &from[..cols.len()], add);
        }
    }
}

instantiate! { fn store_row(to: &mut [f32], from: &[f32], add: bool) = store_row_body }

#[inline(always)]
fn store_row_body<M: MulAdd>(to: &mut [f32], from: &[f32], add: bool) {
    if add {
        to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
    } else {
        to.copy_from_slice(from);
    }
}

/// Whether every element of the shape lies in a slice of `len` elements.
fn check(len: usize, rows: usize, cols: usize, stride: usize) {
    let end = (rows.max(1) - 1).checked_mul(stride).and_then(|start| start.checked_add(cols));
    assert!(
        stride >= cols && (rows == 0 || cols == 0 || end.is_some_and(|end| end <= len)),
        "a [{rows}, {cols}] matrix with rows {stride} apart in {len} elements"
    );
}
