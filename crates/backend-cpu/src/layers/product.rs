//! A product of two matrices in memory, including the packing of operands.

use super::scratch::Scratch;
use crate::arch::panel::{GROUP_U16, RHS_PANEL};
use crate::arch::{MulAdd, simd_dispatch};
use crate::gemm::{CodedPanels, Cut, Exponents, Gemm, KAxis, MatMut, Order, Packed, PanelPiece, Panels, Rows};
use crate::host::Slice;
use crate::pages::zeros;
use crate::threads::{count, slices::*};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// The maximum output rows of a task: the lhs of a piece of K stays in the L2 cache.
const BLOCK: usize = 240;
/// The panels of either operand that one task packs.
const PANELS: usize = 8;
/// The most panels of a packed rhs in a task that multiplies them with many rows. With 8, narrow weights were slower; with 32 and more, wide ones.
const RUN: usize = 24;
/// The most entries of a lhs that are packed on the caller's thread, a few microseconds.
const FEW_ENTRIES: usize = 1 << 15;
/// The minimum columns per thread for a division by columns: two panels. Not tuned.
const NARROW: usize = 64;
/// The most tasks per thread of a product with few rows: a thread that starts late gets fewer of them.
const TASKS: usize = 16;
/// The least bytes of a weight for a task of a product with few rows; a smaller weight is multiplied on the caller's thread.
const TASK_BYTES: usize = 128 << 10;
/// The rhs panels that are widened before they are multiplied: 80 KiB of words.
const NEAR: usize = 4;

/// A matrix, or some rows and columns of one; one of its axes is K.
#[derive(Clone, Debug)]
pub(super) struct Operand<'a> {
    all: Rows<'a>,
    along: KAxis,
}

impl<'a> Operand<'a> {
    /// Selects all of `data`, with rows of `columns` elements.
    pub(super) fn new(data: &'a [f32], columns: usize, along: KAxis) -> Self {
        Self::part(data, columns, 0..data.len() / columns.max(1), 0..columns, along)
    }

    /// Selects `columns` of `rows`, which are `stride` elements apart.
    pub(super) fn part(
        data: &'a [f32],
        stride: usize,
        rows: Range<usize>,
        columns: Range<usize>,
        along: KAxis,
    ) -> Self {
        Self { all: Rows::new(Slice::F32(data), stride, rows, columns), along }
    }

    /// Selects `columns` of the rows listed in `rows`.
    pub(super) fn list(data: &'a [f32], stride: usize, rows: &'a [usize], columns: Range<usize>, along: KAxis) -> Self {
        Self { all: Rows::list(Slice::F32(data), stride, rows, columns), along }
    }

    /// Selects the range `outer` of the axis that is not K, and the range `k` of K.
    fn cut(&self, outer: Range<usize>, k: Range<usize>) -> Rows<'a> {
        match self.along {
            KAxis::Rows => self.all.part(k, outer),
            KAxis::Columns => self.all.part(outer, k),
        }
    }

    /// Returns (length of the axis that is not K, length of K).
    fn dims(&self) -> (usize, usize) {
        let (rows, columns) = (self.all.rows(), self.all.columns.len());
        match self.along {
            KAxis::Rows => (columns, rows),
            KAxis::Columns => (rows, columns),
        }
    }
}

/// The rhs of a product, before packing.
pub(super) trait Rhs: Sync {
    /// Returns (length of the axis that is not K, length of K).
    fn dims(&self) -> (usize, usize);
    /// Returns the axis that is K in the rows of [`Rhs::with`].
    fn along(&self) -> KAxis;
    /// Calls `f` with the range `outer` of the axis that is not K, and the range `k` of K.
    fn with<T>(&self, outer: Range<usize>, k: Range<usize>, f: impl FnOnce(Rows<'_>) -> T) -> T;
}

impl Rhs for Operand<'_> {
    fn dims(&self) -> (usize, usize) {
        Operand::dims(self)
    }

    fn along(&self) -> KAxis {
        self.along
    }

    fn with<T>(&self, outer: Range<usize>, k: Range<usize>, f: impl FnOnce(Rows<'_>) -> T) -> T {
        f(self.cut(outer, k))
    }
}

/// A packed rhs: panels of [`RHS_PANEL`] columns, one after the other, each with all pieces of K in order. A product with few rows reads the
/// panels of a thread as one stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct PackedRhs<'a> {
    pub(super) panels: Panels<'a>,
    /// The length of the axis that is not K.
    pub(super) columns: usize,
}

/// Packs `rhs`, which must have bf16 values, into `halves`; as many as [`pack`] has words.
pub(super) fn pack_halves(gemm: Gemm, rhs: &impl Rhs, halves: &mut [u16]) {
    let panel_len = gemm.rhs_stride(rhs.dims().1);
    pack_panels(gemm, rhs, halves, panel_len, |_, rows, piece, halves| {
        let (start, stride) = (gemm.rhs_stride(piece.start), gemm.rhs_stride(piece.len()));
        let mut words = Scratch::words(halves.len().div_ceil(panel_len.max(1)) * stride);
        gemm.pack_rhs(rows, rhs.along(), 0, &mut words, stride);
        for (halves, words) in halves.chunks_exact_mut(panel_len).zip(words.chunks_exact(stride)) {
            narrow(gemm.isa(), words, &mut halves[start..start + stride]);
        }
    });
}

/// Packs `rhs` as coded groups; its values must be bf16 values, after the rounding of the pack. Returns `None` if more than one group in 16 is
/// escaped; the rest of the weight is then not packed.
///
/// # Panics
/// If [`Gemm::codes`] returns `false` for K.
pub(super) fn pack_coded(gemm: Gemm, rhs: &impl Rhs) -> Option<CodedPanels> {
    /// The panels that the exponents are chosen from.
    const SAMPLES: usize = 8;
    let (n, k) = rhs.dims();
    let (panels, panel_len) = (n.div_ceil(RHS_PANEL), gemm.rhs_stride(k));
    assert!(gemm.codes(k));
    let first = gemm.pieces(k).next()?;
    let stride = gemm.rhs_stride(first.len());
    let mut words = Scratch::words(SAMPLES * stride);
    let samples = panels.min(SAMPLES);
    for (i, words) in words.chunks_exact_mut(stride).enumerate().take(samples) {
        let column = i * panels / samples * RHS_PANEL;
        let columns = column..n.min(column + RHS_PANEL);
        rhs.with(columns, first.clone(), |rows| gemm.pack_rhs(rows, rhs.along(), 0, words, stride));
    }
    let exponents = Exponents::of(gemm, &words[..samples * stride]);
    let mut groups = zeros(gemm.coded(panels * panel_len));
    let (escapes, most) = (Mutex::new(Vec::new()), CodedPanels::most_escapes(groups.len() / GROUP_U16));
    let all = || escapes.lock().unwrap_or_else(PoisonError::into_inner);
    let coded_panel = gemm.coded(panel_len);
    pack_panels(gemm, rhs, &mut groups, coded_panel, |first, rows, piece, groups| {
        if all().len() > most {
            return;
        }
        let (start, stride) = (gemm.coded(gemm.rhs_stride(piece.start)), gemm.rhs_stride(piece.len()));
        let mut words = Scratch::words(groups.len() / coded_panel * stride);
        gemm.pack_rhs(rows, rhs.along(), 0, &mut words, stride);
        let mut task_escapes = Vec::new();
        for (i, (groups, words)) in groups.chunks_exact_mut(coded_panel).zip(words.chunks_exact(stride)).enumerate() {
            let number = ((first + i) * coded_panel + start) / GROUP_U16;
            gemm.code(words, exponents, number, &mut groups[start..][..gemm.coded(stride)], &mut task_escapes);
        }
        all().append(&mut task_escapes);
    });
    let mut escapes = escapes.into_inner().unwrap_or_else(PoisonError::into_inner);
    escapes.sort_unstable_by_key(|(number, _)| *number);
    CodedPanels::new(gemm, groups, exponents, &escapes)
}

simd_dispatch! {
    /// Keeps the upper halves of words.
    fn narrow(words: &[u32], halves: &mut [u16]) = narrow_body
}

#[inline(always)]
fn narrow_body<M: MulAdd>(words: &[u32], halves: &mut [u16]) {
    halves.iter_mut().zip(words).for_each(|(half, word)| *half = (word >> 16) as u16);
}

simd_dispatch! {
    /// Makes words with these upper halves and zero lower halves.
    fn widen(halves: &[u16], words: &mut [u32]) = widen_body
}

#[inline(always)]
fn widen_body<M: MulAdd>(halves: &[u16], words: &mut [u32]) {
    words.iter_mut().zip(halves).for_each(|(word, half)| *word = u32::from(*half) << 16);
}

/// Packs `rhs` into `words`, of length `gemm.rhs_words(n, k)`.
pub(super) fn pack(gemm: Gemm, rhs: &impl Rhs, words: &mut [u32]) {
    let stride = gemm.rhs_stride(rhs.dims().1);
    pack_panels(gemm, rhs, words, stride, |_, rows, piece, words| {
        gemm.pack_rhs(rows, rhs.along(), 0, &mut words[gemm.rhs_stride(piece.start)..], stride);
    });
}

/// Calls `f` with the index of a panel, rows of `rhs` from it on, their piece of K, and the place of their panels in `out`, for every few panels.
/// Panels are `panel_len` elements apart.
fn pack_panels<T: Send>(
    gemm: Gemm,
    rhs: &impl Rhs,
    out: &mut [T],
    panel_len: usize,
    f: impl Fn(usize, Rows<'_>, Range<usize>, &mut [T]) + Sync,
) {
    let (n, k) = rhs.dims();
    out.par_chunks_mut((PANELS * panel_len).max(1)).enumerate().for_each(|(i, out)| {
        let first = i * PANELS * RHS_PANEL;
        for piece in gemm.pieces(k) {
            let columns = first..n.min(first + PANELS * RHS_PANEL);
            rhs.with(columns, piece.clone(), |rows| f(i * PANELS, rows, piece, out));
        }
    });
}

/// Computes `out[m, n] (+)= lhs rhs` with a packed rhs, on the threads of the pool.
pub(super) fn multiply_packed(gemm: Gemm, lhs: &Operand<'_>, rhs: PackedRhs<'_>, out: &mut [f32], add: bool) {
    let ((m, k), n) = (lhs.dims(), rhs.columns);
    if m == 0 || n == 0 {
        return;
    }
    if m <= gemm.few_rows() && lhs.along == KAxis::Columns {
        return multiply_few(gemm, lhs, rhs, out, add);
    }
    if n < NARROW * count() {
        // Each thread packs the rows that it multiplies.
        let size = share(m, BLOCK).next_multiple_of(gemm.lhs_panel());
        return for_blocks(out, [m, n], Cut::Rows, size, |first, out| {
            multiply_block(gemm, lhs, first..first + out.rows(), rhs, out, add);
        });
    }
    // Each thread reads a part of the weight only.
    let mut left = Scratch::words(gemm.lhs_words(m, k));
    pack_left(gemm, lhs, &mut left);
    let left = &left[..];
    let run = if m > BLOCK { RUN } else { PANELS };
    let size = share(n, run * RHS_PANEL).next_multiple_of(RHS_PANEL);
    let height = BLOCK.next_multiple_of(gemm.lhs_panel());
    // With one lhs panel, reading the weight should bound the time. Panel by panel, it is read in order (not measured).
    let width = if gemm.multiplies_tiles() && m <= gemm.lhs_panel() { RHS_PANEL } else { size };
    for_blocks(out, [m, n], Cut::Columns, size, |column, out| {
        let columns = out.cols();
        for from in (0..columns).step_by(width) {
            let mut out = out.columns(from..columns.min(from + width));
            for first in (0..m).step_by(height) {
                let mut out = out.some_rows(first..m.min(first + height));
                for piece in gemm.pieces(k) {
                    let stride = gemm.lhs_stride(piece.len());
                    let start = gemm.lhs_words(m, piece.start) + first / gemm.lhs_panel() * stride;
                    let lhs = Packed { words: &left[start..], stride };
                    multiply_piece(gemm, lhs, rhs, k, piece, column + from, &mut out, add);
                }
            }
        }
    });
}

/// Divides the matrix `out: [m, n]` into blocks of `size` rows or columns, and calls `f` with the first row or column of each block and the
/// block, on the threads of the pool. One block is computed on the caller's thread.
fn for_blocks(out: &mut [f32], dims: [usize; 2], cut: Cut, size: usize, f: impl Fn(usize, &mut MatMut<'_>) + Sync) {
    let length = match cut {
        Cut::Rows => dims[0],
        Cut::Columns => dims[1],
    };
    let mut blocks: Vec<_> = MatMut::split(out, dims, cut, size, 0..length.div_ceil(size)).enumerate().collect();
    match &mut blocks[..] {
        [(_, out)] => f(0, out),
        blocks => blocks.par_chunks_mut(1).for_each(|blocks| blocks.iter_mut().for_each(|(i, out)| f(*i * size, out))),
    }
}

/// Computes [`multiply_packed`] for few rows.
fn multiply_few(gemm: Gemm, lhs: &Operand<'_>, rhs: PackedRhs<'_>, out: &mut [f32], add: bool) {
    let ((m, k), n) = (lhs.dims(), rhs.columns);
    let mut left = Scratch::words(m * gemm.words(k));
    gemm.pack_few(&lhs.cut(0..m, 0..k), &mut left);
    let (left, stride) = (&left[..], gemm.rhs_stride(k));
    let tasks = (rhs.panels.bytes() / TASK_BYTES).clamp(1, TASKS * count());
    let size = n.div_ceil(RHS_PANEL).div_ceil(tasks) * RHS_PANEL;
    for_blocks(out, [m, n], Cut::Columns, size, |first, out| {
        gemm.multiply_few(k, left, rhs.panels, first / RHS_PANEL * stride, out, add);
    });
}

/// Returns the largest block of at most `most` that divides `all` into about equally many blocks per thread.
fn share(all: usize, most: usize) -> usize {
    let turns = all.div_ceil(count() * most);
    all.div_ceil(count() * turns.max(1))
}

/// Computes the rows `rows` of the product on this thread.
fn multiply_block(
    gemm: Gemm,
    lhs: &Operand<'_>,
    rows: Range<usize>,
    rhs: PackedRhs<'_>,
    out: &mut MatMut<'_>,
    add: bool,
) {
    let k = lhs.dims().1;
    let mut words = Scratch::words(gemm.lhs_words(rows.len(), k.min(gemm.depth())));
    for piece in gemm.pieces(k) {
        let stride = gemm.lhs_stride(piece.len());
        gemm.pack_lhs(lhs.cut(rows.clone(), piece.clone()), lhs.along, 0, &mut words, stride);
        multiply_piece(gemm, Packed { words: &words, stride }, rhs, k, piece, 0, out, add);
    }
}

/// Computes the product over `piece`, a range of the `k` entries of K, with the columns of the rhs from `column` on, the first of a panel. Adds
/// the product to `out` if `add`, or if `piece` is not the first one.
#[allow(clippy::too_many_arguments)]
fn multiply_piece(
    gemm: Gemm,
    lhs: Packed<'_>,
    rhs: PackedRhs<'_>,
    k: usize,
    piece: Range<usize>,
    column: usize,
    out: &mut MatMut<'_>,
    add: bool,
) {
    let panel_len = gemm.rhs_stride(k);
    let first = column / RHS_PANEL * panel_len + gemm.rhs_stride(piece.start);
    let (k, add) = (piece.len(), add || piece.start > 0);
    match rhs.panels {
        Panels::Words(rhs) => {
            let rhs = Packed { words: &rhs[first..], stride: panel_len };
            gemm.multiply(k, lhs, rhs, out, add, Order::ByColumns);
        }
        panels @ (Panels::Coded(_) | Panels::Halves(_)) if gemm.multiplies_narrow() => {
            let mut near = Scratch::words(gemm.rhs_stride(k));
            let rhs = PanelPiece { panels, first, stride: panel_len };
            gemm.multiply_narrow(k, lhs, rhs, &mut near, out, add);
        }
        Panels::Coded(_) => unreachable!("coded without kernels"),
        Panels::Halves(rhs) => {
            // Widen a few panels at a time, which then are in the L2 cache.
            let (stride, columns) = (gemm.rhs_stride(k), out.cols());
            let mut wide = Scratch::words(NEAR * stride);
            for run in (0..columns).step_by(NEAR * RHS_PANEL) {
                let run = run..columns.min(run + NEAR * RHS_PANEL);
                let panels = rhs[first + run.start / RHS_PANEL * panel_len..].chunks(panel_len);
                for (halves, wide) in panels.zip(wide.chunks_exact_mut(stride)).take(run.len().div_ceil(RHS_PANEL)) {
                    widen(gemm.isa(), &halves[..stride], wide);
                }
                let mut out = out.columns(run);
                gemm.multiply(k, lhs, Packed { words: &wide, stride }, &mut out, add, Order::ByColumns);
            }
        }
    }
}

/// Computes `out[m, n] (+)= lhs rhs`, on the threads of the pool.
pub(super) fn multiply(gemm: Gemm, lhs: &Operand<'_>, rhs: &impl Rhs, out: &mut [f32], add: bool) {
    let (m, (n, k)) = (lhs.dims().0, rhs.dims());
    if n < NARROW * count() {
        let mut words = Scratch::words(gemm.rhs_words(n, k));
        pack(gemm, rhs, &mut words);
        return multiply_packed(gemm, lhs, PackedRhs { panels: Panels::Words(&words), columns: n }, out, add);
    }
    // Each thread packs the rhs columns that it multiplies, a piece of K at a time, so that they stay in its L2 cache.
    let mut left = Scratch::words(gemm.lhs_words(m, k));
    pack_left(gemm, lhs, &mut left);
    let size = share(n, PANELS * RHS_PANEL).next_multiple_of(RHS_PANEL);
    for_blocks(out, [m, n], Cut::Columns, size, |first, out| {
        let columns = first..first + out.cols();
        let mut words = Scratch::words(gemm.rhs_words(columns.len(), k.min(gemm.depth())));
        for piece in gemm.pieces(k) {
            let stride = gemm.rhs_stride(piece.len());
            rhs.with(columns.clone(), piece.clone(), |rows| {
                gemm.pack_rhs(rows, rhs.along(), 0, &mut words, stride);
            });
            let lhs = Packed { words: &left[gemm.lhs_words(m, piece.start)..], stride: gemm.lhs_stride(piece.len()) };
            gemm.multiply(
                piece.len(),
                lhs,
                Packed { words: &words, stride },
                out,
                add || piece.start > 0,
                Order::ByColumns,
            );
        }
    });
}

/// Packs `lhs` into `words`, of length `gemm.lhs_words(m, k)`, with contiguous pieces of K.
fn pack_left(gemm: Gemm, lhs: &Operand<'_>, words: &mut [u32]) {
    let (m, k) = lhs.dims();
    let block = PANELS * gemm.lhs_panel();
    let (mut tasks, mut rest) = (Vec::new(), words);
    for piece in gemm.pieces(k) {
        let stride = gemm.lhs_stride(piece.len());
        let piece_words;
        (piece_words, rest) = std::mem::take(&mut rest).split_at_mut(gemm.lhs_words(m, piece.len()));
        let blocks = piece_words.chunks_mut(PANELS * stride).enumerate();
        tasks.extend(blocks.map(|(i, words)| (i * block..m.min((i + 1) * block), piece.clone(), words)));
    }
    let pack = |(rows, piece, words): &mut (Range<usize>, Range<usize>, &mut [u32])| {
        gemm.pack_lhs(lhs.cut(rows.clone(), piece.clone()), lhs.along, 0, words, gemm.lhs_stride(piece.len()));
    };
    match m * k <= FEW_ENTRIES {
        true => tasks.iter_mut().for_each(pack),
        false => tasks.par_chunks_mut(1).for_each(|tasks| tasks.iter_mut().for_each(pack)),
    }
}

/// Like [`multiply`], for a small product, on this thread.
pub(super) fn multiply_here(gemm: Gemm, lhs: &Operand<'_>, rhs: &Operand<'_>, out: &mut MatMut<'_>, add: bool) {
    let (n, k) = rhs.dims();
    let mut words = Scratch::words(gemm.rhs_words(n, k));
    for piece in gemm.pieces(k) {
        let to = &mut words[gemm.rhs_stride(piece.start)..];
        gemm.pack_rhs(rhs.cut(0..n, piece.clone()), rhs.along, 0, to, gemm.rhs_stride(k));
    }
    let rhs = PackedRhs { panels: Panels::Words(&words), columns: n };
    multiply_block(gemm, lhs, 0..lhs.dims().0, rhs, out, add);
}
