//! Products that read a packed weight at the rate of the memory: of few rows, and of weights in half the memory.

use super::pack::{self, Bf16Pair, F32Word, KAxis, RoundedF32, RoundedPair, Rows};
use super::{Gemm, GemmKernel, MatMut, Packed};
use crate::arch::microkernel::{self, Ahead, FewPanel};
use crate::arch::panel::{LHS_PANEL, RHS_PANEL};
use crate::profile::{Clock, Work, timed};

/// The panels of a packed rhs: words, or the upper halves of f32 words, whose lower halves are zero.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Panels<'a> {
    Words(&'a [u32]),
    Halves(&'a [u16]),
}

impl Panels<'_> {
    /// Returns the number of words.
    fn len(self) -> usize {
        match self {
            Self::Words(words) => words.len(),
            Self::Halves(halves) => halves.len(),
        }
    }

    /// Returns the bytes of a word.
    pub(crate) fn word_bytes(self) -> usize {
        match self {
            Self::Words(_) => size_of::<u32>(),
            Self::Halves(_) => size_of::<u16>(),
        }
    }

    /// Returns the panels from the word `first` on.
    pub(crate) fn from(self, first: usize) -> Self {
        match self {
            Self::Words(words) => Self::Words(&words[first..]),
            Self::Halves(halves) => Self::Halves(&halves[first..]),
        }
    }
}

impl Gemm {
    /// Returns `true` if [`Self::multiply_halves`] has a kernel.
    pub(crate) fn multiplies_halves(self) -> bool {
        self.packs_f32() && microkernel::multiplies_few(self.isa)
    }

    /// Like [`Self::multiply`] column by column, with a rhs of the upper halves of words, whose panels start `stride` halves apart.
    ///
    /// # Panics
    /// As [`Self::multiply`], and without a kernel.
    pub(crate) fn multiply_halves(
        self,
        k: usize,
        lhs: Packed<'_>,
        rhs: &[u16],
        stride: usize,
        out: &mut MatMut<'_>,
        add: bool,
    ) {
        /// The u32 of a row of a panel of halves.
        const ROW: usize = RHS_PANEL / 2;
        let _clock = Clock::start(Work::Products);
        let (m, n, words) = (out.rows(), out.cols(), self.words(k));
        let (lhs_panels, rhs_panels) = (m.div_ceil(LHS_PANEL), n.div_ceil(RHS_PANEL));
        let ends = |panels: usize, stride: usize, width: usize| panels.max(1) * stride - stride + width * words;
        assert!(self.multiplies_halves() && words <= self.most);
        assert!(
            ends(lhs_panels, lhs.stride, LHS_PANEL) <= lhs.words.len()
                && ends(rhs_panels, stride, RHS_PANEL) <= rhs.len()
        );
        let step = ROW.div_ceil(lhs_panels.max(1));
        let of_panels = stride;
        let steps = (0..rhs_panels).flat_map(|j| (0..lhs_panels).map(move |i| (i, j)));
        self.for_blocks(steps, out, add, |[i, j], rows, c, stride, add| {
            let (a, b) = (lhs.words[i * lhs.stride..].as_ptr(), rhs[j * of_panels..].as_ptr());
            let next = rhs.as_ptr().wrapping_add((j + 1) * of_panels).cast::<u32>();
            let ahead = Ahead { from: next.wrapping_add(i * step * words), step };
            // SAFETY: both panels have `words` words per row or column, checked above; `for_blocks` passes an output of [12, 32] elements.
            unsafe { microkernel::multiply_halves(rows, words, a, b, ahead, c, stride, add) };
        });
    }

    /// Returns the most rows of a lhs for [`Self::multiply_few`]; 0 without such a kernel. Products of tiles have none, so that the bits of a row
    /// do not depend on the number of rows.
    pub(crate) fn few_rows(self) -> usize {
        if self.kernel != GemmKernel::Amx && microkernel::multiplies_few(self.isa) { microkernel::FEW_ROWS } else { 0 }
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
    /// `lhs` is from [`Self::pack_few`]; panels of the rhs are contiguous, with all of K. Weights are read from memory once and in order, which
    /// is the time of such a product.
    ///
    /// # Panics
    /// If the operands are too short, or `out` has more than [`Self::few_rows`] rows.
    pub(crate) fn multiply_few(self, k: usize, lhs: &[u32], rhs: Panels<'_>, out: &mut MatMut<'_>, add: bool) {
        let _clock = Clock::start(Work::Products);
        let (m, n, words) = (out.rows(), out.cols(), self.words(k));
        let (stride, panels) = (self.rhs_stride(k), n.div_ceil(RHS_PANEL));
        let piece = self.pieces(k).next().map_or(0, |piece| self.words(piece.len()));
        assert!((1..=self.few_rows()).contains(&m) && m * words <= lhs.len() && panels * stride <= rhs.len());
        for panel in 0..panels {
            let (at, first) = (panel * stride, panel * RHS_PANEL);
            let columns = RHS_PANEL.min(n - first);
            let b = match rhs {
                Panels::Words(rhs) if self.kernel == GemmKernel::F32 => FewPanel::F32(rhs[at..].as_ptr()),
                Panels::Words(rhs) => FewPanel::Pairs(rhs[at..].as_ptr()),
                Panels::Halves(rhs) => FewPanel::Halves(rhs[at..].as_ptr()),
            };
            let (c, row) = out.piece(0, first, m, columns);
            // SAFETY: `few_rows` is above 0 only with kernels of this instruction set, which are of pairs if the operands are; the operands
            // hold `words` words, checked above; `piece` has checked the output.
            unsafe { microkernel::multiply_few(m, words, piece, lhs.as_ptr(), b, c, columns, row, add) };
        }
    }
}
