//! Statistics of one tile of a row.
//!
//! A tile stays in the first-level cache between its maximum and its sums, while the next one is fetched. The sums are
//! bound by multiply-adds, 12 per entry; conversions from and to bf16 happen in registers; no branch. Of 32 registers the
//! sums take 2, constants 14 and a vector of entries 4. A caller that has room keeps e_j, and saves a gradient its exps.

use super::exp::exp;
use crate::arch::{MulAdd, prefetch, simd_dispatch};
use crate::convert::Element;
use half::bf16;

/// Vocabulary entries that are summed in f32 before they join the row's f64 sums.
pub(crate) const TILE: usize = 512;

/// Elements that are handled side by side: a register of AVX-512, or two or four of less.
const LANES: usize = 16;

/// What one tile adds to a row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Partial {
    /// Largest logit but the target's; -inf when there is none.
    pub(super) max: f32,
    /// Sum over j != y of e_j, relative to `max`.
    pub(super) sum: f32,
    /// Sum over j != y of e_j d_j, relative to `max`.
    pub(super) dot: f32,
    /// The target's logit, in the tile that holds it.
    pub(super) target: f32,
}

impl Partial {
    simd_dispatch! {
        /// `z`: at most [`TILE`] logits, of which `target` is left out.
        pub(crate) fn new(z: &[f32], target: Option<usize>, scale: f32) -> Partial = partial
    }
    simd_dispatch! {
        /// [`Partial::new`] of bf16 logits.
        pub(crate) fn of_bf16(z: &[bf16], target: Option<usize>, scale: f32) -> Partial = partial
    }
    simd_dispatch! {
        /// [`Partial::new`] that leaves e_j, relative to the tile's own maximum, in `kept`, of the same length.
        pub(crate) fn keeping(z: &[f32], target: Option<usize>, scale: f32, kept: &mut [f32]) -> Partial
            = partial_keeping
    }
    simd_dispatch! {
        /// [`Partial::keeping`] of bf16 logits.
        pub(crate) fn keeping_bf16(z: &[bf16], target: Option<usize>, scale: f32, kept: &mut [f32]) -> Partial
            = partial_keeping
    }
}

#[inline(always)]
fn partial<M: MulAdd>(z: &[impl Element], target: Option<usize>, scale: f32) -> Partial {
    without::<M>(z, target, scale, None)
}

#[inline(always)]
fn partial_keeping<M: MulAdd>(z: &[impl Element], target: Option<usize>, scale: f32, kept: &mut [f32]) -> Partial {
    without::<M>(z, target, scale, Some(kept))
}

#[inline(always)]
fn without<M: MulAdd>(z: &[impl Element], target: Option<usize>, scale: f32, kept: Option<&mut [f32]>) -> Partial {
    let Some(y) = target else { return sums::<M>(z, scale, kept) };
    // A logit of -inf adds nothing.
    let mut others = [f32::NEG_INFINITY; TILE];
    others.iter_mut().zip(z).for_each(|(other, z)| *other = z.widened());
    others[y] = f32::NEG_INFINITY;
    Partial { target: z[y].widened(), ..sums::<M>(&others[..z.len()], scale, kept) }
}

#[inline(always)]
fn sums<M: MulAdd>(z: &[impl Element], scale: f32, kept: Option<&mut [f32]>) -> Partial {
    let (chunks, rest) = z.as_chunks::<LANES>();
    // NaN does not count here, but in the sums.
    let greater = |a: f32, b: f32| if a > b { a } else { b };
    let mut max = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for l in 0..LANES {
            max[l] = greater(chunk[l].widened(), max[l]);
        }
    }
    let max = rest.iter().fold(fold(max, greater), |max, z| greater(z.widened(), max));
    // A tile of -inf only: any finite number keeps the differences at -inf.
    let from = if max == f32::NEG_INFINITY { 0.0 } else { max };

    let (mut sum, mut dot) = ([0.0_f32; LANES], [0.0_f32; LANES]);
    let mut add = |chunk: [f32; LANES]| {
        let mut kept = [0.0; LANES];
        for l in 0..LANES {
            let (d, e) = exp::<M>((chunk[l] - from) * scale);
            kept[l] = e;
            sum[l] += e;
            dot[l] = M::mul_add(e, d, dot[l]);
        }
        kept
    };
    let (mut kept, kept_rest) = kept.map(<[f32]>::as_chunks_mut::<LANES>).unzip();
    for (i, chunk) in chunks.iter().enumerate() {
        // The search for the next tile's maximum has nothing else to do, and would wait for memory.
        prefetch(chunk.as_ptr().wrapping_add(TILE));
        let e = add(chunk.map(Element::widened));
        if let Some(kept) = &mut kept {
            kept[i] = e;
        }
    }
    if !rest.is_empty() {
        let mut last = [f32::NEG_INFINITY; LANES];
        last.iter_mut().zip(rest).for_each(|(last, z)| *last = z.widened());
        let e = add(last);
        if let Some(kept) = kept_rest {
            kept.copy_from_slice(&e[..rest.len()]);
        }
    }
    Partial { max, sum: fold(sum, |a, b| a + b), dot: fold(dot, |a, b| a + b), target: 0.0 }
}

/// `f` over all lanes, halves first: as many operations as registers halve, not a chain of [`LANES`].
#[inline(always)]
fn fold(lanes: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let eight: [f32; 8] = std::array::from_fn(|l| f(lanes[l], lanes[l + 8]));
    let four: [f32; 4] = std::array::from_fn(|l| f(eight[l], eight[l + 4]));
    f(f(four[0], four[2]), f(four[1], four[3]))
}
