//! Matrix products of packed operands.
//!
//! Avoids strided reads in the inner loop, bf16 widened to f32 where the processor multiplies bf16, and sums that depend
//! on how work was cut.
//!
//! A product is `out[m, n] (+)= sum over k of lhs[m, k] rhs[k, n]`. Callers pack both operands, in pieces of K of at most
//! [`Gemm::depth`] entries, so that what is used again is packed once. The unit of a packed operand is a *word* of
//! 32 bits: an f32, or two neighbours along k in bf16. A piece of K' words is
//!
//! * as lhs of vector kernels: panels `[K', 12]`; a word is broadcast per multiply-add;
//! * as lhs of tile kernels: panels `[K' / 16, 32, 16]`, rows of AMX tiles;
//! * as rhs: panels `[K', 32]`, two registers or two tiles wide.
//!
//! Rows and columns that a panel has too many, and words beyond K, are zero. Vector kernels hold a `[12, 32]` piece of the
//! output in 24 of 32 registers, tile kernels a `[32, 32]` one in 4 of 8 tiles. A panel of one operand
//! stays in the first cache while those of the other pass by; of these, as many as a quarter of the second cache holds pass by at a
//! time, and are there for the next panel. While a panel of the rhs is used, the kernel fetches the next one, a line per step of K:
//! a weight that comes from memory for a few rows comes while the one before it is multiplied.
//!
//! Every element of a result is one chain of multiply-adds over a piece, added to what was there: its bits depend on the
//! instruction set and on the pieces, which the first cache decides, not on the shape of the product or its place in it.
#![allow(unsafe_code)]

mod mat_mut;
mod pack;

pub(crate) use crate::arch::panel::RHS_PANEL;
pub(crate) use mat_mut::{Cut, MatMut};
pub(crate) use pack::{KAxis, Rows};

use crate::arch::caches::{first_cache, second_cache};
use crate::arch::microkernel::Ahead;
use crate::arch::panel::LHS_PANEL;
#[cfg(test)]
use crate::arch::tiles::Tiles;
use crate::arch::{Isa, IsaToken, amx, microkernel};
use crate::profile::{Clock, Work, timed};
#[cfg(not(test))]
use amx::Tiles;
use pack::{Bf16Pair, F32Word};
use std::ops::Range;

/// Most words of a piece for a first cache of `bytes`: a panel of each operand and a piece of the output stay in it, which a core that
/// makes two multiply-adds of 64 bytes in a cycle needs. It would take 15 bytes per cycle from the second otherwise, and so takes those of
/// the panels that pass by, 4 of the lhs or 11 of the rhs. 160 for 32 KiB, 256 for 48 and more: longer ones were not measured.
fn most_words(bytes: usize) -> usize {
    const OUT: usize = LHS_PANEL * RHS_PANEL * size_of::<f32>();
    let words = bytes.saturating_sub(OUT) / ((LHS_PANEL + RHS_PANEL) * size_of::<u32>());
    (words / GRAIN * GRAIN).clamp(160, 256)
}

/// Most words of a piece for tile kernels: a panel of each operand, 16 KiB, and a piece of the output on its way, 4 KiB, stay in a first
/// cache of 48 KiB, which is what processors with AMX have.
const TILE_WORDS: usize = 128;

/// Pieces of K are made of whole blocks of so many entries, but for the last: whole rows of tiles, whole blocks to transpose.
const GRAIN: usize = 32;

/// How products are made: by which kernel of which instruction set, and so how operands are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gemm {
    isa: IsaToken,
    kernel: GemmKernel,
    /// Most words of a piece.
    most: usize,
    /// Words of an operand that stay in a core's second cache while panels of the other pass by.
    near: usize,
}

/// The kernel that multiplies packed panels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GemmKernel {
    /// Multiply-adds of f32 in vector registers; words are f32.
    F32,
    /// Dot products of bf16 pairs in vector registers (AVX-512 BF16); words are bf16 pairs.
    Bf16Dot,
    /// Products of bf16 tiles (AMX); words are bf16 pairs.
    Amx,
}

/// A piece of the output on its way there. Its rows begin at cache lines, so that no row of a tile is stored across two of them.
#[repr(align(64))]
struct Edge([f32; amx::LHS_PANEL * RHS_PANEL]);

/// Panels of a piece of an operand; they begin `stride` words apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packed<'a> {
    pub(crate) words: &'a [u32],
    pub(crate) stride: usize,
}

/// Which pieces of the output follow one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// The pieces below follow one another: a rhs panel stays near.
    ByColumns,
    /// The pieces to the right follow one another: better where the output comes from memory, because neighbours share
    /// its pages.
    ByRows,
}

impl Gemm {
    /// `bf16`: whether all operands hold bf16 values. Where the processor multiplies pairs of those, it will; elsewhere
    /// the same values are multiplied in f32.
    pub(crate) fn new(isa: IsaToken, bf16: bool) -> Self {
        let kernel = match isa.get() {
            Isa::Amx if bf16 => GemmKernel::Amx,
            Isa::Avx512Bf16 if bf16 => GemmKernel::Bf16Dot,
            _ => GemmKernel::F32,
        };
        let most = if kernel == GemmKernel::Amx { TILE_WORDS } else { most_words(first_cache()) };
        Self::of(isa, kernel, most)
    }

    /// Products of tiles in pieces of at most `most` words, a multiple of 16, on any machine: where it has no AMX, those of
    /// [`crate::arch::tiles`].
    #[cfg(test)]
    pub(crate) fn of_tiles(isa: IsaToken, most: usize) -> Self {
        Self::of(isa, GemmKernel::Amx, most)
    }

    fn of(isa: IsaToken, kernel: GemmKernel, most: usize) -> Self {
        // A quarter: the other operand's panels and the output pass through it too.
        Self { isa, kernel, most, near: second_cache() / 4 / size_of::<u32>() }
    }

    /// The instruction set that the kernels are compiled for.
    pub(crate) fn isa(self) -> IsaToken {
        self.isa
    }

    /// What a core multiplies and adds while a byte travels between it and memory, two flops each; of the machines at hand
    /// (100, 200 and 2000 Gflop/s beside 10 GB/s).
    pub(crate) fn flops_per_byte(self) -> f64 {
        match self.kernel {
            GemmKernel::F32 => 10.0,
            GemmKernel::Bf16Dot => 20.0,
            GemmKernel::Amx => 200.0,
        }
    }

    /// Rows of a lhs panel.
    pub(crate) fn lhs_panel(self) -> usize {
        if self.kernel == GemmKernel::Amx { amx::LHS_PANEL } else { LHS_PANEL }
    }

    /// Most entries of K in a piece.
    pub(crate) fn depth(self) -> usize {
        match self.kernel {
            GemmKernel::F32 => self.most,
            GemmKernel::Bf16Dot | GemmKernel::Amx => 2 * self.most,
        }
    }

    /// Rows of output that stay in a core's second cache while one piece of K after the other is added to them: as many as a piece has
    /// entries, 256, which at some 512 elements each are a quarter of 2 MiB. `None` for kernels that are so slow that the output may come
    /// from anywhere: they hide that.
    pub(crate) fn near_rows(self) -> Option<usize> {
        (self.kernel == GemmKernel::Amx).then(|| self.depth())
    }

    /// Cuts `0..k` into as few pieces of at most [`Self::depth`] entries as there can be, of one size but for the last.
    pub(crate) fn pieces(self, k: usize) -> impl Iterator<Item = Range<usize>> {
        cut(k, self.depth(), GRAIN)
    }

    /// Pieces of `0..k` that are whole lhs panels but for the last: where K are the rows of another product's lhs.
    pub(crate) fn panel_pieces(self, k: usize) -> impl Iterator<Item = Range<usize>> {
        let panel = self.lhs_panel();
        cut(k, self.depth() / panel * panel, panel)
    }

    /// Words of `k` entries of K.
    pub(crate) fn words(self, k: usize) -> usize {
        match self.kernel {
            GemmKernel::F32 => k,
            GemmKernel::Bf16Dot => k.div_ceil(2),
            GemmKernel::Amx => k.div_ceil(2 * amx::WORDS) * amx::WORDS,
        }
    }

    /// Words of a lhs panel of `k` entries.
    pub(crate) fn lhs_stride(self, k: usize) -> usize {
        self.lhs_panel() * self.words(k)
    }

    /// Words of a rhs panel of `k` entries.
    pub(crate) fn rhs_stride(self, k: usize) -> usize {
        RHS_PANEL * self.words(k)
    }

    /// Words of `m` rows, `k` deep, as lhs: pieces one after the other.
    pub(crate) fn lhs_words(self, m: usize, k: usize) -> usize {
        m.div_ceil(self.lhs_panel()) * self.lhs_stride(k)
    }

    /// Words of `n` columns, `k` deep, as rhs: pieces one after the other.
    pub(crate) fn rhs_words(self, n: usize, k: usize) -> usize {
        n.div_ceil(RHS_PANEL) * self.rhs_stride(k)
    }

    /// Packs `source` as the lhs of a piece whose panels begin `stride` words apart in `out`.
    ///
    /// `KAxis::Columns`: `source: [m, k]`, the whole piece. `KAxis::Rows`: `source: [k, m]`, entries `from..` of the
    /// piece; `from` is even, and a multiple of [`Self::lhs_panel`] for tiles. Words are written whole: an odd last entry
    /// is paired with 0.
    pub(crate) fn pack_lhs(self, source: Rows<'_>, along: KAxis, from: usize, out: &mut [u32], stride: usize) {
        timed(Work::Packing, || match self.kernel {
            GemmKernel::F32 => pack::panels::<F32Word, LHS_PANEL>(self.isa, &source, along, from, out, stride),
            GemmKernel::Bf16Dot => pack::panels::<Bf16Pair, LHS_PANEL>(self.isa, &source, along, from, out, stride),
            GemmKernel::Amx => pack::tiles(self.isa, &source, along, from, out, stride),
        });
    }

    /// Packs `source` as the rhs of a piece, as [`Self::pack_lhs`] does with n for m.
    pub(crate) fn pack_rhs(self, source: Rows<'_>, along: KAxis, from: usize, out: &mut [u32], stride: usize) {
        timed(Work::Packing, || match self.kernel {
            GemmKernel::F32 => pack::panels::<F32Word, RHS_PANEL>(self.isa, &source, along, from, out, stride),
            GemmKernel::Bf16Dot | GemmKernel::Amx => {
                pack::panels::<Bf16Pair, RHS_PANEL>(self.isa, &source, along, from, out, stride);
                if self.kernel == GemmKernel::Amx {
                    pack::fill_tile(&source, along, from, out, stride);
                }
            }
        });
    }

    /// `out (+)= lhs rhs` over a piece of `k` entries; [`MatMut`] knows m and n.
    ///
    /// # Panics
    /// When the operands are too short: an error of this crate, not of its caller.
    pub(crate) fn multiply(
        self,
        k: usize,
        lhs: Packed<'_>,
        rhs: Packed<'_>,
        out: &mut MatMut<'_>,
        add: bool,
        order: Order,
    ) {
        let (height, words) = (self.lhs_panel(), self.words(k));
        let (m, n) = (out.rows(), out.cols());
        let holds = |operand: Packed<'_>, panels: usize, width: usize| {
            panels == 0 || (panels - 1) * operand.stride + width * words <= operand.words.len()
        };
        assert!(
            words <= self.most
                && holds(lhs, m.div_ceil(height), height)
                && holds(rhs, n.div_ceil(RHS_PANEL), RHS_PANEL)
        );
        let _clock = Clock::start(Work::Products);
        let (lhs_panels, rhs_panels) = (m.div_ceil(height), n.div_ceil(RHS_PANEL));
        let mut tiles = (self.kernel == GemmKernel::Amx).then(Tiles::new);
        let mut edge = Edge([0.0; amx::LHS_PANEL * RHS_PANEL]);
        let edge = &mut edge.0;
        let steps = match order {
            Order::ByColumns => passes(rhs_panels, lhs_panels, self.near / (height * words).max(1)),
            Order::ByRows => passes(lhs_panels, rhs_panels, self.near / (RHS_PANEL * words).max(1)),
        };
        for (outer, inner) in steps {
            let (i, j) = if order == Order::ByColumns { (inner, outer) } else { (outer, inner) };
            let (a, b) = (lhs.words[i * lhs.stride..].as_ptr(), rhs.words[j * rhs.stride..].as_ptr());
            // While this rhs panel is near, the next one comes from afar: a share of it with each lhs panel.
            let ahead = match order {
                Order::ByColumns => {
                    let step = RHS_PANEL.div_ceil(lhs_panels);
                    Ahead { from: rhs.words.as_ptr().wrapping_add((j + 1) * rhs.stride + i * step * words), step }
                }
                Order::ByRows => Ahead { from: b, step: 0 },
            };
            let (i, j) = (i * height, j * RHS_PANEL);
            let (rows, cols) = (height.min(m - i), RHS_PANEL.min(n - j));
            if let Some(tiles) = &mut tiles {
                // SAFETY: both panels were seen to hold `words` words per row or column, a whole number of tiles.
                unsafe { tiles.multiply(words, a, b, edge) };
                out.store(self.isa, i..i + rows, j..j + cols, edge, add);
                continue;
            }
            let pairs = self.kernel == GemmKernel::Bf16Dot;
            if (rows, cols) == (height, RHS_PANEL) {
                let (c, stride) = out.piece(i, j, height, RHS_PANEL);
                // SAFETY: both panels were seen to hold `words` words per row or column; `piece` vouches for the output.
                unsafe { microkernel::multiply(self.isa, pairs, rows, words, a, b, ahead, c, stride, add) };
            } else {
                // SAFETY: as above, and `edge` holds [12, 32].
                unsafe {
                    let c = edge.as_mut_ptr();
                    microkernel::multiply(self.isa, pairs, rows, words, a, b, ahead, c, RHS_PANEL, false);
                }
                out.store(self.isa, i..i + rows, j..j + cols, edge, add);
            }
        }
    }
}

/// Cuts `0..k` into as few pieces of at most `most` as there can be, each but the last of one size, a multiple of `grain`. So is
/// `most`.
fn cut(k: usize, most: usize, grain: usize) -> impl Iterator<Item = Range<usize>> {
    let size = k.div_ceil(k.div_ceil(most).max(1)).next_multiple_of(grain).min(most);
    (0..k).step_by(size.max(1)).map(move |start| start..k.min(start + size))
}

/// (outer, inner): all inner panels pass by every outer one, at most `block` of them at a time.
fn passes(outer: usize, inner: usize, block: usize) -> impl Iterator<Item = (usize, usize)> {
    let block = block.max(1);
    (0..inner).step_by(block).flat_map(move |start| {
        (0..outer).flat_map(move |outer| (start..inner.min(start + block)).map(move |inner| (outer, inner)))
    })
}

#[cfg(test)]
mod tests;
