//! Matrix products of packed operands.
//!
//! The inner loop reads contiguous memory, bf16 stays bf16 if the processor multiplies it, and sums do not depend on
//! the division of work.
//!
//! A product is `out[m, n] (+)= sum over k of lhs[m, k] rhs[k, n]`. Callers pack both operands, in pieces of K of at
//! most [`Gemm::depth`] entries, so that reused operands are packed once. The unit of a packed operand is a *word* of
//! 32 bits: an f32, or two neighbours along k in bf16. A piece of K' words is
//!
//! * as lhs of vector kernels: panels `[K', 12]`; a word is broadcast per multiply-add;
//! * as lhs of tile kernels: panels `[K' / 16, 32, 16]`, rows of AMX tiles;
//! * as rhs: panels `[K', 32]`, two registers or two tiles wide.
//!
//! Panels are padded with zeros, in rows, columns and words of K. Vector kernels keep a `[12, 32]` block of the output
//! in 24 of 32 registers, tile kernels a `[32, 32]` block in 4 of 8 tiles. A panel of one operand stays in the L1 cache
//! while panels of the other operand are multiplied with it; these are processed in groups that fit a quarter of the L2
//! cache, so that the next panel finds them there. During the work on a rhs panel, vector kernels prefetch the next one,
//! every cache line of it: this hides memory latency for weights that are multiplied with few rows. Tile kernels
//! prefetch both operands of the next product, because the operands of one product fit the L2 cache.
//!
//! With tile kernels a core waits for the output, not for arithmetic. Their callers therefore cut the output into blocks of
//! [`Gemm::near_rows`] rows by a tile's 512 entries, half a mebibyte, which stay in the L2 cache while all pieces of K are
//! added. Rows of these buffers are an odd number of cache lines apart. The blocks depend on the kernel alone, never on the
//! detected size of the L2 cache. Vector kernels hide the latency of their output and need no such blocks.
//!
//! Every element of a result is one chain of multiply-adds over a piece. Vector kernels add it to the previous value;
//! the chain of tile kernels starts with that value. The bits of an element depend on the instruction set and on the
//! length of pieces, which the L1 cache determines, but not on the shape of the product or the position in it.
#![allow(unsafe_code)]

mod coded;
mod few;
mod mat_mut;
mod pack;

pub(crate) use crate::arch::panel::RHS_PANEL;
pub(crate) use coded::{CodedPanels, Exponents};
pub(crate) use few::{PanelPiece, Panels};
pub(crate) use mat_mut::{Cut, MatMut};
pub(crate) use pack::{KAxis, Rows};

use crate::arch::caches::{first_cache, second_cache};
use crate::arch::microkernel::{Ahead, RhsPanel};
use crate::arch::panel::LHS_PANEL;
#[cfg(test)]
use crate::arch::tiles::Tiles;
use crate::arch::{Isa, IsaToken, amx, microkernel};
use crate::profile::{Clock, Work, timed};
#[cfg(not(test))]
use amx::Tiles;
use pack::{Bf16Pair, F32Word, RoundedF32, RoundedPair};
use std::ops::Range;

/// Returns the maximum words of a piece for an L1 cache of `bytes`. A panel of each operand and a block of the output
/// should stay in L1, for cores that do two 64-byte multiply-adds per cycle. Otherwise they would need 15 bytes per
/// cycle from L2, in addition to the other operand's panels: 4 for the lhs or 11 for the rhs. The result is 160 for 32
/// KiB and 256 for 48 KiB and more; longer pieces were not measured.
fn most_words(bytes: usize) -> usize {
    const OUT: usize = LHS_PANEL * RHS_PANEL * size_of::<f32>();
    let words = bytes.saturating_sub(OUT) / ((LHS_PANEL + RHS_PANEL) * size_of::<u32>());
    (words / GRAIN * GRAIN).clamp(160, 256)
}

/// The maximum words of a piece for tile kernels: a panel of each operand, 16 KiB, and a block of the output, 4 KiB,
/// fit into an L1 cache of 48 KiB, the size on processors with AMX.
const TILE_WORDS: usize = 128;

/// The pieces of K are multiples of this many entries, except for the last piece: whole rows of tiles, whole blocks to
/// transpose.
const GRAIN: usize = 32;

/// The kernel and instruction set of products, which determine the packing of operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gemm {
    isa: IsaToken,
    kernel: GemmKernel,
    /// `true` if f32 operands are rounded to bf16 when they are packed.
    rounds: bool,
    /// The maximum words of a piece.
    most: usize,
    /// The words of an operand that stay in a core's L2 cache while panels of the other operand are multiplied with
    /// them.
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

/// A block of the output before it is stored. Its rows start at cache lines, so that no row of a tile crosses two of
/// them.
#[repr(align(64))]
struct Edge([f32; amx::LHS_PANEL * RHS_PANEL]);

/// The panels of a piece of an operand, which start `stride` words apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packed<'a> {
    pub(crate) words: &'a [u32],
    pub(crate) stride: usize,
}

/// A product over a piece of `k` entries of K.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product<'a> {
    pub(crate) k: usize,
    pub(crate) lhs: Packed<'a>,
    pub(crate) rhs: Packed<'a>,
}

/// The order in which blocks of the output are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Column by column: a rhs panel stays in cache.
    ByColumns,
    /// Row by row: better if the output comes from memory, because neighbours share its pages.
    ByRows,
}

impl Gemm {
    /// If `bf16`, all operands have bf16 values. They are multiplied as pairs if the processor can; otherwise the same
    /// values are multiplied in f32.
    pub(crate) fn new(isa: IsaToken, bf16: bool) -> Self {
        let kernel = match isa.get() {
            Isa::Amx if bf16 => GemmKernel::Amx,
            Isa::Avx512Bf16 if bf16 => GemmKernel::Bf16Dot,
            _ => GemmKernel::F32,
        };
        let most = if kernel == GemmKernel::Amx { TILE_WORDS } else { most_words(first_cache()) };
        Self::of(isa, kernel, most)
    }

    /// Like [`Gemm::new`] for bf16 values, but operands are f32 and rounded to bf16 when they are packed. Sums stay f32.
    pub(crate) fn rounding(isa: IsaToken) -> Self {
        Self { rounds: true, ..Self::new(isa, true) }
    }

    /// Makes products of tiles in pieces of at most `most` words, a multiple of 16, on any machine: without AMX, with
    /// [`crate::arch::tiles`].
    #[cfg(test)]
    pub(crate) fn of_tiles(isa: IsaToken, most: usize) -> Self {
        Self::of(isa, GemmKernel::Amx, most)
    }

    /// Makes [`Gemm::of_tiles`] of operands that are rounded when they are packed.
    #[cfg(test)]
    pub(crate) fn rounding_tiles(isa: IsaToken) -> Self {
        Self { rounds: true, ..Self::of_tiles(isa, TILE_WORDS) }
    }

    fn of(isa: IsaToken, kernel: GemmKernel, most: usize) -> Self {
        // A quarter, because the other operand's panels and the output use the L2 cache, too.
        Self { isa, kernel, rounds: false, most, near: second_cache() / 4 / size_of::<u32>() }
    }

    /// Returns the instruction set that the kernels are compiled for.
    pub(crate) fn isa(self) -> IsaToken {
        self.isa
    }

    /// Returns `true` if words are f32. The lower half of a word then is zero for a bf16 value.
    pub(crate) fn packs_f32(self) -> bool {
        self.kernel == GemmKernel::F32
    }

    /// Returns `true` if products are of tiles.
    pub(crate) fn multiplies_tiles(self) -> bool {
        self.kernel == GemmKernel::Amx
    }

    /// Returns `true` if f32 operands are rounded to bf16 when they are packed.
    pub(crate) fn rounds(self) -> bool {
        self.rounds
    }

    /// Returns the multiply-adds of a core, two flops each, per byte of memory traffic, on the development machines
    /// (100, 200 and 2000 Gflop/s at 10 GB/s).
    pub(crate) fn flops_per_byte(self) -> f64 {
        match self.kernel {
            GemmKernel::F32 => 10.0,
            GemmKernel::Bf16Dot => 20.0,
            GemmKernel::Amx => 200.0,
        }
    }

    /// Returns the rows of a lhs panel.
    pub(crate) fn lhs_panel(self) -> usize {
        if self.kernel == GemmKernel::Amx { amx::LHS_PANEL } else { LHS_PANEL }
    }

    /// Returns the maximum entries of K in a piece.
    pub(crate) fn depth(self) -> usize {
        match self.kernel {
            GemmKernel::F32 => self.most,
            GemmKernel::Bf16Dot | GemmKernel::Amx => 2 * self.most,
        }
    }

    /// Returns the output rows that stay in a core's L2 cache while all pieces of K are added to them: as many as a
    /// piece has entries, 256, which at about 512 elements each are a quarter of 2 MiB. Returns `None` for slower
    /// kernels, which hide the latency of output from memory.
    pub(crate) fn near_rows(self) -> Option<usize> {
        (self.kernel == GemmKernel::Amx).then(|| self.depth())
    }

    /// Divides `0..k` into the smallest number of pieces of at most [`Self::depth`] entries, of equal size except for
    /// the last.
    pub(crate) fn pieces(self, k: usize) -> impl Iterator<Item = Range<usize>> {
        cut(k, self.depth(), GRAIN)
    }

    /// Divides `0..k` into pieces that are multiples of lhs panels except for the last, for a K that is the rows of
    /// another product's lhs.
    pub(crate) fn panel_pieces(self, k: usize) -> impl Iterator<Item = Range<usize>> {
        let panel = self.lhs_panel();
        cut(k, self.depth() / panel * panel, panel)
    }

    /// Returns the words of `k` entries of K.
    pub(crate) fn words(self, k: usize) -> usize {
        match self.kernel {
            GemmKernel::F32 => k,
            GemmKernel::Bf16Dot => k.div_ceil(2),
            GemmKernel::Amx => k.div_ceil(2 * amx::WORDS) * amx::WORDS,
        }
    }

    /// Returns the words of a lhs panel of `k` entries.
    pub(crate) fn lhs_stride(self, k: usize) -> usize {
        self.lhs_panel() * self.words(k)
    }

    /// Returns the words of a rhs panel of `k` entries.
    pub(crate) fn rhs_stride(self, k: usize) -> usize {
        RHS_PANEL * self.words(k)
    }

    /// Returns the words of `m` rows of depth `k` as lhs, with contiguous pieces.
    pub(crate) fn lhs_words(self, m: usize, k: usize) -> usize {
        m.div_ceil(self.lhs_panel()) * self.lhs_stride(k)
    }

    /// Returns the words of `n` columns of depth `k` as rhs, with contiguous pieces.
    pub(crate) fn rhs_words(self, n: usize, k: usize) -> usize {
        n.div_ceil(RHS_PANEL) * self.rhs_stride(k)
    }

    /// Packs `source` as the lhs of a piece whose panels start `stride` words apart in `out`.
    ///
    /// With `KAxis::Columns`, `source` is `[m, k]`, the whole piece. With `KAxis::Rows`, `source` is `[k, m]`, entries
    /// `from..` of the piece; `from` must be even, and a multiple of [`Self::lhs_panel`] for tiles. Words are written
    /// completely: an odd last entry is paired with 0.
    pub(crate) fn pack_lhs(self, source: Rows<'_>, along: KAxis, from: usize, out: &mut [u32], stride: usize) {
        use GemmKernel::{Amx, Bf16Dot, F32};
        let isa = self.isa;
        timed(Work::Packing, || match (self.kernel, self.rounds) {
            (F32, false) => pack::panels::<F32Word, LHS_PANEL>(isa, &source, along, from, out, stride),
            (F32, true) => pack::panels::<RoundedF32, LHS_PANEL>(isa, &source, along, from, out, stride),
            (Bf16Dot, false) => pack::panels::<Bf16Pair, LHS_PANEL>(isa, &source, along, from, out, stride),
            (Bf16Dot, true) => pack::panels::<RoundedPair, LHS_PANEL>(isa, &source, along, from, out, stride),
            (Amx, false) => pack::tiles::<Bf16Pair>(isa, &source, along, from, out, stride),
            (Amx, true) => pack::tiles::<RoundedPair>(isa, &source, along, from, out, stride),
        });
    }

    /// Packs `source` as the rhs of a piece, as [`Self::pack_lhs`], with n instead of m.
    pub(crate) fn pack_rhs(self, source: Rows<'_>, along: KAxis, from: usize, out: &mut [u32], stride: usize) {
        let (isa, is_f32) = (self.isa, self.kernel == GemmKernel::F32);
        timed(Work::Packing, || {
            match (is_f32, self.rounds) {
                (true, false) => pack::panels::<F32Word, RHS_PANEL>(isa, &source, along, from, out, stride),
                (true, true) => pack::panels::<RoundedF32, RHS_PANEL>(isa, &source, along, from, out, stride),
                (false, false) => pack::panels::<Bf16Pair, RHS_PANEL>(isa, &source, along, from, out, stride),
                (false, true) => pack::panels::<RoundedPair, RHS_PANEL>(isa, &source, along, from, out, stride),
            }
            if self.kernel == GemmKernel::Amx {
                pack::fill_tile(&source, along, from, out, stride);
            }
        });
    }

    /// Computes `out (+)= lhs rhs` over a piece of `k` entries; for m and n, see [`MatMut`].
    ///
    /// # Panics
    /// If the operands are too short: an error of this crate, not of its caller.
    pub(crate) fn multiply(
        self,
        k: usize,
        lhs: Packed<'_>,
        rhs: Packed<'_>,
        out: &mut MatMut<'_>,
        add: bool,
        order: Order,
    ) {
        self.multiply_sum([Product { k, lhs, rhs }], out, add, order);
    }

    /// Computes `out (+)=` the sum of `products`, as calls of [`Self::multiply`] would. During each product, tile
    /// kernels prefetch the operands of the next one into the L2 cache.
    ///
    /// # Panics
    /// As [`Self::multiply`].
    pub(crate) fn multiply_sum<'a>(
        self,
        products: impl IntoIterator<Item = Product<'a>>,
        out: &mut MatMut<'_>,
        mut add: bool,
        order: Order,
    ) {
        let _clock = Clock::start(Work::Products);
        let mut tiles = (self.kernel == GemmKernel::Amx).then(Tiles::new);
        let mut products = products.into_iter().peekable();
        while let Some(product) = products.next() {
            match &mut tiles {
                Some(tiles) => self.multiply_tiles(tiles, product, products.peek(), out, add, order),
                None => self.multiply_vectors(product, out, add, order),
            }
            add = true;
        }
    }

    /// Yields (outer, inner) panels of the operands of `product`, which are rows or columns of blocks, as `order` says.
    ///
    /// # Panics
    /// If the operands are too short for an output of this size.
    fn steps(
        self,
        product: Product<'_>,
        out: &MatMut<'_>,
        order: Order,
    ) -> impl Iterator<Item = (usize, usize)> + use<> {
        let Product { k, lhs, rhs } = product;
        let (height, words) = (self.lhs_panel(), self.words(k));
        let (lhs_panels, rhs_panels) = (out.rows().div_ceil(height), out.cols().div_ceil(RHS_PANEL));
        let holds = |operand: Packed<'_>, panels: usize, width: usize| {
            panels == 0 || (panels - 1) * operand.stride + width * words <= operand.words.len()
        };
        assert!(words <= self.most && holds(lhs, lhs_panels, height) && holds(rhs, rhs_panels, RHS_PANEL));
        let (outer, inner, width) = match order {
            Order::ByColumns => (rhs_panels, lhs_panels, height),
            Order::ByRows => (lhs_panels, rhs_panels, RHS_PANEL),
        };
        passes(outer, inner, self.near / (width * words).max(1)).map(move |(outer, inner)| match order {
            Order::ByColumns => (inner, outer),
            Order::ByRows => (outer, inner),
        })
    }

    /// Computes a product of tiles, and prefetches the operands of the product `then`.
    fn multiply_tiles(
        self,
        tiles: &mut Tiles,
        product: Product<'_>,
        then: Option<&Product<'_>>,
        out: &mut MatMut<'_>,
        add: bool,
        order: Order,
    ) {
        const SIDE: usize = amx::LHS_PANEL;
        let Product { k, lhs, rhs } = product;
        let (m, n, words) = (out.rows(), out.cols(), self.words(k));
        let mut edge = Edge([0.0; SIDE * RHS_PANEL]);
        let edge = &mut edge.0;
        let mut steps = self.steps(product, out, order).peekable();
        // The words that the kernel prefetches per block of the output.
        let part = words / amx::WORDS * amx::AHEAD;
        // The address of part `step` of the next product's panels; all of them are 32 rows or columns wide.
        let ahead = |step: usize| {
            let then = then?;
            let panel_words = RHS_PANEL * self.words(then.k);
            let (panel, word) = (step * part / panel_words, step * part % panel_words);
            let (operand, panel) = match panel.checked_sub(n.div_ceil(RHS_PANEL)) {
                None => (then.rhs, panel),
                Some(panel) if panel < m.div_ceil(SIDE) => (then.lhs, panel),
                Some(_) => return None,
            };
            Some(operand.words.as_ptr().wrapping_add(panel * operand.stride + word))
        };
        let mut done = 0;
        while let Some((i, j)) = steps.next() {
            let (a, b) = (lhs.words[i * lhs.stride..].as_ptr(), rhs.words[j * rhs.stride..].as_ptr());
            let ahead = ahead(done).unwrap_or(a);
            done += 1;
            let (next_i, next_j) = steps.peek().copied().unwrap_or((0, 0));
            let (i, j) = (i * SIDE, j * RHS_PANEL);
            let (rows, cols) = (SIDE.min(m - i), RHS_PANEL.min(n - j));
            let next = out.address(next_i * SIDE, next_j * RHS_PANEL);
            if (rows, cols) == (SIDE, RHS_PANEL) {
                let (c, stride) = out.piece(i, j, rows, cols);
                // SAFETY: `steps` has checked that both panels have `words` words per row or column, a whole number of
                // tiles; `piece` has checked the output.
                unsafe { tiles.multiply(words, a, b, ahead, next, c, stride, add) };
            } else {
                if add {
                    out.load(i..i + rows, j..j + cols, edge);
                }
                // SAFETY: as above, and `edge` has [32, 32] elements.
                unsafe { tiles.multiply(words, a, b, ahead, next, edge.as_mut_ptr(), RHS_PANEL, add) };
                out.store(self.isa, i..i + rows, j..j + cols, edge, false);
            }
        }
    }

    /// Computes a product of vectors.
    fn multiply_vectors(self, product: Product<'_>, out: &mut MatMut<'_>, add: bool, order: Order) {
        let Product { k, lhs, rhs } = product;
        let (height, words) = (self.lhs_panel(), self.words(k));
        let m = out.rows();
        let is_f32 = self.packs_f32();
        self.for_blocks(self.steps(product, out, order), out, add, |[i, j], rows, c, stride, add| {
            let (a, b) = (lhs.words[i * lhs.stride..].as_ptr(), rhs.words[j * rhs.stride..].as_ptr());
            let panel = if is_f32 { RhsPanel::F32(b) } else { RhsPanel::Pairs(b) };
            // Prefetch the next rhs panel during work on this one, a part of it with each lhs panel.
            let ahead = match order {
                Order::ByColumns => {
                    let step = 64_usize.div_ceil(m.div_ceil(height));
                    let next = rhs.words.as_ptr().wrapping_add((j + 1) * rhs.stride);
                    Ahead { from: next.cast::<u8>().wrapping_add(i * step * panel.prefetches(words)), step }
                }
                Order::ByRows => Ahead { from: b.cast(), step: 0 },
            };
            // SAFETY: `steps` has checked that both panels have `words` words per row or column; `for_blocks` passes an output of [12, 32]
            // elements.
            unsafe { microkernel::multiply(self.isa, rows, words, a, panel, None, ahead, c, stride, add) };
        });
    }

    /// Calls `kernel` for each pair of panels (i, j) of `steps` with the number of rows, the address and the row stride of its block of the
    /// output, and with `true` if it adds to the block. The address is of a whole block: those at the edges of the output are computed apart.
    fn for_blocks(
        self,
        steps: impl Iterator<Item = (usize, usize)>,
        out: &mut MatMut<'_>,
        add: bool,
        kernel: impl Fn([usize; 2], usize, *mut f32, usize, bool),
    ) {
        let (m, n, height) = (out.rows(), out.cols(), self.lhs_panel());
        let mut edge = Edge([0.0; amx::LHS_PANEL * RHS_PANEL]);
        let edge = &mut edge.0;
        // A loop over the iterator would call the nested iterators for each pair of panels.
        steps.for_each(|(i, j)| {
            let (rows, cols) = (height.min(m - i * height), RHS_PANEL.min(n - j * RHS_PANEL));
            if (rows, cols) == (height, RHS_PANEL) {
                let (c, stride) = out.piece(i * height, j * RHS_PANEL, height, RHS_PANEL);
                kernel([i, j], rows, c, stride, add);
            } else {
                kernel([i, j], rows, edge.as_mut_ptr(), RHS_PANEL, false);
                let (i, j) = (i * height, j * RHS_PANEL);
                out.store(self.isa, i..i + rows, j..j + cols, edge, add);
            }
        });
    }
}

/// Divides `0..k` into the smallest number of pieces of at most `most`, of equal size except for the last; the size is
/// a multiple of `grain`, like `most`.
fn cut(k: usize, most: usize, grain: usize) -> impl Iterator<Item = Range<usize>> {
    let size = k.div_ceil(k.div_ceil(most).max(1)).next_multiple_of(grain).min(most);
    (0..k).step_by(size.max(1)).map(move |start| start..k.min(start + size))
}

/// Yields (outer, inner): the inner panels in groups of at most `block`, and each group with every outer panel.
fn passes(outer: usize, inner: usize, block: usize) -> impl Iterator<Item = (usize, usize)> {
    let block = block.max(1);
    (0..inner).step_by(block).flat_map(move |start| {
        (0..outer).flat_map(move |outer| (start..inner.min(start + block)).map(move |inner| (outer, inner)))
    })
}

#[cfg(test)]
mod tests;
