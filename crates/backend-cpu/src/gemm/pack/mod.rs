//! Packs operands into panels of words; see [`super`] for the layouts.
//!
//! Elements are widened, paired and transposed during the copy into panels, without another copy. Blocks of 16 x 16
//! words are transposed in registers if there are 32 of them. Source rows are more streams than the hardware prefetcher
//! follows, so the next rows are prefetched explicitly.
#![allow(unsafe_code)]

mod source;
mod word;

pub(crate) use source::{KAxis, Rows};
pub(crate) use word::{Bf16Pair, F32Word, RoundedF32, RoundedPair};

use crate::arch::panel::RHS_PANEL;
use crate::arch::{IsaToken, amx, generic, prefetch};
use crate::host::Slice;
use half::bf16;
use word::{Packable, SIDE, Word, whole_words, words_of, words_of_row};

/// The bytes of a cache line.
const LINE: usize = 64;

/// Defines `$name`, which runs `$body` on the elements of its source, with 512-bit registers if available.
macro_rules! by_element_and_isa {
    ($(#[$meta:meta])* fn $name:ident[$($generic:tt)*][$($argument:tt)*] = $body:ident) => {
        $(#[$meta])*
        pub(super) fn $name<$($generic)*>(
            isa: IsaToken, source: &Rows<'_>, along: KAxis, from: usize, out: &mut [u32], stride: usize,
        ) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
            fn avx512<E: Packable, $($generic)*>(
                data: &[E], source: &Rows<'_>, along: KAxis, from: usize, out: &mut [u32], stride: usize,
            ) {
                $body::<E, true, $($argument)*>(data, source, along, from, out, stride)
            }
            fn run<E: Packable, $($generic)*>(
                isa: IsaToken, data: &[E], source: &Rows<'_>, along: KAxis, from: usize, out: &mut [u32], stride: usize,
            ) {
                #[cfg(target_arch = "x86_64")]
                if isa.get() >= crate::arch::Isa::Avx512 {
                    // SAFETY: a token exists only for instruction sets of this processor.
                    return unsafe { avx512::<E, $($argument)*>(data, source, along, from, out, stride) };
                }
                let _ = isa;
                $body::<E, false, $($argument)*>(data, source, along, from, out, stride)
            }
            let data = source.data;
            match data {
                Slice::F32(data) => run::<f32, $($argument)*>(isa, data, source, along, from, out, stride),
                Slice::Bf16(data) => run::<bf16, $($argument)*>(isa, data, source, along, from, out, stride),
            }
        }
    };
}

by_element_and_isa! {
    /// Packs `source` into panels `[K', P]`; for the arguments, see [`crate::gemm::Gemm::pack_lhs`].
    fn panels[W: Word, const P: usize][W, P] = panels_body
}

by_element_and_isa! {
    /// Packs `source` into panels `[K' / 16, 32, 16]` of bf16 pairs.
    fn tiles[W: Word][W] = tiles_body
}

by_element_and_isa! {
    /// Packs the rows of `source: [m, k]`, with K along its columns, as words `[K', m]`; `stride` is m.
    fn interleaved[W: Word][W] = interleaved_body
}

#[inline(always)]
fn interleaved_body<E: Packable, const FAST: bool, W: Word>(
    data: &[E],
    source: &Rows<'_>,
    _: KAxis,
    _: usize,
    out: &mut [u32],
    stride: usize,
) {
    for i in 0..source.rows() {
        let row = &data[source.place(i)];
        for (block, to) in out.chunks_mut(SIDE * stride.max(1)).enumerate() {
            let words = words_of_row::<E, W>(row, block * SIDE);
            to.iter_mut().skip(i).step_by(stride).zip(words).for_each(|(to, word)| *to = word);
        }
    }
}

#[inline(always)]
fn panels_body<E: Packable, const FAST: bool, W: Word, const P: usize>(
    data: &[E],
    source: &Rows<'_>,
    along: KAxis,
    from: usize,
    out: &mut [u32],
    stride: usize,
) {
    match along {
        KAxis::Rows => panels_of_rows::<E, W, P>(data, source, from, out, stride),
        KAxis::Columns => panels_of_columns::<E, FAST, W, P>(data, source, out, stride),
    }
}

/// `source: [k, outer]`: a word combines elements of neighbouring rows.
#[inline(always)]
fn panels_of_rows<E: Packable, W: Word, const P: usize>(
    data: &[E],
    source: &Rows<'_>,
    from: usize,
    out: &mut [u32],
    stride: usize,
) {
    /// The words of a panel that are written in a row, so that few cache lines are in use at a time.
    const RUN: usize = 8;
    let (k, cols, first) = (source.rows(), source.columns.len(), from / W::ENTRIES);
    let words = k.div_ceil(W::ENTRIES);
    for run in (0..words).step_by(RUN) {
        let run = run..words.min(run + RUN);
        for (panel, start) in (0..cols).step_by(P).enumerate() {
            let width = P.min(cols - start);
            for next in run.end * W::ENTRIES..k.min((run.end + RUN) * W::ENTRIES) {
                let at = data.as_ptr().wrapping_add(source.place(next).start + start);
                (0..P * size_of::<E>()).step_by(LINE).for_each(|line| prefetch(at.wrapping_byte_add(line)));
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

/// `source: [outer, k]`: a word combines neighbours of a row; a panel interleaves the words of its rows.
#[inline(always)]
fn panels_of_columns<E: Packable, const FAST: bool, W: Word, const P: usize>(
    data: &[E],
    source: &Rows<'_>,
    out: &mut [u32],
    stride: usize,
) {
    let (rows, words) = (source.rows(), source.columns.len().div_ceil(W::ENTRIES));
    for (panel, top) in (0..rows).step_by(P).enumerate() {
        let to = &mut out[panel * stride..][..words * P];
        for word in (0..words).step_by(SIDE) {
            // The branch is outside of the loop over rows, so that words go from one register to another.
            let is_whole = source.columns.len() >= (word + SIDE) * W::ENTRIES;
            for left in (0..P).step_by(SIDE) {
                let mut block = [[0; SIDE]; SIDE];
                let height = SIDE.min(P - left).min(rows.saturating_sub(top + left));
                let rows_of = block[..height].iter_mut().zip(top + left..);
                let row = |i: usize| {
                    // Prefetch the same words for the next panel.
                    if i + P < rows {
                        prefetch(data.as_ptr().wrapping_add(source.place(i + P).start + word * W::ENTRIES));
                    }
                    &data[source.place(i)]
                };
                if is_whole {
                    rows_of.for_each(|(words, i)| *words = whole_words::<E, W>(&row(i)[word * W::ENTRIES..]));
                } else {
                    rows_of.for_each(|(words, i)| *words = words_of_row::<E, W>(row(i), word));
                }
                transpose_16x16::<FAST>(&mut block);
                let width = SIDE.min(P - left);
                for (to, words) in to[word * P..].chunks_exact_mut(P).zip(&block) {
                    to[left..left + width].copy_from_slice(&words[..width]);
                }
            }
        }
    }
}

#[inline(always)]
fn tiles_body<E: Packable, const FAST: bool, W: Word>(
    data: &[E],
    source: &Rows<'_>,
    along: KAxis,
    from: usize,
    out: &mut [u32],
    stride: usize,
) {
    const TILE: usize = amx::LHS_PANEL * amx::WORDS;
    match along {
        KAxis::Columns => {
            let (rows, words) = (source.rows(), source.columns.len().div_ceil(2));
            for (panel, top) in (0..rows).step_by(amx::LHS_PANEL).enumerate() {
                for (word, tile) in (0..words).step_by(SIDE).zip(out[panel * stride..].chunks_exact_mut(TILE)) {
                    for (i, to) in tile.as_chunks_mut::<SIDE>().0.iter_mut().enumerate() {
                        let row = if top + i < rows { &data[source.place(top + i)] } else { &[] };
                        *to = words_of_row::<E, W>(row, word);
                    }
                }
            }
        }
        KAxis::Rows => {
            let (k, cols) = (source.rows(), source.columns.len());
            for i in (0..k).step_by(2 * SIDE) {
                for (panel, start) in (0..cols).step_by(amx::LHS_PANEL).enumerate() {
                    let tile = &mut out[panel * stride + (from + i) / 2 * amx::LHS_PANEL..][..TILE];
                    for (half, tile) in tile.as_chunks_mut::<{ SIDE * SIDE }>().0.iter_mut().enumerate() {
                        let mut block = [[0; SIDE]; SIDE];
                        let columns = cols.min(start + half * SIDE)..cols.min(start + (half + 1) * SIDE);
                        for (i, words) in (i..k).step_by(2).zip(&mut block) {
                            let row = &data[source.place(i)][columns.clone()];
                            if i + 1 < k {
                                words_of::<E, W, SIDE>(row, &data[source.place(i + 1)][columns.clone()], words);
                            } else {
                                words_of::<E, W, SIDE>(row, &[E::ZERO; SIDE][..row.len()], words);
                            }
                        }
                        transpose_16x16::<FAST>(&mut block);
                        tile.as_chunks_mut::<SIDE>().0.copy_from_slice(&block);
                    }
                }
            }
        }
    }
}

/// Fills the last tile of every rhs panel of a piece with zero words; for the arguments, see [`panels`].
pub(super) fn fill_tile(source: &Rows<'_>, along: KAxis, from: usize, out: &mut [u32], stride: usize) {
    let (k, n) = match along {
        KAxis::Rows => (from + source.rows(), source.columns.len()),
        KAxis::Columns => (source.columns.len(), source.rows()),
    };
    let words = k.div_ceil(2);
    for panel in 0..n.div_ceil(RHS_PANEL) {
        let end = panel * stride + words.next_multiple_of(amx::WORDS) * RHS_PANEL;
        out[panel * stride + words * RHS_PANEL..end].fill(0);
    }
}

/// Transposes a block of words. `FAST` requires a caller that is compiled for AVX-512.
#[inline(always)]
fn transpose_16x16<const FAST: bool>(block: &mut [[u32; SIDE]; SIDE]) {
    #[cfg(target_arch = "x86_64")]
    if FAST {
        // SAFETY: only callers that are compiled for AVX-512 set `FAST`.
        return unsafe { crate::arch::x86_64::avx512::transpose_16x16(block) };
    }
    generic::transpose_16x16(block);
}
