//! Products of bf16 tiles in tests: with AMX if this machine has it, otherwise with the same sums in plain Rust. So
//! packing, blocking and output of the tile kernel are tested on any machine, except for the AMX instructions.
#![allow(unsafe_code)]

use super::amx;
use super::panel::RHS_PANEL;

/// Replaces [`amx::Tiles`] in tests.
pub(crate) enum Tiles {
    Amx(amx::Tiles),
    PlainRust,
}

impl Tiles {
    pub(crate) fn new() -> Self {
        if amx::is_available() { Self::Amx(amx::Tiles::new()) } else { Self::PlainRust }
    }

    /// As [`amx::Tiles::multiply`].
    ///
    /// # Safety
    /// As [`amx::Tiles::multiply`].
    #[allow(clippy::too_many_arguments)]
    pub(crate) unsafe fn multiply(
        &mut self,
        words: usize,
        a: *const u32,
        b: *const u32,
        ahead: *const u32,
        next: *const f32,
        c: *mut f32,
        stride: usize,
        add: bool,
    ) {
        match self {
            // SAFETY: guaranteed by the caller.
            Self::Amx(tiles) => unsafe { tiles.multiply(words, a, b, ahead, next, c, stride, add) },
            Self::PlainRust => {
                // SAFETY: the caller guarantees panels of 32 rows, or columns, of `words` words.
                let [a, b] =
                    [(a, amx::LHS_PANEL), (b, RHS_PANEL)].map(|(panel, width)| unsafe { slice(panel, width * words) });
                assert_eq!(words % amx::WORDS, 0, "whole tiles");
                for row in 0..amx::LHS_PANEL {
                    // SAFETY: the caller guarantees 32 rows of 32 elements, which nothing else accesses.
                    let c = unsafe { std::slice::from_raw_parts_mut(c.add(row * stride), RHS_PANEL) };
                    if !add {
                        c.fill(0.0);
                    }
                    multiply_row(row, a, b, c);
                }
            }
        }
    }
}

/// # Safety
/// There are `len` words from `start`, and nothing writes to them at the same time.
unsafe fn slice<'a>(start: *const u32, len: usize) -> &'a [u32] {
    // SAFETY: guaranteed by the caller.
    unsafe { std::slice::from_raw_parts(start, len) }
}

/// Computes `c[32] += a[row] b` for `a: [words / 16, 32, 16]` and `b: [words, 32]`, with the summation order of
/// `tdpbf16ps` in Intel's manual: within each tile of 16 words, the products of first entries and of second entries are
/// summed separately, then both sums are added to the accumulator. Subnormal numbers, which the instruction treats as
/// 0, are kept.
fn multiply_row(row: usize, a: &[u32], b: &[u32], c: &mut [f32]) {
    let (a, b) = (a.as_chunks::<{ amx::WORDS }>().0, b.as_chunks::<RHS_PANEL>().0);
    for (a, b) in a.chunks_exact(amx::LHS_PANEL).zip(b.chunks_exact(amx::WORDS)) {
        let mut sums = [[0.0_f32; RHS_PANEL]; 2];
        for (a, b) in a[row].iter().zip(b) {
            for column in 0..RHS_PANEL {
                sums[0][column] += first(*a) * first(b[column]);
                sums[1][column] += second(*a) * second(b[column]);
            }
        }
        for column in 0..RHS_PANEL {
            c[column] += sums[0][column] + sums[1][column];
        }
    }
}

/// Returns the first entry of a pair, in the lower half of its word.
fn first(pair: u32) -> f32 {
    f32::from_bits(pair << 16)
}

/// Returns the second entry, in the upper half.
fn second(pair: u32) -> f32 {
    f32::from_bits(pair & 0xffff_0000)
}

#[test]
fn portable_tiles_use_the_layout_of_amx() {
    const WORDS: usize = 2 * amx::WORDS;
    let (mut a, mut b) = (vec![0; amx::LHS_PANEL * WORDS], vec![0; RHS_PANEL * WORDS]);
    // Row 18 of the lhs and column 21 of the rhs have a single pair, in word 19, the fourth word of the second step.
    let (row, column, word) = (18, 21, 19);
    a[(word / 16 * amx::LHS_PANEL + row) * 16 + word % 16] = 0x4040_3fc0; // 1.5, then 3
    b[word * RHS_PANEL + column] = 0x3f00_4000; // 2, then 0.5
    for i in 0..amx::LHS_PANEL {
        let mut c = [0.25; RHS_PANEL];
        multiply_row(i, &a, &b, &mut c);
        for (j, c) in c.into_iter().enumerate() {
            let expected = if (i, j) == (row, column) { 1.5 * 2.0 + 3.0 * 0.5 } else { 0.0 };
            assert_eq!(c, 0.25 + expected, "{i}, {j}");
        }
    }
}

/// Compares with AMX, if this machine has it.
#[test]
fn portable_tiles_match_amx() {
    const WORDS: usize = 5 * amx::WORDS;
    const STRIDE: usize = RHS_PANEL + 5;
    // Pairs of numbers between -2 and 2.
    let pairs = |seed: u32| {
        let half = move |i: u32| (i.wrapping_mul(2_654_435_761) >> 16) & 0xbfff;
        (0..32 * WORDS as u32).map(move |i| half(2 * i + seed) | half(2 * i + 1 + seed) << 16).collect::<Vec<_>>()
    };
    let (a, b) = (pairs(1), pairs(7));
    for add in [false, true] {
        let [mut found, mut expected] = [(); 2].map(|()| vec![3.0; amx::LHS_PANEL * STRIDE]);
        for (mut tiles, out) in [(Tiles::new(), &mut found), (Tiles::PlainRust, &mut expected)] {
            let (a, b, out) = (a.as_ptr(), b.as_ptr(), out.as_mut_ptr());
            // SAFETY: both panels hold 32 times `WORDS` words, and the output has 32 rows.
            unsafe { tiles.multiply(WORDS, a, b, a, out, out, STRIDE, add) };
        }
        let largest = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        assert!(largest > 1.0 && largest.is_finite(), "{largest}");
        let off = found.iter().zip(&expected).fold(0.0_f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(off <= 1e-6 * largest, "{off:e} of {largest}");
        for out in [&found, &expected] {
            assert!(out.chunks(STRIDE).all(|row| row[RHS_PANEL..] == [3.0; 5]), "elements beside the output");
        }
    }
}
