//! Matrices over slices, with the bounds checked once.

use std::ops::Range;

/// A matrix to read: element (i, j) lies at `i * row_stride + j * column_stride`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> View<'a> {
    /// Row-major: rows of `cols` elements, `row_stride` apart.
    ///
    /// # Panics
    /// When the slice is too short.
    pub(crate) fn new(data: &'a [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        check(data.len(), rows, cols, row_stride, 1);
        Self { data, rows, cols, row_stride, column_stride: 1 }
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    pub(crate) fn transposed(self) -> Self {
        Self {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
        }
    }

    /// The columns `range`.
    pub(crate) fn columns(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.cols, "columns {range:?} of {}", self.cols);
        let start = if self.rows == 0 || range.is_empty() { 0 } else { range.start * self.column_stride };
        Self { data: &self.data[start..], cols: range.len(), ..self }
    }

    /// The first column, `times` times.
    pub(crate) fn repeated_column(self, times: usize) -> Self {
        assert!(self.cols > 0, "a column to repeat");
        Self { cols: times, column_stride: 0, ..self }
    }

    pub(crate) fn get(&self, i: usize, j: usize) -> f32 {
        self.data[i * self.row_stride + j * self.column_stride]
    }

    /// Row stride and column stride; [`check`] has seen that they fit.
    pub(super) fn strides(&self) -> (isize, isize) {
        (self.row_stride as isize, self.column_stride as isize)
    }

    pub(super) fn as_ptr(&self) -> *const f32 {
        self.data.as_ptr()
    }
}

/// A row-major matrix to write.
#[derive(Debug)]
pub(crate) struct ViewMut<'a> {
    data: &'a mut [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
}

impl<'a> ViewMut<'a> {
    /// Rows of `cols` elements, `row_stride` apart.
    ///
    /// # Panics
    /// When the slice is too short or rows overlap.
    pub(crate) fn new(data: &'a mut [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(row_stride >= cols, "rows of {cols} elements, {row_stride} apart, overlap");
        check(data.len(), rows, cols, row_stride, 1);
        Self { data, rows, cols, row_stride }
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    pub(crate) fn fill(&mut self, value: f32) {
        for i in 0..self.rows {
            self.data[i * self.row_stride..][..self.cols].fill(value);
        }
    }

    pub(super) fn get(&self, i: usize, j: usize) -> f32 {
        self.data[i * self.row_stride + j]
    }

    pub(super) fn set(&mut self, i: usize, j: usize, value: f32) {
        self.data[i * self.row_stride + j] = value;
    }

    pub(super) fn strides(&self) -> (isize, isize) {
        (self.row_stride as isize, 1)
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut f32 {
        self.data.as_mut_ptr()
    }
}

/// Whether every element of the shape lies in a slice of `len` elements. Slices hold at most isize::MAX bytes, so
/// offsets that pass fit isize.
fn check(len: usize, rows: usize, cols: usize, row_stride: usize, column_stride: usize) {
    if rows == 0 || cols == 0 {
        return;
    }
    let last = (rows - 1)
        .checked_mul(row_stride)
        .and_then(|r| (cols - 1).checked_mul(column_stride).and_then(|c| r.checked_add(c)));
    assert!(
        last.is_some_and(|last| last < len),
        "a [{rows}, {cols}] matrix with strides [{row_stride}, {column_stride}] in {len} elements"
    );
    // With a single row or column the stride is never multiplied by more than 0 above, but it is handed on.
    assert!(row_stride <= isize::MAX as usize && column_stride <= isize::MAX as usize, "strides fit isize");
}
