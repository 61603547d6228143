//! Words of a packed operand: an f32, or two neighbours along K in bf16.

use crate::convert::rounded;
use half::bf16;

/// The words that are loaded, transposed and stored together.
pub(super) const SIDE: usize = 16;

/// An element of a source.
pub(crate) trait Packable: Copy {
    const ZERO: Self;
    fn wide(self) -> u32;
    /// Returns the upper half of [`Packable::wide`]; exact for bf16 values.
    fn narrow(self) -> u16;
    /// Returns the nearest bf16 value, as f32.
    fn nearest(self) -> u32;
}

impl Packable for f32 {
    const ZERO: Self = 0.0;
    #[inline(always)]
    fn wide(self) -> u32 {
        self.to_bits()
    }
    #[inline(always)]
    fn narrow(self) -> u16 {
        (self.to_bits() >> 16) as u16
    }
    #[inline(always)]
    fn nearest(self) -> u32 {
        rounded(self).to_bits()
    }
}

impl Packable for bf16 {
    const ZERO: Self = bf16::ZERO;
    #[inline(always)]
    fn wide(self) -> u32 {
        u32::from(self.to_bits()) << 16
    }
    #[inline(always)]
    fn narrow(self) -> u16 {
        self.to_bits()
    }
    #[inline(always)]
    fn nearest(self) -> u32 {
        self.wide()
    }
}

/// A word of 32 bits.
pub(crate) trait Word {
    /// The entries of K in a word.
    const ENTRIES: usize;
    /// Makes a word of an entry and the next one, which is ignored if a word has one entry.
    fn of<E: Packable>(first: E, second: E) -> u32;
}

/// A word with one f32.
pub(crate) struct F32Word;
/// A word with two bf16, the first in the lower half. Entries must have bf16 values.
pub(crate) struct Bf16Pair;
/// A word with one f32, rounded to bf16.
pub(crate) struct RoundedF32;
/// A [`Bf16Pair`] of rounded entries.
pub(crate) struct RoundedPair;

impl Word for F32Word {
    const ENTRIES: usize = 1;
    #[inline(always)]
    fn of<E: Packable>(first: E, _: E) -> u32 {
        first.wide()
    }
}

impl Word for Bf16Pair {
    const ENTRIES: usize = 2;
    #[inline(always)]
    fn of<E: Packable>(first: E, second: E) -> u32 {
        u32::from(first.narrow()) | u32::from(second.narrow()) << 16
    }
}

impl Word for RoundedF32 {
    const ENTRIES: usize = 1;
    #[inline(always)]
    fn of<E: Packable>(first: E, _: E) -> u32 {
        first.nearest()
    }
}

impl Word for RoundedPair {
    const ENTRIES: usize = 2;
    #[inline(always)]
    fn of<E: Packable>(first: E, second: E) -> u32 {
        first.nearest() >> 16 | second.nearest() & 0xffff_0000
    }
}

#[inline(always)]
pub(super) fn words_of<E: Packable, W: Word, const P: usize>(first: &[E], second: &[E], to: &mut [u32; P]) {
    if let (Some(first), Some(second)) = (first.as_array::<P>(), second.as_array::<P>()) {
        for x in 0..P {
            to[x] = W::of(first[x], second[x]);
        }
    } else {
        to.fill(0);
        to.iter_mut().zip(first.iter().zip(second)).for_each(|(to, (a, b))| *to = W::of(*a, *b));
    }
}

/// Returns words `word..word + 16` of a row; 0 beyond its end.
#[inline(always)]
pub(super) fn words_of_row<E: Packable, W: Word>(row: &[E], word: usize) -> [u32; SIDE] {
    let entries = &row[(word * W::ENTRIES).min(row.len())..];
    if entries.len() >= SIDE * W::ENTRIES {
        return whole_words::<E, W>(entries);
    }
    let mut words = [0; SIDE];
    for (to, entries) in words.iter_mut().zip(entries.chunks(W::ENTRIES)) {
        *to = W::of(entries[0], entries.get(1).copied().unwrap_or(E::ZERO));
    }
    words
}

/// Returns the first 16 words of `entries`.
#[inline(always)]
pub(super) fn whole_words<E: Packable, W: Word>(entries: &[E]) -> [u32; SIDE] {
    let entries = &entries[..SIDE * W::ENTRIES];
    std::array::from_fn(|x| W::of(entries[x * W::ENTRIES], entries[x * W::ENTRIES + W::ENTRIES - 1]))
}
