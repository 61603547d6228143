//! Products that read a packed weight at the rate of the memory: of few rows, and of weights in less memory.

use super::coded::CodedPanels;
use super::pack::{self, Bf16Pair, F32Word, KAxis, RoundedF32, RoundedPair, Rows};
use super::{Gemm, GemmKernel, MatMut, Order, Packed, Product, Tiles};
use crate::arch::microkernel::{self, Ahead, RhsPanel};
use crate::arch::panel::RHS_PANEL;
use crate::profile::{Clock, Work, timed};

/// The panels of a packed rhs, one after the other, each with all of K.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Panels<'a> {
    Words(&'a [u32]),
    /// The upper halves of f32 words, whose lower halves are zero.
    Halves(&'a [u16]),
    Coded(&'a CodedPanels),
}

impl Panels<'_> {
    /// Returns the number of words.
    fn len(self) -> usize {
        match self {
            Self::Words(words) => words.len(),
            Self::Halves(halves) => halves.len(),
            Self::Coded(panels) => panels.len(),
        }
    }

    /// Returns the bytes of all panels.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Words(words) => size_of_val(words),
            Self::Halves(halves) => size_of_val(halves),
            Self::Coded(panels) => panels.bytes(),
        }
    }

    /// Returns the bytes of `words` words, without escapes.
    fn bytes_of(self, words: usize) -> usize {
        match self {
            Self::Words(_) => words * size_of::<u32>(),
            Self::Halves(_) => words * size_of::<u16>(),
            Self::Coded(panels) => panels.bytes_of(words),
        }
    }

    /// Returns the address of the word `word`, which may be beyond the end, for prefetches.
    fn place(self, word: usize) -> *const u8 {
        let start: *const u8 = match self {
            Self::Words(words) => words.as_ptr().cast(),
            Self::Halves(halves) => halves.as_ptr().cast(),
            Self::Coded(panels) => panels.as_ptr(),
        };
        start.wrapping_add(self.bytes_of(word))
    }

    /// Returns the panel that begins with the word `word`. Words are f32 if `is_f32`, otherwise bf16 pairs.
    ///
    /// # Panics
    /// Beyond the end.
    fn panel(self, is_f32: bool, word: usize) -> RhsPanel {
        match (self, is_f32) {
            (Self::Words(words), true) => RhsPanel::F32(words[word..].as_ptr()),
            (Self::Words(words), false) => RhsPanel::Pairs(words[word..].as_ptr()),
            (Self::Halves(halves), _) => RhsPanel::Halves(halves[word..].as_ptr()),
            (Self::Coded(panels), true) => RhsPanel::CodedHalves(panels.panel(word)),
            (Self::Coded(panels), false) => RhsPanel::CodedPairs(panels.panel(word)),
        }
    }
}

/// A piece of K of panels: their words from `first` on; panels are `stride` words apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PanelPiece<'a> {
    pub(crate) panels: Panels<'a>,
    pub(crate) first: usize,
    pub(crate) stride: usize,
}

impl Gemm {
    /// Returns `true` if [`Self::multiply_narrow`] has a kernel.
    pub(crate) fn multiplies_narrow(self) -> bool {
        microkernel::multiplies_narrow(self.isa)
    }

    /// Like [`Self::multiply`] column by column, with a rhs in less memory than words. The product of a rhs panel with the first lhs panel copies its
    /// words into `near`, which has the length of at least one rhs panel. Products with further lhs panels, and all products of tiles, read the copy.
    ///
    /// # Panics
    /// As [`Self::multiply`], and without a kernel.
    pub(crate) fn multiply_narrow(
        self,
        k: usize,
        lhs: Packed<'_>,
        rhs: PanelPiece<'_>,
        near: &mut [u32],
        out: &mut MatMut<'_>,
        add: bool,
    ) {
        let _clock = Clock::start(Work::Products);
        let (m, n, words, is_f32) = (out.rows(), out.cols(), self.words(k), self.packs_f32());
        let height = self.lhs_panel();
        let (lhs_panels, rhs_panels) = (m.div_ceil(height), n.div_ceil(RHS_PANEL));
        let ends = |panels: usize, stride: usize, width: usize| panels.max(1) * stride - stride + width * words;
        assert!(self.multiplies_narrow() && words <= self.most && RHS_PANEL * words <= near.len());
        assert!(
            ends(lhs_panels, lhs.stride, height) <= lhs.words.len()
                && rhs.first + ends(rhs_panels, rhs.stride, RHS_PANEL) <= rhs.panels.len()
        );
        if self.multiplies_tiles() {
            let mut tiles = Tiles::new();
            for j in 0..rhs_panels {
                let b = rhs.panels.panel(is_f32, rhs.first + j * rhs.stride);
                assert!(words.is_multiple_of(b.step()));
                // SAFETY: checked above: the instruction set has the kernel, and the panel and `near` have `words` words per column.
                unsafe { microkernel::widen(words, b, near.as_mut_ptr()) };
                let product = Product { k, lhs, rhs: Packed { words: near, stride: RHS_PANEL * words } };
                let mut out = out.columns(j * RHS_PANEL..n.min((j + 1) * RHS_PANEL));
                self.multiply_tiles(&mut tiles, product, None, &mut out, add, Order::ByColumns);
            }
            return;
        }
        let near = near.as_mut_ptr();
        let bytes = rhs.panels.bytes_of(RHS_PANEL * words);
        let steps = (0..rhs_panels).flat_map(|j| (0..lhs_panels).map(move |i| (i, j)));
        self.for_blocks(steps, out, add, |[i, j], rows, c, stride, add| {
            let a = lhs.words[i * lhs.stride..].as_ptr();
            let first = rhs.first + j * rhs.stride;
            let (b, copy) = match i {
                0 => (rhs.panels.panel(is_f32, first), (lhs_panels > 1).then_some(near)),
                _ if is_f32 => (RhsPanel::F32(near), None),
                _ => (RhsPanel::Pairs(near), None),
            };
            assert!(words.is_multiple_of(b.step()));
            // Prefetch the next panel during work on this one, a part of it with each lhs panel.
            let (next, prefetches) = (rhs.panels.place(first + rhs.stride), b.prefetches(words));
            let step = bytes.div_ceil(lhs_panels * prefetches.max(1));
            let ahead = Ahead { from: next.wrapping_add(i * step * prefetches), step };
            // SAFETY: both panels have `words` words per row or column, checked above, as `near` has; `for_blocks` passes an output of [12, 32]
            // elements.
            unsafe { microkernel::multiply(self.isa, rows, words, a, b, copy, ahead, c, stride, add) };
        });
    }

    /// Returns the most rows of a lhs for [`Self::multiply_few`]; 0 without such a kernel. Products of tiles have none, so that the bits of a row
    /// do not depend on the number of rows.
    pub(crate) fn few_rows(self) -> usize {
        if self.multiplies_narrow() && !self.multiplies_tiles() { microkernel::FEW_ROWS } else { 0 }
    }

    /// Packs the rows of `source: [m, k]`, with K along its columns, as the lhs `[K', m]` of [`Self::multiply_few`].
    pub(crate) fn pack_few(self, source: &Rows<'_>, out: &mut [u32]) {
        let (isa, along, stride) = (self.isa, KAxis::Columns, source.rows());
        timed(Work::Packing, || match (self.kernel == GemmKernel::F32, self.rounds) {
            (true, false) => pack::interleaved::<F32Word>(isa, source, along, 0, out, stride),
            (true, true) => pack::interleaved::<RoundedF32>(isa, source, along, 0, out, stride),
            (false, false) => pack::interleaved::<Bf16Pair>(isa, source, along, 0, out, stride),
            (false, true) => pack::interleaved::<RoundedPair>(isa, source, along, 0, out, stride),
        });
    }

    /// Computes `out (+)= lhs rhs` over all `k` entries of K for few rows, with the bits of [`Self::multiply`] for each of [`Self::pieces`].
    /// `lhs` is from [`Self::pack_few`]; `first` is the first word of the rhs panels, which are contiguous, with all of K. Weights are read from
    /// memory once and in order, which is the time of such a product.
    ///
    /// # Panics
    /// If the operands are too short, or `out` has more than [`Self::few_rows`] rows.
    pub(crate) fn multiply_few(
        self,
        k: usize,
        lhs: &[u32],
        rhs: Panels<'_>,
        first: usize,
        out: &mut MatMut<'_>,
        add: bool,
    ) {
        let _clock = Clock::start(Work::Products);
        let (m, n, words) = (out.rows(), out.cols(), self.words(k));
        let (stride, panels) = (self.rhs_stride(k), n.div_ceil(RHS_PANEL));
        let piece = self.pieces(k).next().map_or(0, |piece| self.words(piece.len()));
        assert!((1..=self.few_rows()).contains(&m) && m * words <= lhs.len() && first + panels * stride <= rhs.len());
        for panel in 0..panels {
            let column = panel * RHS_PANEL;
            let columns = RHS_PANEL.min(n - column);
            let b = rhs.panel(self.packs_f32(), first + panel * stride);
            assert!(words.is_multiple_of(b.step()) && piece.is_multiple_of(b.step()));
            let (c, row) = out.piece(0, column, m, columns);
            // SAFETY: `few_rows` is above 0 only with kernels of this instruction set, which are of pairs if the operands are; the operands
            // hold `words` words, checked above; `piece` has checked the output.
            unsafe { microkernel::multiply_few(m, words, piece, lhs.as_ptr(), b, c, columns, row, add) };
        }
    }
}
