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
    /// As [`amx::Tiles::multiply`]: the panels hold that many words, a multiple of 16; c holds 1024 elements.
    pub(crate) unsafe fn multiply(&mut self, words: usize, a: *const u32, b: *const u32, c: &mut [f32]) {
        match self {
            // SAFETY: guaranteed by the caller.
            Self::Amx(tiles) => unsafe { tiles.multiply(words, a, b, c) },
            Self::PlainRust => {
                // SAFETY: the caller guarantees panels of 32 rows, or columns, of `words` words.
                let [a, b] =
                    [(a, amx::LHS_PANEL), (b, RHS_PANEL)].map(|(panel, width)| unsafe { slice(panel, width * words) });
                multiply(words, a, b, c);
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

/// Computes `c[32, 32] = a b` for `a: [words / 16, 32, 16]` and `b: [words, 32]`, with the summation order of
/// `tdpbf16ps` in Intel's manual: within each tile of 16 words, the products of first entries and of second entries are
/// summed separately, then both sums are added to the accumulator. Subnormal numbers, which the instruction treats as
/// 0, are kept.
fn multiply(words: usize, a: &[u32], b: &[u32], c: &mut [f32]) {
    let (a, b) = (a.as_chunks::<{ amx::WORDS }>().0, b.as_chunks::<RHS_PANEL>().0);
    let c = &mut c.as_chunks_mut::<RHS_PANEL>().0[..amx::LHS_PANEL];
    assert_eq!(words % amx::WORDS, 0, "whole tiles");
    c.iter_mut().for_each(|row| row.fill(0.0));
    let steps = a.chunks_exact(amx::LHS_PANEL).zip(b.chunks_exact(amx::WORDS));
    for (a, b) in steps {
        for (a, c) in a.iter().zip(&mut *c) {
            let mut sums = [[0.0_f32; RHS_PANEL]; 2];
            for (a, b) in a.iter().zip(b) {
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
    let mut c = vec![f32::NAN; amx::LHS_PANEL * RHS_PANEL];
    multiply(WORDS, &a, &b, &mut c);
    for (i, c) in c.iter().enumerate() {
        let expected = if i == row * RHS_PANEL + column { 1.5 * 2.0 + 3.0 * 0.5 } else { 0.0 };
        assert_eq!(*c, expected, "{i}");
    }
}

/// Compares with AMX, if this machine has it.
#[test]
fn portable_tiles_match_amx() {
    const WORDS: usize = 5 * amx::WORDS;
    // Pairs of numbers between -2 and 2.
    let pairs = |seed: u32| {
        let half = move |i: u32| (i.wrapping_mul(2_654_435_761) >> 16) & 0xbfff;
        (0..32 * WORDS as u32).map(move |i| half(2 * i + seed) | half(2 * i + 1 + seed) << 16).collect::<Vec<_>>()
    };
    let (a, b) = (pairs(1), pairs(7));
    let [mut found, mut expected] = [(); 2].map(|()| vec![0.0; amx::LHS_PANEL * RHS_PANEL]);
    // SAFETY: both panels hold 32 times `WORDS` words.
    unsafe { Tiles::new().multiply(WORDS, a.as_ptr(), b.as_ptr(), &mut found) };
    multiply(WORDS, &a, &b, &mut expected);
    let largest = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    assert!(largest > 1.0 && largest.is_finite(), "{largest}");
    let off = found.iter().zip(&expected).fold(0.0_f32, |most, (a, b)| most.max((a - b).abs()));
    assert!(off <= 1e-6 * largest, "{off:e} of {largest}");
}
