//! Statistics of one tile of a row.
//!
//! A tile stays in the L1 cache between the passes for its maximum and its sums, and the next one is prefetched. The
//! sums are bound by multiply-adds, 12 per entry; bf16 is converted in registers, and there are no branches. Of 32
//! registers, the sums take 2, constants 14 and a vector of entries 4. A caller with enough memory keeps e_j, which
//! saves the exponentials in the gradient.

use super::exp::exp;
use crate::arch::{MulAdd, prefetch, simd_dispatch};
use crate::convert::Element;

/// The number of vocabulary entries that are summed in f32 before they are added to the row's f64 sums.
pub(crate) const TILE: usize = 512;

/// The number of elements that are processed in parallel: one AVX-512 register, or two or four smaller ones.
const LANES: usize = 16;

/// The statistics of one tile.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Partial {
    /// The maximum of the logits except for the target's; -inf if there are none.
    pub(super) max: f32,
    /// Sum over j != y of e_j, relative to `max`.
    pub(super) sum: f32,
    /// Sum over j != y of e_j d_j, relative to `max`.
    pub(super) dot: f32,
    /// The target's logit, in the tile that contains it.
    pub(super) target: f32,
}

impl Partial {
    simd_dispatch! {
        /// Computes the statistics of `z`, at most [`TILE`] logits, without `target`.
        pub(crate) fn new[E: Element](z: &[E], target: Option<usize>, scale: f32) -> Partial = partial
    }
    simd_dispatch! {
        /// Like [`Partial::new`], but also stores e_j, relative to the tile's maximum, in `kept`, of the same length.
        pub(crate) fn keeping[E: Element](z: &[E], target: Option<usize>, scale: f32, kept: &mut [f32]) -> Partial
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
    // Replace the target by -inf, which adds nothing.
    let mut others = [f32::NEG_INFINITY; TILE];
    others.iter_mut().zip(z).for_each(|(other, z)| *other = z.widened());
    others[y] = f32::NEG_INFINITY;
    Partial { target: z[y].widened(), ..sums::<M>(&others[..z.len()], scale, kept) }
}

#[inline(always)]
fn sums<M: MulAdd>(z: &[impl Element], scale: f32, kept: Option<&mut [f32]>) -> Partial {
    let (chunks, rest) = z.as_chunks::<LANES>();
    // NaN is ignored here, but not in the sums.
    let greater = |a: f32, b: f32| if a > b { a } else { b };
    let mut max = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for l in 0..LANES {
            max[l] = greater(chunk[l].widened(), max[l]);
        }
    }
    let max = rest.iter().fold(fold(max, greater), |max, z| greater(z.widened(), max));
    // If all logits are -inf, any finite number keeps the differences at -inf.
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
        // Prefetch the next tile, because the pass for its maximum would be bound by memory.
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

/// Reduces the lanes with `f` by halving: a few vector operations instead of a chain of [`LANES`].
#[inline(always)]
fn fold(lanes: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let eight: [f32; 8] = std::array::from_fn(|l| f(lanes[l], lanes[l + 8]));
    let four: [f32; 4] = std::array::from_fn(|l| f(eight[l], eight[l + 4]));
    f(f(four[0], four[2]), f(four[1], four[3]))
}
