//! Packs operands into panels of words; see [`super`] for the layouts.
//!
//! Avoids a copy in another dtype before the copy into panels: what is read once is widened, paired and turned around on
//! its way. Blocks of 16 x 16 words are turned around in registers where there are 32 of them.

use super::amx;
use crate::host::Slice;
use crate::isa::Level;
use half::bf16;
use std::ops::Range;

/// Asks for the line of the element `at`, which will be read soon: sources lie in memory, and their rows are more streams
/// than a processor follows by itself.
#[inline(always)]
fn fetch<E>(data: &[E], at: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch of any address is harmless, and every x86-64 has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(data.as_ptr().wrapping_add(at).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (data, at);
}

/// A block of words that is turned around at once.
type Block = [[u32; 16]; 16];
const SIDE: usize = 16;
/// Bytes that memory hands over at a time.
const LINE: usize = 64;

/// Rows of a row-major tensor, some of its columns.
#[derive(Clone, Debug)]
pub(crate) struct Rows<'a> {
    data: Slice<'a>,
    stride: usize,
    pick: Pick<'a>,
    columns: Range<usize>,
}

#[derive(Clone, Debug)]
enum Pick<'a> {
    Range(Range<usize>),
    List(&'a [usize]),
}

impl<'a> Rows<'a> {
    /// `columns` of the rows `rows`, which are `stride` elements apart.
    pub(crate) fn new(data: Slice<'a>, stride: usize, rows: Range<usize>, columns: Range<usize>) -> Self {
        Self { data, stride, pick: Pick::Range(rows), columns }
    }

    /// `columns` of the rows that `rows` names.
    pub(crate) fn list(data: Slice<'a>, stride: usize, rows: &'a [usize], columns: Range<usize>) -> Self {
        Self { data, stride, pick: Pick::List(rows), columns }
    }

    fn rows(&self) -> usize {
        match &self.pick {
            Pick::Range(range) => range.len(),
            Pick::List(list) => list.len(),
        }
    }

    /// Where row `i` lies in the data.
    #[inline(always)]
    fn place(&self, i: usize) -> Range<usize> {
        let row = match &self.pick {
            Pick::Range(range) => range.start + i,
            Pick::List(list) => list[i],
        };
        row * self.stride + self.columns.start..row * self.stride + self.columns.end
    }
}

/// Which axis of a source is K.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Depth {
    /// `source: [k, outer]`.
    Rows,
    /// `source: [outer, k]`.
    Columns,
}

/// An element of a source.
pub(crate) trait Element: Copy {
    const ZERO: Self;
    fn wide(self) -> u32;
    /// The upper half of [`Element::wide`]; exact for what holds bf16 values.
    fn narrow(self) -> u16;
}

impl Element for f32 {
    const ZERO: Self = 0.0;
    #[inline(always)]
    fn wide(self) -> u32 {
        self.to_bits()
    }
    #[inline(always)]
    fn narrow(self) -> u16 {
        (self.to_bits() >> 16) as u16
    }
}

impl Element for bf16 {
    const ZERO: Self = bf16::ZERO;
    #[inline(always)]
    fn wide(self) -> u32 {
        u32::from(self.to_bits()) << 16
    }
    #[inline(always)]
    fn narrow(self) -> u16 {
        self.to_bits()
    }
}

/// What a word is made of.
pub(super) trait Word {
    /// Entries of K in it.
    const ENTRIES: usize;
    /// Of an entry and the next, which is ignored where a word holds one.
    fn of<E: Element>(first: E, second: E) -> u32;
}

/// An f32.
pub(super) struct Wide;
/// Two bf16.
pub(super) struct Pairs;

impl Word for Wide {
    const ENTRIES: usize = 1;
    #[inline(always)]
    fn of<E: Element>(first: E, _: E) -> u32 {
        first.wide()
    }
}

impl Word for Pairs {
    const ENTRIES: usize = 2;
    #[inline(always)]
    fn of<E: Element>(first: E, second: E) -> u32 {
        u32::from(first.narrow()) | u32::from(second.narrow()) << 16
    }
}

/// Defines `$name`, which runs `$body` on the elements of its source, with registers of 512 bits where there are any.
macro_rules! by_element_and_level {
    ($(#[$meta:meta])* fn $name:ident[$($generic:tt)*][$($argument:tt)*] = $body:ident) => {
        $(#[$meta])*
        pub(super) fn $name<$($generic)*>(
            level: Level, source: &Rows<'_>, along: Depth, from: usize, out: &mut [u32], stride: usize,
        ) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
            fn avx512<E: Element, $($generic)*>(
                data: &[E], source: &Rows<'_>, along: Depth, from: usize, out: &mut [u32], stride: usize,
            ) {
                $body::<E, true, $($argument)*>(data, source, along, from, out, stride)
            }
            fn run<E: Element, $($generic)*>(
                level: Level, data: &[E], source: &Rows<'_>, along: Depth, from: usize, out: &mut [u32], stride: usize,
            ) {
                #[cfg(target_arch = "x86_64")]
                if level.isa() >= crate::isa::Isa::Avx512 {
                    // SAFETY: a level exists only for what the processor has.
                    return unsafe { avx512::<E, $($argument)*>(data, source, along, from, out, stride) };
                }
                let _ = level;
                $body::<E, false, $($argument)*>(data, source, along, from, out, stride)
            }
            let data = source.data;
            match data {
                Slice::F32(data) => run::<f32, $($argument)*>(level, data, source, along, from, out, stride),
                Slice::Bf16(data) => run::<bf16, $($argument)*>(level, data, source, along, from, out, stride),
            }
        }
    };
}

by_element_and_level! {
    /// Panels `[K', P]`.
    fn panels[W: Word, const P: usize][W, P] = panels_body
}

by_element_and_level! {
    /// Panels `[K' / 16, 32, 16]` of bf16 pairs.
    fn tiles[][] = tiles_body
}

#[inline(always)]
fn panels_body<E: Element, const FAST: bool, W: Word, const P: usize>(
    data: &[E],
    source: &Rows<'_>,
    along: Depth,
    from: usize,
    out: &mut [u32],
    stride: usize,
) {
    match along {
        Depth::Rows => panels_of_rows::<E, W, P>(data, source, from, out, stride),
        Depth::Columns => panels_of_columns::<E, FAST, W, P>(data, source, out, stride),
    }
}

/// `source: [k, outer]`: a word is made of elements that lie above one another.
#[inline(always)]
fn panels_of_rows<E: Element, W: Word, const P: usize>(
    data: &[E],
    source: &Rows<'_>,
    from: usize,
    out: &mut [u32],
    stride: usize,
) {
    /// Words of a panel that are written in a row, so that few lines are open at a time.
    const RUN: usize = 8;
    let (k, cols, first) = (source.rows(), source.columns.len(), from / W::ENTRIES);
    let words = k.div_ceil(W::ENTRIES);
    for run in (0..words).step_by(RUN) {
        let run = run..words.min(run + RUN);
        for (panel, start) in (0..cols).step_by(P).enumerate() {
            let width = P.min(cols - start);
            for next in run.end * W::ENTRIES..k.min((run.end + RUN) * W::ENTRIES) {
                let at = source.place(next).start + start;
                (0..P * size_of::<E>()).step_by(LINE).for_each(|line| fetch(data, at + line / size_of::<E>()));
            }
            let to = &mut out[panel * stride + (first + run.start) * P..][..run.len() * P];
            for (word, to) in run.clone().zip(to.as_chunks_mut::<P>().0) {
                let i = word * W::ENTRIES;
                let row = &data[source.place(i)][start..start + width];
                if W::ENTRIES == 1 {
                    words_of::<E, W, P>(row, row, to);
                } else if i + 1 < k {
                    words_of::<E, W, P>(row, &data[source.place(i + 1)][start..start + width], to);
                } else {
                    words_of::<E, W, P>(row, &[E::ZERO; P][..width], to);
                }
            }
        }
    }
}

#[inline(always)]
fn words_of<E: Element, W: Word, const P: usize>(first: &[E], second: &[E], to: &mut [u32; P]) {
    if let (Some(first), Some(second)) = (first.as_array::<P>(), second.as_array::<P>()) {
        for x in 0..P {
            to[x] = W::of(first[x], second[x]);
        }
    } else {
        to.fill(0);
        to.iter_mut().zip(first.iter().zip(second)).for_each(|(to, (a, b))| *to = W::of(*a, *b));
    }
}

/// `source: [outer, k]`: a word is made of neighbours, a panel of words that lie above one another.
#[inline(always)]
fn panels_of_columns<E: Element, const FAST: bool, W: Word, const P: usize>(
    data: &[E],
    source: &Rows<'_>,
    out: &mut [u32],
    stride: usize,
) {
    let (rows, words) = (source.rows(), source.columns.len().div_ceil(W::ENTRIES));
    for (panel, top) in (0..rows).step_by(P).enumerate() {
        let to = &mut out[panel * stride..][..words * P];
        for word in (0..words).step_by(SIDE) {
            for left in (0..P).step_by(SIDE) {
                let mut block = [[0; SIDE]; SIDE];
                for (i, words) in block.iter_mut().enumerate().take((P - left).min(rows.saturating_sub(top + left))) {
                    *words = words_of_row::<E, W>(&data[source.place(top + left + i)], word);
                    // The same words of the panel after this one.
                    if top + left + i + P < rows {
                        fetch(data, source.place(top + left + i + P).start + word * W::ENTRIES);
                    }
                }
                turn::<FAST>(&mut block);
                let width = SIDE.min(P - left);
                for (to, words) in to[word * P..].chunks_exact_mut(P).zip(&block) {
                    to[left..left + width].copy_from_slice(&words[..width]);
                }
            }
        }
    }
}

/// Words `word..word + 16` of a row; 0 beyond its end.
#[inline(always)]
fn words_of_row<E: Element, W: Word>(row: &[E], word: usize) -> [u32; SIDE] {
    let entries = &row[(word * W::ENTRIES).min(row.len())..];
    let mut words = [0; SIDE];
    if entries.len() >= SIDE * W::ENTRIES {
        let entries = &entries[..SIDE * W::ENTRIES];
        for (x, to) in words.iter_mut().enumerate() {
            *to = W::of(entries[x * W::ENTRIES], entries[x * W::ENTRIES + W::ENTRIES - 1]);
        }
    } else {
        for (to, entries) in words.iter_mut().zip(entries.chunks(W::ENTRIES)) {
            *to = W::of(entries[0], entries.get(1).copied().unwrap_or(E::ZERO));
        }
    }
    words
}

#[inline(always)]
fn tiles_body<E: Element, const FAST: bool>(
    data: &[E],
    source: &Rows<'_>,
    along: Depth,
    from: usize,
    out: &mut [u32],
    stride: usize,
) {
    const TILE: usize = amx::ROWS * amx::WORDS;
    match along {
        Depth::Columns => {
            let (rows, words) = (source.rows(), source.columns.len().div_ceil(2));
            for (panel, top) in (0..rows).step_by(amx::ROWS).enumerate() {
                for (word, tile) in (0..words).step_by(SIDE).zip(out[panel * stride..].chunks_exact_mut(TILE)) {
                    for (i, to) in tile.as_chunks_mut::<SIDE>().0.iter_mut().enumerate() {
                        let row = if top + i < rows { &data[source.place(top + i)] } else { &[] };
                        *to = words_of_row::<E, Pairs>(row, word);
                    }
                }
            }
        }
        Depth::Rows => {
            let (k, cols) = (source.rows(), source.columns.len());
            for i in (0..k).step_by(2 * SIDE) {
                for (panel, start) in (0..cols).step_by(amx::ROWS).enumerate() {
                    let tile = &mut out[panel * stride + (from + i) / 2 * amx::ROWS..][..TILE];
                    for (half, tile) in tile.as_chunks_mut::<{ SIDE * SIDE }>().0.iter_mut().enumerate() {
                        let mut block = [[0; SIDE]; SIDE];
                        let columns = cols.min(start + half * SIDE)..cols.min(start + (half + 1) * SIDE);
                        for (i, words) in (i..k).step_by(2).zip(&mut block) {
                            let row = &data[source.place(i)][columns.clone()];
                            if i + 1 < k {
                                words_of::<E, Pairs, SIDE>(row, &data[source.place(i + 1)][columns.clone()], words);
                            } else {
                                words_of::<E, Pairs, SIDE>(row, &[E::ZERO; SIDE][..row.len()], words);
                            }
                        }
                        turn::<FAST>(&mut block);
                        tile.as_chunks_mut::<SIDE>().0.copy_from_slice(&block);
                    }
                }
            }
        }
    }
}

/// Zeros the words that fill up the last tile of every rhs panel of a piece; arguments as those of [`panels`].
pub(super) fn fill_tile(source: &Rows<'_>, along: Depth, from: usize, out: &mut [u32], stride: usize) {
    let (k, n) = match along {
        Depth::Rows => (from + source.rows(), source.columns.len()),
        Depth::Columns => (source.columns.len(), source.rows()),
    };
    let words = k.div_ceil(2);
    for panel in 0..n.div_ceil(super::RHS_PANEL) {
        let end = panel * stride + words.next_multiple_of(amx::WORDS) * super::RHS_PANEL;
        out[panel * stride + words * super::RHS_PANEL..end].fill(0);
    }
}

/// Turns rows into columns.
#[inline(always)]
fn turn<const FAST: bool>(block: &mut Block) {
    #[cfg(target_arch = "x86_64")]
    if FAST {
        // SAFETY: only what is compiled for AVX-512 asks for it.
        return unsafe { turn_avx512(block) };
    }
    let rows = *block;
    for (j, to) in block.iter_mut().enumerate() {
        *to = std::array::from_fn(|i| rows[i][j]);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
fn turn_avx512(block: &mut Block) {
    use std::arch::x86_64::*;
    // SAFETY: a row is 64 bytes of the block.
    let r: [__m512i; SIDE] = std::array::from_fn(|i| unsafe { _mm512_loadu_si512(block[i].as_ptr().cast()) });
    // Pairs, then fours of words of one column within lanes of 128 bits; then lanes into place.
    let pairs: [__m512i; SIDE] = std::array::from_fn(|i| match i % 2 {
        0 => _mm512_unpacklo_epi32(r[i], r[i + 1]),
        _ => _mm512_unpackhi_epi32(r[i - 1], r[i]),
    });
    let fours: [__m512i; SIDE] = std::array::from_fn(|i| {
        let (group, column) = (i / 4 * 4, i % 4);
        let (a, b) = (pairs[group + column / 2], pairs[group + 2 + column / 2]);
        if column % 2 == 0 { _mm512_unpacklo_epi64(a, b) } else { _mm512_unpackhi_epi64(a, b) }
    });
    for column in 0..4 {
        let [a, b, c, d] = [fours[column], fours[column + 4], fours[column + 8], fours[column + 12]];
        let (ab_even, ab_odd) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b));
        let (cd_even, cd_odd) = (_mm512_shuffle_i32x4::<0x88>(c, d), _mm512_shuffle_i32x4::<0xdd>(c, d));
        let lanes = [
            _mm512_shuffle_i32x4::<0x88>(ab_even, cd_even),
            _mm512_shuffle_i32x4::<0x88>(ab_odd, cd_odd),
            _mm512_shuffle_i32x4::<0xdd>(ab_even, cd_even),
            _mm512_shuffle_i32x4::<0xdd>(ab_odd, cd_odd),
        ];
        for (lane, words) in lanes.into_iter().enumerate() {
            // SAFETY: as above.
            unsafe { _mm512_storeu_si512(block[4 * lane + column].as_mut_ptr().cast(), words) };
        }
    }
}
