//! The output of a product.
#![allow(unsafe_code)]

use crate::arch::panel::RHS_PANEL;
use crate::arch::{IsaToken, MulAdd, simd_dispatch};
use crate::profile::{Clock, Work};
use std::marker::PhantomData;
use std::ops::Range;

/// A writable row-major matrix: rows of `cols` elements, `stride` apart.
#[derive(Debug)]
pub(crate) struct MatMut<'a> {
    data: *mut f32,
    rows: usize,
    cols: usize,
    stride: usize,
    owner: PhantomData<&'a mut [f32]>,
}

// SAFETY: a `MatMut` has exclusive access to its elements, like the mutable slice that it was made from.
unsafe impl Send for MatMut<'_> {}

/// The direction in which a matrix is divided into blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Cut {
    Rows,
    Columns,
}

impl<'a> MatMut<'a> {
    /// Makes a matrix of `rows` rows of `cols` elements in `data`; rows start `stride` elements apart.
    ///
    /// # Panics
    /// If the slice is too short or rows overlap.
    pub(crate) fn new(data: &'a mut [f32], rows: usize, cols: usize, stride: usize) -> Self {
        check(data.len(), rows, cols, stride);
        Self { data: data.as_mut_ptr(), rows, cols, stride, owner: PhantomData }
    }

    /// Returns the blocks `blocks` of a `[rows, cols]` matrix that is divided into blocks of `size` rows, or columns.
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
            // `whole` gives the addresses of blocks, which share no elements.
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

    /// Returns the number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of elements of a row.
    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// Returns row `i`.
    pub(crate) fn row(&mut self, i: usize) -> &mut [f32] {
        let (row, _) = self.piece(i, 0, 1, self.cols);
        // SAFETY: `piece` has checked the row, and `self` has exclusive access to it.
        unsafe { std::slice::from_raw_parts_mut(row, self.cols) }
    }

    /// Returns some of the rows.
    pub(crate) fn some_rows(&mut self, rows: Range<usize>) -> MatMut<'_> {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows of the output");
        let data = self.data.wrapping_add(rows.start * self.stride);
        MatMut { data, rows: rows.len(), cols: self.cols, stride: self.stride, owner: PhantomData }
    }

    /// Returns some of the columns.
    pub(crate) fn columns(&mut self, columns: Range<usize>) -> MatMut<'_> {
        assert!(columns.start <= columns.end && columns.end <= self.cols, "columns of the output");
        let data = self.data.wrapping_add(columns.start);
        MatMut { data, rows: self.rows, cols: columns.len(), stride: self.stride, owner: PhantomData }
    }

    /// Returns the address of the element (i, j), also outside of the matrix.
    pub(super) fn address(&self, i: usize, j: usize) -> *const f32 {
        self.data.wrapping_add(i * self.stride + j)
    }

    /// Returns the first element and the stride of the block `[rows, cols]` at (i, j).
    pub(super) fn piece(&mut self, i: usize, j: usize, rows: usize, cols: usize) -> (*mut f32, usize) {
        assert!(i + rows <= self.rows && j + cols <= self.cols, "a piece of the output");
        (self.data.wrapping_add(i * self.stride + j), self.stride)
    }

    /// Adds a matrix of this shape, whose rows start `stride` elements apart in `from`.
    pub(crate) fn add(&mut self, isa: IsaToken, from: &[f32], stride: usize) {
        let _clock = Clock::start(Work::Products);
        for (i, from) in (0..self.rows).zip(from.chunks(stride)) {
            add_row(isa, self.row(i), from);
        }
    }

    /// Copies `rows`, `cols` to the upper left part of `to: [_, 32]`.
    pub(super) fn load(&mut self, rows: Range<usize>, cols: Range<usize>, to: &mut [f32]) {
        for (row, to) in rows.zip(to.chunks_exact_mut(RHS_PANEL)) {
            to[..cols.len()].copy_from_slice(&self.row(row)[cols.clone()]);
        }
    }

    /// Stores, or adds, the upper left part of `from: [_, 32]` to `rows`, `cols`.
    pub(super) fn store(&mut self, isa: IsaToken, rows: Range<usize>, cols: Range<usize>, from: &[f32], add: bool) {
        let (to, stride) = self.piece(rows.start, cols.start, rows.len(), cols.len());
        let from = from.as_chunks::<RHS_PANEL>().0;
        store(isa, Piece { to, stride, cols: cols.len() }, &from[..rows.len()], add);
    }
}

/// Rows of `cols` elements from `to`, `stride` apart, checked by [`MatMut::piece`].
#[derive(Clone, Copy)]
struct Piece {
    to: *mut f32,
    stride: usize,
    cols: usize,
}

simd_dispatch! { fn add_row(to: &mut [f32], from: &[f32]) = add_row_body }

#[inline(always)]
fn add_row_body<M: MulAdd>(to: &mut [f32], from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}

simd_dispatch! { fn store(piece: Piece, from: &[[f32; RHS_PANEL]], add: bool) = store_body }

#[inline(always)]
fn store_body<M: MulAdd>(piece: Piece, from: &[[f32; RHS_PANEL]], add: bool) {
    for (i, from) in from.iter().enumerate() {
        // SAFETY: a piece consists of elements of a `MatMut`, which has exclusive access, and has at least as many rows as `from`.
        let to = unsafe { std::slice::from_raw_parts_mut(piece.to.add(i * piece.stride), piece.cols) };
        match (<&mut [f32; RHS_PANEL]>::try_from(&mut *to), add) {
            // A constant length needs no loop.
            (Ok(to), true) => to.iter_mut().zip(from).for_each(|(to, from)| *to += from),
            (Ok(to), false) => *to = *from,
            (Err(_), true) => to.iter_mut().zip(from).for_each(|(to, from)| *to += from),
            (Err(_), false) => to.copy_from_slice(&from[..to.len()]),
        }
    }
}

/// Checks that every element of the shape is in a slice of `len` elements.
fn check(len: usize, rows: usize, cols: usize, stride: usize) {
    let end = (rows.max(1) - 1).checked_mul(stride).and_then(|start| start.checked_add(cols));
    assert!(
        stride >= cols && (rows == 0 || cols == 0 || end.is_some_and(|end| end <= len)),
        "a [{rows}, {cols}] matrix with rows {stride} apart in {len} elements"
    );
}
